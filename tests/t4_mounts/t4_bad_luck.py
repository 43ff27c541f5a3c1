"""Bad input and bad luck on a real mount: every malformed write, recycled pids, and the death of all processes
involved.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.soft.client import socket_of
from ggroupfs.fs.controls import CONTROLS
from ggroupfs.mounts import mount_of
from tests.support.mounted import SECONDS, SLOW, Mounted, Tenant, contents, eventually, mounted, reborn

Spawn = Callable[..., subprocess.Popen[bytes]]

MIB = 1 << 20
GIB = 1 << 30

INVAL, RANGE, BIG, NOTSUP, AGAIN = errno.EINVAL, errno.ERANGE, errno.E2BIG, errno.EOPNOTSUPP, errno.EAGAIN

GARBAGE = {
    b"\n": INVAL,
    b" \t\n": INVAL,
    b"\0": INVAL,
    b"\0001": INVAL,
    b"\xff\xfe\xfd": INVAL,
    "\N{ARABIC-INDIC DIGIT ONE}".encode(): INVAL,
    bytes(range(128, 256)): INVAL,
    b"\x7fELF": INVAL,
    b"1 2": INVAL,
    b"1,2": INVAL,
    b"one": INVAL,
    b"MAX": INVAL,
    b"Default": INVAL,
    b"--1": INVAL,
    b"1_000": INVAL,
    b"1e3": INVAL,
    b"nan": INVAL,
    b"inf": INVAL,
    b"%d": INVAL,
    b"x" * 4095: INVAL,
    b"1" * 4095: RANGE,
    b"1" * 4096: BIG,
    b"1" * 100_000: BIG,
    b"%d" % (1 << 64): RANGE,
    b"%d" % (1 << 66): RANGE,
}
"""Values that no control file accepts."""

SIZES = {b"8GB": INVAL, b"8 G": INVAL, b"1.5G": INVAL, b"K": INVAL, b"1P": INVAL, b"-1": RANGE, b"-1K": RANGE}
SIZES |= {b"0x": INVAL, b"08": INVAL, b"16777216T": RANGE, b"0x1ffffffffffffffff": RANGE, b"default": INVAL}
INTEGERS = {b"-1": RANGE, b"1.0": INVAL, b"max": INVAL, b"1K": INVAL, b"default": INVAL}

REFUSED = {
    "gmem.limit.high": SIZES,
    "gmem.limit.max": SIZES,
    "gmem.limit.low": SIZES,
    "gmem.swap.max": SIZES,
    "gmem.oom.group": {**INTEGERS, b"2": RANGE, b"yes": INVAL, b"true": INVAL},
    "gmem.reclaim": {**SIZES, b"max": INVAL, b"1": AGAIN, b"1T": AGAIN},
    "compute.timeslice": {
        **{b"-1": INVAL, b"max": INVAL, b"1s": INVAL, b".": INVAL, b"1.2.3": INVAL, b"0x10": INVAL, b"+1": INVAL},
        **{b"0": RANGE, b"0.0001": RANGE, b"0.009": RANGE, b"9us": RANGE, b"1000.001": RANGE, b"1000001us": RANGE},
    },
    "compute.freeze": {**INTEGERS, b"2": RANGE, b"yes": INVAL, b"true": INVAL},
    "compute.priority": {**INTEGERS, b"16": RANGE},
    "compute.weight": {**INTEGERS, b"0": RANGE, b"10001": RANGE},
    "compute.max": {
        **dict.fromkeys((b"0", b"999", b"-1", b"max max", b"30000 9999", b"30000 1000001", b"30%", b"0x7530"), INVAL),
        **dict.fromkeys((b"30000 100000 1", b"30000us", b"%d" % (1 << 63), b"%d" % (1 << 70)), INVAL),
        **dict.fromkeys((number for number, code in GARBAGE.items() if code == RANGE), INVAL),  # as cpu.max has it
    },
    "compute.wait.max": {b"-1": INVAL, b"max": INVAL, b"1s": INVAL, b"0": RANGE, b"0.0001": RANGE},
    "compute.spatial": {**INTEGERS, b"2": RANGE, b"yes": INVAL},
    "compute.sm.max": {
        b"-1": RANGE,
        b"0": RANGE,
        b"0%": RANGE,
        b"101%": RANGE,
        b"50 %": INVAL,
        b"%": INVAL,
        b"all": INVAL,
    },
    "compute.migrate": {b"-1": RANGE, b"0": NOTSUP, b"GPU-x": NOTSUP, b"gpu-0": INVAL},
}
"""Further values that each file refuses."""

ACCEPTED = {
    "gmem.limit.high": [b" 8G ", b"8g\n", b"0x10", b"010", b"max", b"8\0garbage", b"+8", b"%d" % ((1 << 64) - 1)],
    "gmem.limit.max": [b" 8G ", b"8g\n", b"max"],
    "gmem.limit.low": [b"\t0\n", b"max"],
    "gmem.swap.max": [b"0", b"max\n"],
    "gmem.oom.group": [b"1", b"0x1", b" 0\n"],
    "gmem.peak": [b"\n", b"anything at all", b"0"],
    "gmem.swap.peak": [b"\n", b"anything at all", b"0"],
    "compute.timeslice": [b"2", b"2.048", b" 2 ms", b"10us", b"1000", b"default"],
    "compute.freeze": [b"1", b"0x1", b" 0\n"],
    "compute.priority": [b"0", b" 15\n", b"8"],
    "compute.weight": [b"1", b"10000", b"100"],
    "compute.max": [b"30000 100000", b" 1000\t10000\n", b"2000000", b"max"],
    "compute.sm.max": [b"1", b" 64\n", b"0x40", b"50%", b"12.5%", b"100%", b"1000", b"max"],
    "compute.wait.max": [b"2", b"2.048", b" 2 ms", b"10us", b"1000", b"default"],
    "compute.spatial": [b"0", b" 0x0\n"],
}
"""Values just inside the limits, so that the table above cannot pass by everything being refused."""


def write(path: Path, data: bytes) -> int:
    """Make one write(2); return its errno, 0 for none."""
    fd = os.open(path, os.O_WRONLY)
    try:
        count = os.write(fd, data)
    except OSError as error:
        return error.errno or -1
    finally:
        os.close(fd)
    assert count == len(data)
    return 0


@pytest.fixture(params=["process", "slice"])
def group(request: pytest.FixtureRequest, mount: Mounted, spawn: Spawn) -> Iterator[Path]:
    """Yield the directory of an idle process, or of a slice."""
    top = mount / (spawn().pid if request.param == "process" else "slice/bad")
    top.mkdir()
    yield top / "0"
    top.rmdir()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_malformed_write_has_its_errno_and_changes_nothing(group: Path, name: str) -> None:
    before = contents(group)
    for data, code in (GARBAGE | REFUSED[name]).items():
        got = write(group / name, data)
        assert got == code, (data[:40], errno.errorcode.get(got, got))
        assert contents(group) == before, data[:40]
    assert write(group / name, b"") == 0, "nothing written is nothing"
    assert contents(group) == before


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_what_is_well_formed_is_taken(group: Path, name: str) -> None:
    for data in ACCEPTED[name]:
        assert write(group / name, data) == 0, data


@pytest.mark.parametrize("name", [control.name for control in CONTROLS if not control.mode & 0o200])
def test_read_only_files_take_nothing(group: Path, name: str) -> None:
    before = contents(group)
    for data in (b"0", b"max", b"1" * 4095):
        assert write(group / name, data) == INVAL
    assert contents(group) == before


def test_a_recycled_pid_inherits_nothing(mount: Mounted) -> None:
    """A frozen process with limits dies; the next process with its pid starts with the defaults, and is not frozen."""
    default = None
    with reborn(None) as first:
        (mount / first).mkdir()  # the first reported death starts a thread in the daemon, which keeps its pid
    with Tenant(mount, "--gmem", "64M", "--report", "0.05") as tenant:
        for name in ("gmem.limit.high", "gmem.swap.max"):
            tenant.write(name, "32M")
        tenant.write("gmem.limit.low", "1M")
        tenant.write("compute.timeslice", 7)
        tenant.write("compute.freeze", 1)
        os.chown(tenant.group / "compute.freeze", 1000, 1000)
        with open(tenant.group / "gmem.current") as old:
            tenant.kill()
            with reborn(tenant.pid):
                eventually(lambda: (mount / tenant.pid).mkdir() is None, "the new process has a directory")
                found = contents(tenant.group)
                assert (tenant.group / "compute.freeze").stat().st_uid == 0
                with pytest.raises(OSError, match="No such device"):
                    old.read()
    with reborn(None) as other:
        (mount / other).mkdir()
        default = contents(mount.group(other))
    assert found == default


class Writer(threading.Thread):
    """A write(2) that takes a while."""

    def __init__(self, path: Path, data: bytes) -> None:
        super().__init__()
        self._call = (path, data)
        self.code: int | None = None
        """Errno of the write."""
        self.start()

    def run(self) -> None:
        self.code = write(*self._call)


def moving(group: Path) -> bool:
    """Return whether some of a group's memory has left the GPU, but not all that is to leave."""
    return int((group / "gmem.swap.current").read_text()) > 256 * MIB


