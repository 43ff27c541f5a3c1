"""Hostile programs at a real mount: they fork, flood, hold on and hammer. They get errors; no other program notices."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backend.door.wire import Op
from backend.process.identity import cgroup_of
from tests.support.cgroups import cgroup, enter, evacuate, slice_path
from tests.support.mounted import SECONDS, Mounted, Tenant, alive, eventually, mounted, mountpoint
from tests.support.tenant_socket import Raw, descriptors, open_files, status

MIB = 1 << 20
STRANGER = 1000


@pytest.fixture
def batch() -> Iterator[Path]:
    """A cgroup with two below it."""
    with cgroup("ggrouphostile.slice") as path:
        (path / "a.service").mkdir()
        (path / "b.service").mkdir()
        yield path


@contextlib.contextmanager
def fork_away(mount: Mounted, place: Path) -> Iterator[Callable[[], list[int]]]:
    """Start a program in a cgroup that forks twice and becomes a session of its own, and whose parents end. The result
    returns the pids of what is left of it, once that is in the tree."""
    inner = f'{sys.executable} -m ggroupfs tenant --mount "{mount.path}" --gmem 128M --kernel 1ms --report 0.1'
    words = f'echo $$ > {place}/cgroup.procs; setsid sh -c "({inner} >/dev/null 2>&1 &) &"'

    def found() -> list[int]:
        return [m.pid for m in mount.members() if f"/{place.name}" in cgroup_of(m.pid).path]

    subprocess.run(["sh", "-c", words], check=True)
    try:
        yield found
    finally:
        everybody = {int(pid) for pid in (place / "cgroup.procs").read_text().split()} | set(found())
        for pid in everybody:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        # A process leaves cgroup.procs a little before it is a zombie; in between, exit(2) waits for nothing.
        eventually(lambda: not any(alive(pid) for pid in everybody), "they are gone")


def test_who_forks_twice_and_leaves_its_session_is_in_its_slice(mount: Mounted, batch: Path) -> None:
    """Limit, freeze and timeslice of the slice hold for a process that was not started there."""
    here = mount / "slice" / slice_path(batch / "a.service")
    here.mkdir(parents=True)
    (here / "0/gmem.limit.high").write_text("64M")
    (here / "0/compute.timeslice").write_text("1ms")
    (here / "0/compute.freeze").write_text("1")
    with fork_away(mount, batch / "a.service") as found:
        (pid,) = eventually(found, "it comes")
        assert os.getsid(pid) not in (os.getsid(0), 0)
        eventually(lambda: int((here / "0/gmem.current").read_text()) == 64 * MIB, "the limit holds for it")
        stat = mount.group(pid)
        assert "finished 0\n" in (stat / "gcgroup.stat").read_text()
        assert "timeslice_usec 1000\n" in (stat / "gcgroup.stat").read_text()
        # It moves itself: the limit of its old place no longer holds, that of the common parent does.
        above = here.parent / "0"
        (above / "gmem.limit.high").write_text("32M")
        enter(pid, batch / "b.service")
        there = mount / "slice" / slice_path(batch / "b.service") / "0"
        eventually(lambda: "populated 1" in (there / "compute.events").read_text(), "the tree follows")
        eventually(lambda: int((above / "gmem.current").read_text()) <= 32 * MIB, "the limit above holds")
        eventually(lambda: "finished 0\n" not in (stat / "gcgroup.stat").read_text(), "it runs: nobody froze it there")
        evacuate(batch / "b.service", batch / "a.service")
        eventually(lambda: "frozen 1" in (stat / "compute.events").read_text(), "and is frozen where it was")
    here.rmdir()
    here.parent.rmdir()


@pytest.mark.parametrize("owner", [0, STRANGER])
def test_a_program_in_a_cgroup_that_is_too_deep_is_counted_above(batch: Path, owner: int) -> None:
    """The depth is 128 levels below the root, 32 where a user may make cgroups; other programs are followed, none
    ends."""
    os.chown(batch, owner, owner)
    expected = f"of user {owner}, are too many or too deep"
    with (
        mountpoint() as path,
        mounted(path, expect_errors=[expected]) as mount,
        Tenant(mount, "--gmem", "32M") as who,
        Tenant(mount, "--gmem", "32M") as other,
    ):
        below = batch
        for _ in range(140):
            below /= "d"
            below.mkdir()
        if owner:
            for place in (batch, *(batch.joinpath(*["d"] * levels) for levels in range(1, 141))):
                os.chown(place, owner, owner)
        enter(who.pid, below)
        enter(other.pid, batch / "a.service")
        most = 32 if owner else 128
        above = slice_path(batch)
        there = mount / "slice" / above / Path(*["d"] * (most - len(Path(above).parts)))
        eventually(lambda: (there / "0/gmem.current").read_text() == f"{32 * MIB}\n", "it is counted there")
        assert not (there / "d").exists()
        beside = mount / "slice" / above / "a.service/0/gmem.current"
        eventually(lambda: beside.read_text() == f"{32 * MIB}\n", "the other one is followed")
        eventually(lambda: any(expected in line for line in mount.errors), "it is told")


def test_descriptors_that_come_with_messages_are_not_taken(mount: Mounted) -> None:
    """Each message brings as many descriptors as possible: the daemon keeps none of them, and holds none meanwhile."""
    with Tenant(mount, "--gmem", "64M", "--report", "0.05") as victim, Raw(mount).hello() as raw:
        before, ends = descriptors(mount), os.pipe()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", ends[:1] * 253).tobytes())
        sent = os.readlink(f"/proc/self/fd/{ends[0]}")
        for number in range(200):
            message = b"".join(
                word.to_bytes(size, "little")
                for word, size in ((Op.JOIN, 4), (0, 4), (number, 8), (0, 4), (1, 4), *[(0, 8)] * 5)
            )
            raw.socket.sendmsg([message], [rights])
            raw.socket.recv(64)
            assert sent not in open_files(mount)
        # Its own files come and go, so it may have a few more for a moment.
        eventually(lambda: descriptors(mount) <= before + 1, "it has as many as before")
        # A pipe whose only reader was sent along is broken, so no copy of the reader is kept.
        os.close(ends[0])
        with pytest.raises(BrokenPipeError):
            os.write(ends[1], b"x")
        os.close(ends[1])
        assert victim.report()["finished"] > 0


FILES = ("gmem.current", "gmem.events", "compute.events", "usermemfd", "gcgroup.stat")


def test_thousands_of_files_that_are_held_over_the_exit_of_a_program(mount: Mounted) -> None:
    """With pollers: all are notified, all reads fail, and neither the daemon's memory nor its service changes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with Tenant(mount, "--gmem", "64M", "--report", "0.05") as bystander, Tenant(mount, "--gmem", "64M") as tenant:
            memory = status(mount, "VmRSS")
            fds = [os.open(tenant.group / FILES[n % len(FILES)], os.O_RDONLY) for n in range(4000)]
            try:
                poller = select.epoll()
                for n, fd in enumerate(fds):
                    if n % len(FILES) != 3:
                        os.pread(fd, 100, 0)
                    if n % len(FILES) in (1, 2, 3):
                        poller.register(fd, select.EPOLLPRI)
                tenant.kill()
                eventually(lambda: not tenant.group.exists(), "its directory is gone")
                hung: set[int] = set()

                def all_hung() -> bool:
                    hung.update(fd for fd, event in poller.poll(0, 4000) if event & select.EPOLLHUP)
                    return len(hung) == 2400

                eventually(all_hung, "every poller is told")
                for fd in fds:
                    with pytest.raises(OSError, match="No such device"):
                        os.pread(fd, 100, 0)
                assert bystander.number("gmem.current") == 64 * MIB
                assert status(mount, "VmRSS") - memory < 4000 * 3, "less than 3 KB each"
            finally:
                for fd in fds:
                    os.close(fd)
                poller.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def storm_of_lists(mount: Mounted, tenant: Tenant) -> None:
    os.listdir(mount.path)


