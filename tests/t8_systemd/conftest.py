"""One machine for all of them, booted once, and the package in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vm.guest import Guest, booted
from tests.vm.run import modules_of, newest_kernel

FILES = "find / -xdev -not -path '/root/*' -not -path '/var/log/*' -not -path '/tmp/*' | LC_ALL=C sort"


@pytest.fixture(scope="session")
def machine() -> Iterator[Guest]:
    """It has booted, and nothing is installed."""
    place = Path(os.environ["GGROUP_GUEST"])
    kernel = newest_kernel()
    modules = modules_of(kernel)
    assert modules is not None
    with booted(kernel, modules, place / "root.ext4", place / "share") as guest:
        yield guest
        assert not guest.complaints()


@pytest.fixture(scope="session")
def installed(machine: Guest) -> Guest:
    """The package is installed."""
    machine.ok(f"{FILES} >/root/before")
    machine.ok("journalctl -q --cursor-file=/root/cursor >/dev/null")
    machine.ok("dpkg -i /mnt/ggroupfs.deb", 300)
    return machine


@pytest.fixture
def guest(installed: Guest) -> Iterator[Guest]:
    """The service has mounted the tree. After the test nothing of it is left that failed."""
    installed.ok("systemctl start ggroupfs")
    yield installed
    installed.ok("systemctl reset-failed")