def test_a_tenant_killed_while_its_memory_moves(mount: Mounted) -> None:
    """The writer of its limit gets ENODEV, its directory is gone within 0.2 s, and the books of all others are
    right.
    """
    with (
        Tenant(mount, "--gmem", "64M", "--report", "0.05") as bystander,
        Tenant(mount, "--gmem", "14G", "--report", "0.05") as tenant,
    ):
        writer = Writer(tenant.group / "gmem.limit.high", b"2M")
        eventually(lambda: moving(tenant.group), "memory moves")
        tenant.kill()
        eventually(lambda: not (mount / tenant.pid).exists(), "its directory is gone", 0.2, mount.watch())
        writer.join(SECONDS)
        assert writer.code in (0, errno.ENODEV)
        mount.check()
        assert int((mount / "gpus/0/gmem.current").read_text()) == 64 * MIB
        bystander.stop()


def test_a_writer_killed_while_memory_moves(mount: Mounted) -> None:
    """The writer is gone; its setting takes effect or is taken back, and the tree works on."""
    with Tenant(mount, "--gmem", "14G", "--report", "0.05") as tenant:
        words = ["sh", "-c", 'echo 2M > "$0"', os.fspath(tenant.group / "gmem.limit.high")]
        with subprocess.Popen(words) as writer:
            eventually(lambda: moving(tenant.group), "memory moves")
            writer.kill()
            assert (mount / "ggroup.backend").read_text()
        eventually(lambda: tenant.number("gmem.current") <= 2 * MIB, "the limit holds")
        tenant.write("gmem.limit.high", "max")
        tenant.stop()