def storm_of_giants(mount: Mounted, tenant: Tenant) -> None:
    fd = os.open(tenant.group / "gmem.limit.high", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match=os.strerror(errno.E2BIG)):
            os.write(fd, b"1" * (1 << 20))
    finally:
        os.close(fd)


def storm_of_slow_writes(mount: Mounted, tenant: Tenant) -> None:
    """Write so that each write waits for memory to move, and for the other writes."""
    for value in ("1G", "max"):
        with contextlib.suppress(OSError):
            (tenant.group / "gmem.limit.high").write_text(value)


@pytest.mark.parametrize("storm", [storm_of_lists, storm_of_giants, storm_of_slow_writes])
def test_who_hammers_the_tree_takes_his_turns_and_no_more(
    mount: Mounted, storm: Callable[[Mounted, Tenant], None]
) -> None:
    """Twenty threads do so; a neighbour that reads one file after another gets at least a third of an equal share."""
    done, ends = [0] * 20, threading.Event()
    problems: list[str] = []

    def hammer(index: int, tenant: Tenant) -> None:
        try:
            while not ends.is_set():
                storm(mount, tenant)
                done[index] += 1
        except BaseException as error:
            problems.append(repr(error))

    with Tenant(mount, "--gmem", "64M", "--report", "0.05") as bystander, Tenant(mount, "--gmem", "4G") as tenant:
        threads = [threading.Thread(target=hammer, args=(index, tenant)) for index in range(len(done))]
        for thread in threads:
            thread.start()
        reads = 0
        eventually(lambda: sum(done) > 20 or problems, "they have begun")
        before = sum(done)
        while reads < 300 and not problems:
            assert bystander.number("gmem.current") == 64 * MIB
            reads += 1
        stormed = sum(done) - before
        ends.set()
        for thread in threads:
            thread.join(SECONDS)
        assert not problems
        # A list and a read are a few requests each, and requests are what the daemon takes in turn.
        assert reads >= stormed / len(done) / 3, (reads, stormed)


