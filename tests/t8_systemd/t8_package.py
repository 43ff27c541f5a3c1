"""The package as installed: what runs, what is enabled, and what is logged."""

from __future__ import annotations

import re

from tests.container.guest import Guest
from tests.t8_systemd.units import daemon

EXPOSURE = 4.3
"""The highest exposure that `systemd-analyze security` may report; systemd/ggroupfs.service says what it is due to. Of
it 0.3 are the capabilities by which the control daemon of a space runs as its user."""


def test_the_service_is_active_and_the_tree_is_there(installed: Guest) -> None:
    """This is the first test, so only the installation can have started the service."""
    assert installed.ok("systemctl is-active ggroupfs") == "active\n"
    assert installed.ok("findmnt -n -o FSTYPE /run/ggroup") == "fuse.ggroupfs\n"
    assert f"pid {daemon(installed)}\n" in installed.ok("cat /run/ggroup/ggroup.backend")
    status = installed.ok("systemctl status --no-pager ggroupfs")
    assert 'Status: "/run/ggroup: 1 soft GPU, ledger soft"' in status


def test_nothing_was_complained_of(installed: Guest) -> None:
    """Neither the service nor systemd logged a warning."""
    match = "_SYSTEMD_UNIT=ggroupfs.service + _PID=1"
    done = installed.run(f"journalctl -q --cursor-file=/root/cursor -p warning {match}")
    assert (done.out, done.err) == ("", "")
    assert installed.ok("systemctl --failed --plain --no-legend") == ""
    units = "ggroupfs.service ggroupfs-metrics.service ggroupfs-policy@lanes.service run-ggroup.mount"
    done = installed.run(f"systemd-analyze verify --man=no {units}")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_what_is_enabled(installed: Guest) -> None:
    enabled = installed.run("systemctl is-enabled ggroupfs.service ggroupfs-metrics.service run-ggroup.mount").out
    assert enabled.split() == ["enabled", "disabled", "disabled"]


def test_how_exposed_the_service_is(installed: Guest) -> None:
    words = installed.ok("systemd-analyze security --no-pager ggroupfs.service").splitlines()[-1]
    found = re.search(r"Overall exposure level for ggroupfs.service: (\d+\.\d)", words)
    assert found is not None, words
    assert float(found[1]) <= EXPOSURE


def test_it_is_in_the_hosts_mount_namespace(installed: Guest) -> None:
    """The mount has to be visible outside the service. Its network namespace is its own, and empty."""
    pid = daemon(installed)
    host, own = installed.ok(f"readlink /proc/1/ns/mnt /proc/{pid}/ns/mnt").split()
    assert host == own
    host, own = installed.ok(f"readlink /proc/1/ns/net /proc/{pid}/ns/net").split()
    assert host != own


def test_the_command_and_its_tenant(guest: Guest) -> None:
    """The command finds its own modules and writes no files next to them. A tenant uses the same tree."""
    line = guest.ok("ggroupfs tenant --gmem 16M --kernel 50ms --report 1 --seconds 1").splitlines()[-1]
    assert '"corrupt": 0' in line
    assert guest.ok("ggroupfs show").startswith("PID")
    assert guest.ok("find /usr/lib/ggroupfs -type f -newer /root/cursor") == ""


def test_a_user_without_rights_reads_and_does_not_write(guest: Guest) -> None:
    as_user = "setpriv --reuid ggroup --regid ggroup --clear-groups"
    assert "gmem.limit.high enforced" in guest.ok(f"{as_user} cat /run/ggroup/ggroup.capabilities")
    assert guest.run(f"{as_user} mkdir /run/ggroup/slice/theirs").code != 0
    assert guest.run(f"{as_user} sh -c 'echo >/etc/ggroupfs/slices.d/theirs.conf'").code != 0