def ended(mount: Mounted) -> float:
    """Send SIGTERM; return the seconds until the daemon has ended cleanly."""
    watch = mount.watch()
    mount.daemon.terminate()
    eventually(
        lambda: os.waitid(os.P_PID, mount.daemon.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), "it ends", watch=watch
    )
    took = watch.seconds
    assert mount.daemon.wait(SECONDS) == 0
    return took


def test_sigterm_gives_everything_back(tmp_path: Path) -> None:
    """With a frozen tenant and its memory in the host: the daemon unmounts within 2 s, exits with 0, removes its
    socket, and tenants are told.
    """
    with mounted(tmp_path) as mount:
        socket = socket_of(tmp_path)
        with Tenant(mount, "--gmem", "1G", "--report", "0.05") as tenant:
            tenant.write("gmem.limit.high", "64M")
            tenant.write("compute.freeze", 1)
            pidfd = os.pidfd_open(tenant.pid)
            assert ended(mount) < 2
            assert mount_of(os.fspath(tmp_path)) is None
            assert not socket.exists()
            assert os.listdir(tmp_path) == []
            with open(pidfd, "rb"):
                eventually(lambda: os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT), "the tenant ends")


def test_sigterm_while_a_write_is_in_flight(tmp_path: Path) -> None:
    """The mount ends as fast; the writer gets an errno, and does not hang."""
    with mounted(tmp_path) as mount, Tenant(mount, "--gmem", "14G", "--report", "0.05") as tenant:
        writer = Writer(tenant.group / "gmem.limit.high", b"2M")
        eventually(lambda: moving(tenant.group), "memory moves")
        assert ended(mount) < 2
        writer.join(SECONDS)
        assert writer.code