def test_a_socket_where_others_could_put_one_is_refused(tmp_path: Path) -> None:
    """The message says what is wrong, and no mount is left behind."""
    public, place = tmp_path / "public", tmp_path / "mount"
    public.mkdir()
    public.chmod(0o1777)
    place.mkdir()
    words = [sys.executable, "-m", "ggroupfs", "mount", "-f", "--gpu", "soft", "-o", f"socket={public}/s", str(place)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode
    assert f"no socket at {public}/s: others may write to a directory above the socket: {public}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not os.path.ismount(place)


def test_directories_that_one_user_has_open_are_bounded() -> None:
    """A user gets ENFILE from the 1025th directory on, until some are closed; others, and root, go on."""
    with mountpoint() as path, mounted(path) as mount:
        program = (
            "import os, resource, sys\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)); os.setuid(int(sys.argv[2]))\n"
            "fds = []\n"
            "try:\n"
            "    while len(fds) < 2000: fds.append(os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY))\n"
            "except OSError as error: print(len(fds), error.errno, flush=True)\n"
            "os.close(fds.pop())\n"
            "while True:\n"
            "    try: os.open(sys.argv[1], os.O_RDONLY); break\n"
            "    except OSError: pass\n"  # it is told of a close a moment later
            "print('again', flush=True); input()\n"
        )
        words = [sys.executable, "-c", program, str(mount.path), str(STRANGER)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
            try:
                assert stranger.stdout is not None
                assert stranger.stdout.readline() == f"1024 {errno.ENFILE}\n"
                assert stranger.stdout.readline() == "again\n"
                assert os.listdir(mount.path)
                other = "import os, sys; os.setuid(int(sys.argv[2])); os.listdir(sys.argv[1])"
                subprocess.run([sys.executable, "-c", other, str(mount.path), str(STRANGER + 1)], check=True)
            finally:
                stranger.kill()
