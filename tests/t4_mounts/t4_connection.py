"""Requests and messages that wait in the kernel for the daemon of a real mount."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from backend.door import tenants
from backend.ledgers.journal.file import default_path
from ggroupfs.daemon.mount import SOCKETS
from ggroupfs.fs import connection
from ggroupfs.mounts import device_number, mount_of
from tests.support.mounted import LEFT_BEHIND, Mounted, eventually, mounted
from tests.support.proc import children_of

FILES = 800
AGAIN = 8
"""Number of trees that are mounted until one has the number of an earlier one."""


def told(device: int, name: str) -> int:
    """Return a number that the kernel keeps of the connection, without asking the mount, which may be stopped."""
    with connection.control() as directory:
        fd = os.open(f"{os.minor(device)}/{name}", os.O_RDONLY, dir_fd=directory)
        with os.fdopen(fd) as file:
            return int(file.read())


def test_closes_do_not_lag_behind(mount: Mounted) -> None:
    """A call after many closes is answered only after they are: otherwise each one would leave more files open."""
    (mount / "ggroup.backend").read_text()  # the very first close waits for the answer that there is no FLUSH
    device = mount.path.stat().st_dev
    assert told(device, "max_background") == connection.BACKGROUND
    files = [os.open(mount / "ggroup.backend", os.O_RDONLY) for _ in range(FILES)]
    os.kill(mount.daemon.pid, signal.SIGSTOP)
    try:
        for fd in files:
            os.close(fd)
        assert told(device, "waiting") >= FILES
    finally:
        os.kill(mount.daemon.pid, signal.SIGCONT)
    (mount / "ggroup.backend").read_text()
    assert told(device, "waiting") < FILES // 4


def test_a_connection_is_no_other_tree_of_its_number(tmp_path: Path) -> None:
    """The kernel reuses the number of a tree that ended for the next one, which must not be aborted for it."""
    with mounted(tmp_path):
        first, device = connection.Connection(tmp_path.stat().st_dev), tmp_path.stat().st_dev
    try:
        with contextlib.ExitStack() as stack:
            for number in range(AGAIN):  # trees of other tests take numbers, too
                place = tmp_path / str(number)
                place.mkdir()
                stack.enter_context(mounted(place))
                if place.stat().st_dev == device:
                    break
            else:
                pytest.skip("the number was taken by something else")
            first.abort()
            assert (place / "ggroup.backend").read_text()
    finally:
        first.close()


HELD = """
import sys, trio
from ggroupfs import cli
from ggroupfs.fs.operations import Operations

async def mkdir(*_):
    print("asked", flush=True)
    await trio.sleep_forever()

Operations.mkdir = mkdir
sys.exit(cli.main())
"""
"""A daemon that never answers a mkdir, as if told to end while the answer waits for a lever."""
MAKES = "import os, sys; os.mkdir(sys.argv[1])"
ENDS_S = 60.0
"""Seconds within which a daemon that was told to end is gone: without an abort it never is."""


def a_message_waits(pid: int) -> bool:
    """Return whether a thread of a daemon is in the kernel with a message that an entry is gone."""
    stacks = Path(f"/proc/{pid}/task").glob("*/stack")
    return any(b"fuse_reverse_inval_entry" in stack.read_bytes() for stack in stacks)


def take_away(place: Path) -> None:
    """Remove what a killed daemon leaves for the next one, where none is to come."""
    subprocess.run(["fusermount3", "-q", "-u", "-z", place], check=False)  # if it is still mounted
    default_path(SOCKETS, os.fspath(place)).unlink(missing_ok=True)
    tenants.default_path(SOCKETS, os.fspath(place)).unlink(missing_ok=True)


class Held:
    """A mount whose message to the kernel waits for a lock of a program, which in turn waits for an answer."""

    def __init__(self, path: Path, daemon: subprocess.Popen[str], maker: subprocess.Popen[bytes]) -> None:
        self.path, self.daemon, self.maker = path, daemon, maker


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """A program that makes a directory holds the lock of the parent; the message that an entry of the parent is gone
    waits for that lock, with the connection open."""
    words = ["mount", "-f", "--gpu", "soft", "--ledger", "soft", os.fspath(tmp_path)]
    tenant = maker = None
    with subprocess.Popen([sys.executable, "-c", HELD, *words], stdout=-1, stderr=-1, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        of_it = connection.Connection(tmp_path.stat().st_dev)
        try:
            words = [sys.executable, "-m", "ggroupfs", "tenant", "--mount", os.fspath(tmp_path), "--gmem", "16M"]
            tenant = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            directory = tmp_path / str(tenant.pid)
            eventually(directory.exists, "the program has a directory")
            maker = subprocess.Popen([sys.executable, "-c", MAKES, tmp_path / "x"], stderr=subprocess.DEVNULL)
            assert daemon.stdout.readline() == "asked\n"
            tenant.kill()
            eventually(lambda: a_message_waits(daemon.pid), "a message waits for it")
            yield Held(tmp_path, daemon, maker)
        finally:
            of_it.abort()  # only this one: its number may be another test's by now
            of_it.close()
            for process in (daemon, tenant, maker):
                if process is not None:
                    process.kill()
            for process in (daemon, tenant, maker):
                if process is not None:
                    process.wait()
            take_away(tmp_path)


def test_a_message_that_waits_for_a_waiting_program_keeps_neither(held: Held) -> None:
    """The daemon ends all the same, and the program comes back."""
    held.daemon.terminate()
    _, said = held.daemon.communicate(timeout=ENDS_S)
    assert held.daemon.returncode == 0
    assert "a message to the kernel does not come to its end" in said
    assert held.maker.wait(ENDS_S) != 0
    assert mount_of(os.fspath(held.path)) is None


def guard_of(pid: int) -> int:
    """Return the pid of the process beside a daemon that aborts the connection if the daemon is killed."""
    [found] = children_of(pid, b"guarding.py")
    return found


@contextlib.contextmanager
def ends(pid: int) -> Iterator[None]:
    """Check that a process is there, and is gone soon after."""
    pidfd = os.pidfd_open(pid)
    try:
        yield
        assert select.select([pidfd], [], [], ENDS_S)[0]
    finally:
        os.close(pidfd)


def test_a_message_that_waits_does_not_outlive_a_killed_daemon(held: Held) -> None:
    """The guard aborts the connection: the daemon ends, and the program comes back. Another daemon mounts there."""
    with ends(guard_of(held.daemon.pid)):
        held.daemon.kill()
        assert held.daemon.wait(ENDS_S) == -signal.SIGKILL
        assert held.maker.wait(ENDS_S) != 0
    with mounted(held.path, expect_errors=[LEFT_BEHIND]) as mount:
        assert mount.path.exists()


ASKS = """
import sys, trio
from ggroupfs import cli
from ggroupfs.fs.operations import Operations

