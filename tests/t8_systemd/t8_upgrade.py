"""The end of the package: an upgrade, a removal and a purge. These tests run last, in this order."""

from __future__ import annotations

from tests.container.guest import Guest
from tests.t8_systemd.conftest import FILES
from tests.t8_systemd.units import MIB, daemon, holding, until_holds


def processor_s(guest: Guest, pid: int) -> float:
    """The CPU time of a process, in seconds (proc_pid_stat(5))."""
    return sum(map(int, guest.ok(f"cat /proc/{pid}/stat").rpartition(")")[2].split()[11:13])) / 100


def test_an_upgrade_goes_on(guest: Guest) -> None:
    """The same process runs the new version, and run-time settings still hold. The administrator's changes of files are
    kept, and take effect at the next start."""
    guest.ok("sed -i 's/^OPTIONS=.*/OPTIONS=-o soft.gmem=1G/' /etc/default/ggroupfs")
    guest.ok("touch /etc/ggroupfs/slices.d/mine.conf")
    guest.ok("mkdir /run/ggroup/slice/kept.slice && echo 1 >/run/ggroup/slice/kept.slice/0/compute.freeze")
    old, since = daemon(guest), guest.ok("stat -c %Z.%z /run/ggroupfs/ggroup.sock")
    with holding(guest, "during", 16 * MIB) as place:
        until_holds(guest, place, 16 * MIB)
        before_s = processor_s(guest, old)
        guest.ok("dpkg -i /mnt/ggroupfs-next.deb")
        assert processor_s(guest, old) - before_s < 2, "the tree answers again"
        assert guest.ok("dpkg-query -W -f '${Version} ${Status}' ggroupfs").endswith("+next install ok installed")
        assert guest.ok("systemctl is-active ggroupfs") == "active\n"
        assert daemon(guest) == old
        assert guest.ok("stat -c %Z.%z /run/ggroupfs/ggroup.sock") != since
        assert guest.ok("cat /run/ggroup/slice/kept.slice/0/compute.freeze") == "1\n"
        until_holds(guest, place, 16 * MIB)
        guest.ok("systemctl restart ggroupfs")
        assert guest.ok("cat /run/ggroup/gpus/0/gmem.capacity") == f"{1024 * MIB}\n"
        until_holds(guest, place, 16 * MIB)
    assert guest.run("test -e /etc/ggroupfs/slices.d/mine.conf").code == 0


def test_removal_unmounts_and_leaves_only_configuration(guest: Guest) -> None:
    pid = daemon(guest)
    guest.ok("dpkg -r ggroupfs")
    assert guest.run("findmnt /run/ggroup").code == 1
    assert guest.run(f"test -e /proc/{pid}").code == 1
    assert guest.run("test -e /run/ggroup || test -e /run/ggroupfs").code == 1
    left = guest.ok("find /etc /usr -name '*ggroup*'").split()
    assert [path for path in left if path.startswith("/usr/")] == []
    assert {"/etc/default/ggroupfs", "/etc/ggroupfs"} <= set(left)


def test_purge_leaves_nothing(machine: Guest) -> None:
    """Only the user ggroup stays, as Debian's policy is for every user that a package creates."""
    machine.ok("dpkg -P ggroupfs")
    machine.ok(f"{FILES} >/root/after")
    new = machine.ok("comm -13 /root/before /root/after").split("\n")[:-1]
    # The lock and the backups of the files in which that user is.
    backups = {"/etc/.pwd.lock", "/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-"}
    assert set(new) - backups == set()
    assert machine.ok("comm -23 /root/before /root/after") == ""
    for what in ("list-units --all --plain", "list-unit-files"):
        done = machine.run(f"systemctl {what} --no-legend '*ggroup*'")
        assert (done.out, done.err) == ("", "")
