"""One guest for all tests of containers, with Debian's podman and crun, both packages, and images of other suites."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.guest import Guest, booted
from tests.t8_containers.engine import CONFIGURED, GONE_S, IMAGES, NO_SLICE


@pytest.fixture(scope="session")
def machine() -> Iterator[Guest]:
    """A booted guest in which one command has installed the two packages."""
    place = Path(os.environ["GGROUP_CONTAINERS"])
    with booted(place / "root.tar", place / "share") as guest:
        # A test starts Docker itself, with a configuration that works here.
        guest.ok("systemctl disable --now docker.socket docker containerd && systemctl reset-failed")
        guest.ok("dpkg -i /mnt/ggroupfs.deb /mnt/ggroupfs-container.deb")
        yield guest


@pytest.fixture(scope="session")
def engine(machine: Guest) -> Guest:
    """The guest with podman's images, and with its own root as one more image, which has the ggroupfs command."""
    machine.write("/etc/containers/containers.conf", CONFIGURED)
    for image in IMAGES:
        machine.ok(f"podman import -q /mnt/{image}.tar {image}")
    machine.ok("mkdir /srv/own && mount --bind / /srv/own")
    return machine


@pytest.fixture
def guest(engine: Guest) -> Iterator[Guest]:
    """A mounted tree, whose devices are registered. After the test no container is left, and no slice of one."""
    engine.ok("systemctl start ggroupfs ggroupfs-cdi")
    yield engine
    engine.ok("podman rm -f -t 0 -a")
    engine.until(NO_SLICE, "no slice is left", GONE_S)