async def statfs(*_):
    print("asked", flush=True)
    await trio.sleep_forever()

Operations.statfs = statfs
sys.exit(cli.main())
"""
"""A daemon that does not answer its own question, as if killed before it could."""


def test_a_question_of_its_own_does_not_outlive_a_killed_daemon(tmp_path: Path) -> None:
    """systemd's watchdog depends on that question: the thread that asks waits for its own daemon."""
    words = [sys.executable, "-c", ASKS, "mount", "-f", "--gpu", "soft", "--ledger", "soft", os.fspath(tmp_path)]
    environment = os.environ | {"WATCHDOG_USEC": f"{ENDS_S * 1e6:.0f}"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, text=True) as daemon:
        assert daemon.stdout is not None
        assert {daemon.stdout.readline() for _ in range(2)} == {"ready\n", "asked\n"}
        mount = mount_of(os.fspath(tmp_path))  # since stat() would wait
        assert mount is not None
        of_it = connection.Connection(device_number(mount[0]))
        try:
            with ends(guard_of(daemon.pid)):
                daemon.kill()
                assert daemon.wait(ENDS_S) == -signal.SIGKILL
        finally:
            of_it.abort()
            of_it.close()
            daemon.kill()
            daemon.wait()
            take_away(tmp_path)


def test_a_guard_is_there_until_the_tree_is_unmounted(tmp_path: Path) -> None:
    """A manager that ends a service signals all of its processes: the daemon's end comes first."""
    with mounted(tmp_path) as mount:
        guard = guard_of(mount.daemon.pid)
        with ends(guard):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(guard, number)
            assert (mount / "ggroup.backend").read_text()
            assert guard_of(mount.daemon.pid) == guard
            assert ggroupfs("umount", tmp_path).returncode == 0


def test_a_successor_has_a_guard_of_its_own(tmp_path: Path) -> None:
    """The daemon is the same process, whose main thread goes on, with another connection."""
    with mounted(tmp_path, expect_errors=[LEFT_BEHIND]) as mount:
        with ends(guard_of(mount.daemon.pid)):
            assert ggroupfs("upgrade", tmp_path).returncode == 0
        with ends(guard_of(mount.daemon.pid)):
            mount.daemon.kill()
            assert mount.daemon.wait(ENDS_S) == -signal.SIGKILL
        with mounted(tmp_path, expect_errors=[LEFT_BEHIND]) as second:
            assert (second / "ggroup.backend").read_text()


def test_what_a_killed_daemon_without_its_guard_left_so_is_aborted_when_asked(held: Held) -> None:
    """SIGKILL ends neither. A mount and an umount say what ends them, and do it."""
    os.kill(guard_of(held.daemon.pid), signal.SIGKILL)
    held.daemon.kill()
    with ThreadPoolExecutor() as both:  # each waits for an answer for as long as a tree may take
        for refused in both.map(lambda command: ggroupfs(command, held.path), ("mount", "umount")):
            assert refused.returncode == 1
            assert "the tree does not answer within" in refused.stderr
            assert "--force" in refused.stderr
    assert held.maker.poll() is None
    assert ggroupfs("umount", "--force", held.path).returncode == 0
    assert held.daemon.wait(ENDS_S) == -signal.SIGKILL
    assert held.maker.wait(ENDS_S) != 0
    assert mount_of(os.fspath(held.path)) is None


def ggroupfs(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command, which must end within the time that a daemon would take."""
    words = (sys.executable, "-m", "ggroupfs", *words)
    return subprocess.run(words, capture_output=True, text=True, timeout=ENDS_S, check=False)
