"""The service and the mount units, in normal operation and after failures."""

from __future__ import annotations

from tests.container.guest import Guest
from tests.t8_systemd.units import MIB, SLICES, daemon, holding, mounted_with, until_holds, until_mounted_again

KILL = """
import sys

sys.path.insert(0, "/usr/lib/ggroupfs")

import trio
from backend.process.exits import ExitWatch
from backend.process.identity import identify


async def main():
    watch, process = ExitWatch(lambda process: None), identify(int(sys.argv[1]))
    await watch.watch(process)
    watch.signal(process, 9)


trio.run(main)
"""
"""A program that kills a process with the daemon's own code."""


def test_services_and_slices_are_in_the_tree(guest: Guest) -> None:
    """Each service is at the path of its cgroup, a slice has the sum, and both vanish when the services end."""
    with (
        holding(guest, "one", 64 * MIB, slice_="gpu.slice") as one,
        holding(guest, "two", 32 * MIB, slice_="gpu.slice") as two,
    ):
        until_holds(guest, one, 64 * MIB)
        until_holds(guest, two, 32 * MIB)
        until_holds(guest, f"{SLICES}/gpu.slice/0", 96 * MIB)
    guest.until(f"! test -e {SLICES}/gpu.slice", "the slice is gone")


def test_a_process_that_moves_takes_its_memory_along(guest: Guest) -> None:
    with (
        holding(guest, "from", 64 * MIB, slice_="a.slice") as old,
        holding(guest, "to", 32 * MIB, slice_="b.slice") as new,
    ):
        until_holds(guest, old, 64 * MIB)
        until_holds(guest, new, 32 * MIB)
        guest.ok("systemctl show -P MainPID from >/sys/fs/cgroup/b.slice/to.service/cgroup.procs")
        until_holds(guest, new, 96 * MIB)
        guest.until(f"! test -e {SLICES}/a.slice", "nobody is in the old one")


def test_a_daemon_that_is_killed_comes_back(guest: Guest) -> None:
    """The mount comes back, and so do the programs' control files, since the software GPU's programs connect again."""
    with holding(guest, "survivor", 64 * MIB) as place:
        until_holds(guest, place, 64 * MIB)
        dead = daemon(guest)
        guest.ok("systemctl kill -s KILL ggroupfs")
        until_mounted_again(guest, dead)
        # The CPU time until the mount was back: the elapsed time depends on what else is running.
        started_s = int(guest.ok("systemctl show -P CPUUsageNSec ggroupfs")) / 1e9
        assert guest.ok("systemctl show -P RestartUSec ggroupfs") == "500ms\n"
        assert 0.5 + started_s < 2, "the mount is back"
        until_holds(guest, place, 64 * MIB)
        guest.ok(f"echo 32M >{place}/gmem.limit.high")
        until_holds(guest, place, 32 * MIB)
    assert guest.ok("findmnt -n -o TARGET /run/ggroup").split() == ["/run/ggroup"]
    assert guest.ok("ls /run/ggroupfs").count(".sock") == 1


def test_a_container_has_the_tree_of_the_next_daemon(guest: Guest) -> None:
    """The container sees it below the parent directory, after an upgrade and a kill, as podman's do with rslave."""
    words = "unshare --mount --propagation slave sh -c 'mount --rbind /run/ggroup-shared /mnt && exec sleep infinity'"
    guest.ok(f"systemd-run -q --unit container {words}")
    guest.until("nsenter -m -t $(systemctl show -P MainPID container) test -e /mnt/tree/gpus", "the container has it")
    look = "nsenter -m -t $(systemctl show -P MainPID container) cat /mnt/tree/ggroup.backend"
    served = guest.ok("cat /run/ggroup/ggroup.backend")
    assert guest.ok(look) == served
    guest.ok("ggroupfs upgrade")
    assert guest.ok(look) == served
    dead = daemon(guest)
    guest.ok("systemctl kill -s KILL ggroupfs")
    until_mounted_again(guest, dead)
    assert guest.ok(look) == guest.ok("cat /run/ggroup/ggroup.backend")
    guest.ok("systemctl stop container")


def test_a_daemon_that_hangs_is_found_by_the_watchdog(guest: Guest) -> None:
    """The daemon is stopped by a signal, so that it hangs. systemd ends it with SIGKILL and starts another one."""
    stopped = daemon(guest)
    guest.ok(f"kill -STOP {stopped}")
    until_mounted_again(guest, stopped)
    said = guest.ok(f"journalctl -q --no-pager _PID=1 -u ggroupfs -g 'Watchdog timeout|Killing process {stopped} '")
    assert "Watchdog timeout (limit 30s)" in said
    assert "with signal SIGKILL" in said


def test_a_tree_whose_mount_is_gone_is_found_by_the_watchdog(guest: Guest) -> None:
    """The daemon runs but no process can reach it. A file that is still open keeps it from noticing the unmount."""
    forgotten = daemon(guest)
    guest.ok("systemd-run -q --unit=keeps -p StandardInput=file:/run/ggroup/ggroup.backend sleep 600")
    try:
        guest.ok("umount --lazy /run/ggroup")
        until_mounted_again(guest, forgotten)
    finally:
        guest.ok("systemctl stop keeps")
    assert "the watchdog is not fed" in guest.ok(f"journalctl -q --no-pager _PID={forgotten}")


