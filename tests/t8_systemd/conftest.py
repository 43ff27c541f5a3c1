"""One container for all tests of this level, booted once, with the package installed."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.container.guest import Guest, booted

BROKEN = pytest.StashKey[bool]()
"""Whether a test has failed since the container was last restored."""
STATE = "etc/fstab etc/default/ggroupfs etc/ggroupfs etc/systemd/system"
"""The files that tests change."""
UNITS = "systemctl list-units --type=service,slice --plain --no-legend | cut -d ' ' -f 1 | sort"
SAVE = f"""
tar -cf /root/state.tar -C / {STATE}
{UNITS} >/root/units
"""
RESTORE = f"""
test -e /root/state.tar || exit 0
systemctl cancel
{UNITS} | comm -13 /root/units - >/root/others
xargs -r systemctl kill -s KILL </root/others
xargs -r systemctl stop ggroupfs run-ggroup.mount </root/others
umount --lazy /run/ggroup
systemctl stop ggroupfs
(cd / && rm -rf {STATE} && tar -xf /root/state.tar) || exit
systemctl daemon-reload && systemctl reset-failed
"""
"""Removes what a failed test has left: waiting jobs, services, units and options."""
RESTORE_S = 600
FILES = "find / -xdev -not -path '/root/*' -not -path '/var/log/*' -not -path '/tmp/*' | LC_ALL=C sort"


@pytest.fixture(scope="session")
def machine() -> Iterator[Guest]:
    """The booted container, in which nothing is installed."""
    place = Path(os.environ["GGROUP_GUEST"])
    with booted(place / "root.tar", place / "share") as guest:
        yield guest


@pytest.fixture(scope="session")
def installed(machine: Guest) -> Guest:
    """The container with the package installed."""
    machine.ok(f"{FILES} >/root/before")
    machine.ok("journalctl -q --cursor-file=/root/cursor >/dev/null")
    machine.ok("dpkg -i /mnt/ggroupfs.deb")
    machine.ok(SAVE)
    return machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember that a test failed, in its setup and teardown as well."""
    report = yield
    if report.failed:
        item.session.stash[BROKEN] = True
    return report


@pytest.fixture(autouse=True)
def restored(request: pytest.FixtureRequest) -> None:
    """Restore the container after a failed test, so that the next ones do not fail because of it."""
    if "machine" in request.fixturenames and request.session.stash.get(BROKEN, False):
        machine: Guest = request.getfixturevalue("machine")
        machine.ok(RESTORE, RESTORE_S)
        request.session.stash[BROKEN] = False


@pytest.fixture
def guest(installed: Guest) -> Iterator[Guest]:
    """The container with the tree mounted by the service. After the test no unit is left in the failed state."""
    installed.ok("systemctl start ggroupfs")
    yield installed
    installed.ok("systemctl reset-failed")