def test_more_signals_change_nothing(tmp_path: Path) -> None:
    """Signals that come during the end do not keep it from being clean."""
    with mounted(tmp_path) as mount:
        for _ in range(3):
            mount.daemon.send_signal(signal.SIGTERM)
            mount.daemon.send_signal(signal.SIGHUP)
        assert mount.daemon.wait(SECONDS) == 0


@pytest.mark.parametrize("attempt", range(5))
def test_the_end_of_a_tenant_and_of_the_mount_at_once(tmp_path: Path, attempt: int) -> None:
    """Directories vanish together with the tree: nothing is logged about that, and the exit code is 0."""
    with mounted(tmp_path) as mount, contextlib.ExitStack() as stack:
        tenants = [stack.enter_context(Tenant(mount, "--gmem", "16M", "--report", "0.05")) for _ in range(3)]
        for tenant in tenants:
            os.listdir(tenant.group)
            tenant.kill()
        mount.daemon.terminate()
        assert mount.daemon.wait(SECONDS) == 0


def test_umount_ends_the_daemon(tmp_path: Path) -> None:
    """umount(8) of the tree has the same effect as SIGTERM."""
    with mounted(tmp_path) as mount:
        socket = socket_of(tmp_path)
        with Tenant(mount, "--gmem", "64M", "--report", "0.05") as tenant:
            tenant.write("compute.freeze", 1)
            subprocess.run(["fusermount3", "-u", tmp_path], check=True)
            assert mount.daemon.wait(SECONDS) == 0
            assert not socket.exists()


def test_a_busy_tree_ends_all_the_same(tmp_path: Path) -> None:
    """A process has its working directory and open files there: it gets errors, and the daemon ends."""
    with mounted(tmp_path) as mount, open(mount / "ggroup.backend") as file:
        with subprocess.Popen(["sleep", "600"], cwd=mount / "slice") as visitor:
            try:
                mount.daemon.terminate()
                assert mount.daemon.wait(SECONDS) == 0
            finally:
                visitor.kill()
        with pytest.raises(OSError):  # noqa: PT011 - ENOTCONN or ECONNABORTED
            file.read()


def test_a_killed_daemon_is_replaced(tmp_path: Path) -> None:
    """SIGKILL leaves ENOTCONN; the next mount takes over the place, the tenants' socket, and books in the kernel."""
    with mounted(tmp_path, expect_errors=["(killed)"]) as first:
        sockets = [socket_of(tmp_path)]
        (first / "slice/job").mkdir()
        first.daemon.kill()
        first.daemon.wait()
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            os.listdir(tmp_path)
        with mounted(tmp_path, expect_errors=["unmounting what is left of another daemon"]) as second:
            assert second.daemon.poll() is None
            assert len(second.errors) == 1
            assert os.listdir(second / "slice") == ["job"]
            sockets.append(socket_of(tmp_path))
            with Tenant(second, "--gmem", "64M", "--report", "0.05") as tenant:
                tenant.stop()
            second.daemon.terminate()
            assert second.daemon.wait(SECONDS) == 0
        assert not any(socket.exists() for socket in sockets)


def test_a_path_that_is_gone_is_not_there(mount: Mounted, spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    """This holds also before the kernel is told: every access fails with ENOENT, and with nothing else."""
    for _ in range(40):
        process = spawn()
        os.mkdir(mount / process.pid)
        path = mount.group(process.pid) / "gmem.current"
        ways: list[Callable[[], object]] = [path.stat, path.read_bytes, lambda p=path: os.listdir(p.parent)]
        for way in ways:
            way()
        process.kill()
        process.wait()
        for way in ways:
            with pytest.raises(FileNotFoundError):
                eventually_raises(way)


def eventually_raises(way: Callable[[], object]) -> None:
    """Access a path until it is gone."""
    deadline = time.monotonic() + SECONDS * SLOW
    while time.monotonic() < deadline:
        way()