def test_stop_unmounts(guest: Guest) -> None:
    """A stop also thaws every program. A start mounts the tree again."""
    with holding(guest, "frozen", 16 * MIB) as place:
        until_holds(guest, place, 16 * MIB)
        guest.ok(f"echo 1 >{place}/compute.freeze")
        guest.ok("systemctl stop ggroupfs")
        assert guest.ok("systemctl show -P Result ggroupfs") == "success\n"
        assert guest.run("findmnt /run/ggroup").code == 1
        assert guest.ok("ls -A /run/ggroup /run/ggroupfs").split() == ["/run/ggroup:", "/run/ggroupfs:"]
        guest.ok("systemctl start ggroupfs")
        until_holds(guest, place, 16 * MIB)
        assert guest.ok(f"cat {place}/compute.freeze") == "0\n"


def test_no_process_outlives_the_daemon(guest: Guest) -> None:
    """systemd sends the guard no signal, but it has ended before the next daemon starts or a stop is complete."""
    dead = daemon(guest)
    guard = guest.ok(f"pgrep -P {dead} -f guarding.py").strip()
    guest.ok("systemctl kill --kill-who=main -s KILL ggroupfs")
    until_mounted_again(guest, dead)
    assert guest.run(f"test -e /proc/{guard}").code == 1
    guest.ok(f"pgrep -P {daemon(guest)} -f guarding.py")
    guest.ok("systemctl stop ggroupfs")
    assert guest.run("pgrep -f guardin[g].py").code == 1
    guest.ok("systemctl start ggroupfs")
    log = "journalctl -q --no-pager _PID=1 -u ggroupfs -g 'left-over process|remains running'"
    assert guest.run(log).code == 1


def test_options_of_the_mount(guest: Guest) -> None:
    """The options in /etc/default/ggroupfs count, and the service's status line shows their effect."""
    with mounted_with(guest, "-o soft.gpus=2"):
        assert guest.ok("systemctl show -P StatusText ggroupfs") == "/run/ggroup: 2 soft GPUs, ledger soft\n"


def test_reload_reads_the_files_again(guest: Guest) -> None:
    with holding(guest, "reread", 16 * MIB) as place:
        until_holds(guest, place, 16 * MIB)
        guest.write("/etc/ggroupfs/slices.d/reread.conf", "[/system.slice/reread.service]\nGMemHigh=8M\n")
        guest.ok("systemctl reload ggroupfs")
        until_holds(guest, place, 8 * MIB)
        guest.ok("rm /etc/ggroupfs/slices.d/reread.conf && systemctl reload ggroupfs")
        guest.until(f"grep -qx max {place}/gmem.limit.high", "nothing is asked for any more")


def test_mount_8(guest: Guest) -> None:
    guest.ok("systemctl stop ggroupfs")
    guest.ok("mount -t fuse.ggroupfs none /run/ggroup -o soft.gmem=64M")
    assert guest.ok("cat /run/ggroup/gpus/0/gmem.capacity") == f"{64 * MIB}\n"
    guest.ok("umount /run/ggroup")
    guest.until("! pgrep -f 'ggroupfs moun[t]'", "the daemon has ended")


def test_a_line_of_fstab(guest: Guest) -> None:
    """The line is that of the README. systemd makes a unit of it, which takes precedence over the package's."""
    guest.ok("systemctl stop ggroupfs")
    guest.ok("echo 'none /run/ggroup fuse.ggroupfs nofail,x-mount.mkdir,soft.gmem=96M 0 0' >>/etc/fstab")
    guest.ok("rmdir /run/ggroup && systemctl daemon-reload && systemctl start run-ggroup.mount")
    assert guest.ok("systemctl show -P FragmentPath run-ggroup.mount") == "/run/systemd/generator/run-ggroup.mount\n"
    assert guest.ok("cat /run/ggroup/gpus/0/gmem.capacity") == f"{96 * MIB}\n"
    guest.ok("systemctl stop run-ggroup.mount")
    assert guest.run("findmnt /run/ggroup").code == 1
    guest.ok("sed -i '/ggroupfs/d' /etc/fstab && systemctl daemon-reload")


def test_the_mount_unit(guest: Guest) -> None:
    """The same with the package's mount unit, instead of the service."""
    guest.ok("systemctl stop ggroupfs && systemctl start run-ggroup.mount")
    assert guest.ok("systemctl show -P FragmentPath run-ggroup.mount").endswith("/systemd/system/run-ggroup.mount\n")
    with holding(guest, "inside", 16 * MIB) as place:
        until_holds(guest, place, 16 * MIB)
    assert "ggroupfs mount" in guest.ok("systemctl status --no-pager run-ggroup.mount")
    guest.ok("systemctl stop run-ggroup.mount")
    assert guest.run("findmnt /run/ggroup").code == 1


def test_the_service_may_kill_a_process_of_another_user(guest: Guest) -> None:
    """The daemon does so for gmem.limit.max. The test runs its code under all of the service's restrictions."""
    guest.write("/root/kill.py", KILL)
    unit = guest.ok("systemctl cat ggroupfs").replace("NotifyAccess=main\n", "").replace("Type=notify", "Type=oneshot")
    lines = [line for line in unit.splitlines() if not line.startswith(("Exec", "Restart", "Watchdog", "WantedBy"))]
    at = lines.index("[Service]") + 1
    lines.insert(at, "ExecStart=/usr/bin/python3 /root/kill.py %i")
    guest.write("/run/systemd/system/killer@.service", "\n".join(lines) + "\n")
    guest.ok("systemctl daemon-reload && systemd-run -q --unit=victim -p User=ggroup sleep infinity")
    guest.ok("systemctl start killer@$(systemctl show -P MainPID victim).service")
    guest.until("! systemctl is-active victim", "it is killed")
    assert guest.ok("systemctl show -P ExecMainStatus victim") == "9\n"
    guest.ok("systemctl reset-failed victim; rm /run/systemd/system/killer@.service /root/kill.py")
    guest.ok("systemctl daemon-reload")
