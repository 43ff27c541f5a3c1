"""The usher, which makes programs of frozen slices wait as they open a file: what waits, what never does, what ends it.

The files are ordinary ones that only the test's programs know. Everything here runs below the root, which stands for
the frozen slice.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
import trio

from backend.process import procfs, usher, ushering
from backend.process.identity import ROOT, Slice
from backend.process.usher import Usher
from tests.support.mounted import SECONDS

SOON_S = 0.5
"""Seconds within which a waiting program is seen to wait."""

LEAVE = """
parent = os.getpid()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.001)
"""
OPENER = f"""
import os, sys, time
os.setsid(){LEAVE}
print(os.getpid(), flush=True)
try:
    with open(sys.argv[1], "rb"):
        pass
    print("opened", flush=True)
except OSError as error:
    print(error, flush=True)
sys.stdin.read()
"""
"""A program that leaves its parent before it opens the file."""
REPLACED = f"""
import os, sys, threading
os.setsid(){LEAVE.replace("time.sleep(0.001)", "pass")}
threading.Thread(target=open, args=(sys.argv[1],), daemon=True).start()
print(os.getpid(), flush=True)
sys.stdin.readline()
os.execvp("cat", ["cat"])
"""
"""A program in which one thread opens the file and another executes a program at the first line that it reads."""
THREADS = 80
"""Number of threads: more than the openings that one read(2) brings."""
CROWD = f"""
import os, sys, threading
os.setsid(){LEAVE.replace("time.sleep(0.001)", "pass")}
print(os.getpid(), flush=True)
answers = []
def opens():
    try:
        open(sys.argv[1], "rb").close()
    except OSError as error:
        answers.append(error)
threads = [threading.Thread(target=opens) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*(answers or ["opened"]), flush=True)
sys.stdin.read()
"""
"""A program in which many threads open the file."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="fanotify(7) needs root")


@attrs.define
class Opener:
    """A program that opens the file."""

    pid: int
    answer: Any
    """Pipe that it writes."""
    words: Any
    """Pipe that it reads."""

    async def has_opened(self, seconds: float = SECONDS) -> bool:
        """Return whether it has the file open within that time."""
        with trio.move_on_after(seconds):
            await trio.lowlevel.wait_readable(self.answer)
            words = self.answer.readline().decode().strip()
            assert words in ("opened", ""), words
            return bool(words)
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@attrs.define
class Place:
    """An usher, the file that it watches, and the frozen slices."""

    usher: Usher
    file: Path
    facts: dict[str, str]
    frozen: list[Slice]
    openers: contextlib.ExitStack

    async def freeze(self, *slices: Slice) -> None:
        """Have these slices frozen, and no others."""
        self.frozen[:] = slices
        self.usher.changed()
        await self.usher.told()

    def opener(self, *before: str, file: Path | None = None, daemons: bool = False, program: str = OPENER) -> Opener:
        """Start a program by the words before it; with `daemons`, as a child that stays this process's."""
        program = program.replace(LEAVE, "\n") if daemons else program
        words = [*before, "/usr/bin/python3", "-c", program, os.fspath(file or self.file)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert process.stdout is not None
        assert process.stdin is not None
        found = Opener(int(process.stdout.readline()), process.stdout, process.stdin)
        self.openers.callback(process.wait)
        self.openers.callback(process.stdout.close)
        self.openers.callback(process.stdin.close)
        self.openers.callback(found.kill)
        return found

    async def waiting(self, count: int) -> None:
        """Wait until so many wait, according to the usher."""
        with trio.fail_after(SECONDS):
            while self.facts["usher.waiting"] != str(count):
                self.usher.changed()
                await self.usher.told()
                await trio.sleep(0.001)


@contextlib.asynccontextmanager
async def place(path: Path, *files: str) -> AsyncIterator[Place]:
    """Run an usher."""
    file = path / "libcuda.so.1"
    file.write_bytes(b"library")
    frozen: list[Slice] = []
    facts: dict[str, str] = {}
    one = Usher(files or [os.fspath(file)], lambda: frozen, facts)
    with contextlib.ExitStack() as openers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            await one.begun()
            assert facts["usher"] == "yes"
            yield Place(one, file, facts, frozen, openers)
            nursery.cancel_scope.cancel()


async def seen(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    with trio.fail_after(SECONDS):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.01)


async def replaced(at: Place, former: int) -> None:
    """Wait until another usher serves in place of a former one."""
    await seen(lambda: at.usher.pid not in (None, former) and at.facts["usher"] == "yes")


@contextlib.contextmanager
def starter(file: Path) -> Iterator[Callable[[], object]]:
    """Yield a function that has a program outside our processes read the file, without waiting for it."""
    words = ["setsid", "-f", "sh", "-c", 'while read line; do cat "$1" & done', "sh", os.fspath(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as process:
        assert process.wait(SECONDS) == 0  # the shell has ended
        assert process.stdin is not None
        yield functools.partial(os.write, process.stdin.fileno(), b"\n")


def real(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in real time."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        trio.run(functools.partial(test, *args, **kwargs))

    return run


@real
async def test_a_program_of_a_frozen_slice_waits_until_it_is_thawed(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.freeze(ROOT)
        program = at.opener()
        assert not await program.has_opened(SOON_S)
        await at.waiting(1)
        await at.freeze()
        assert await program.has_opened()
        await at.waiting(0)


@real
async def test_200_of_200_wait_that_start_once_the_freeze_was_told(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        start = at.openers.enter_context(starter(at.file))
        for _ in range(200):
            await at.freeze(ROOT)
            start()
            await at.waiting(1)
            await at.freeze()
            await at.waiting(0)


@real
async def test_a_program_of_another_slice_goes_on(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.freeze(Slice("/of-another"))
        assert await at.opener().has_opened()
        await at.freeze(Slice("/of-another"), ROOT)
        program = at.opener()
        assert not await program.has_opened(SOON_S)
        await at.freeze(Slice("/of-another"))
        assert await program.has_opened(), "it is not the one that is frozen still"


@real
async def test_what_the_daemon_starts_never_waits(tmp_path: Path) -> None:
    """The daemon's agents and its self-test use CUDA in its own cgroup, whatever is frozen."""
    async with place(tmp_path) as at:
        await at.freeze(ROOT)
        assert await at.opener(daemons=True).has_opened()
        assert at.file.read_bytes()


@real
async def test_another_file_and_a_copy_are_opened_at_once(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        copy = tmp_path / "copy"
        copy.write_bytes(b"library")
        await at.freeze(ROOT)
        assert await at.opener(file=copy).has_opened()


@real
async def test_by_a_link_and_in_another_mount_namespace(tmp_path: Path) -> None:
    """As in a container to which NVIDIA's runtime gave the driver's library by a bind mount."""
    async with place(tmp_path) as at:
        link, elsewhere = tmp_path / "libcuda.so", tmp_path / "elsewhere"
        link.symlink_to(at.file)
        elsewhere.write_bytes(b"")
        await at.freeze(ROOT)
        bound = f'mount --bind {at.file} {elsewhere} && exec "$@"'
        programs = [at.opener(file=link), at.opener("unshare", "-m", "sh", "-c", bound, "sh", file=elsewhere)]
        for program in programs:
            assert not await program.has_opened(SOON_S)
        assert not elsewhere.read_bytes(), "the mount is not ours"
        await at.freeze()
        for program in programs:
            assert await program.has_opened()


@real
async def test_one_that_is_not_gone_at_once_is_waited_for_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process ends once it has a processor; it leaves no zombie then."""
    monkeypatch.setattr(usher, "GONE_S", 0.0)
    async with place(tmp_path) as at:
        pid = at.usher.pid
        assert pid is not None
    gc.collect()
    await seen(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.mark.logs("usher: .*: programs that open CUDA's library in a frozen slice go on, 1 that waited among them")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@real
async def test_an_usher_that_is_killed_or_stopped_lets_all_go_and_is_replaced(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usher, "ANSWER_S", 0.5)
    async with place(tmp_path) as at:
        await at.freeze(ROOT)
        program = at.opener()
        await at.waiting(1)
        former = at.usher.pid
        assert former is not None
        os.kill(former, number)
        assert await program.has_opened()
        await replaced(at, former)
        later = at.opener()
        assert not await later.has_opened(SOON_S)
        await at.freeze()
        assert await later.has_opened()


DAEMON = """
import os, signal, sys, trio
from backend.process.identity import ROOT
from backend.process.usher import Usher

async def main():
    one = Usher([sys.argv[1]], lambda: [ROOT], {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await one.begun()
        print(one.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@contextlib.contextmanager
def daemon_of(file: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a daemon that makes all programs wait that open the file, and the pid of its usher."""
    words = [sys.executable, "-c", DAEMON, os.fspath(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as daemon:
        try:
            assert daemon.stdout is not None
            yield daemon, int(daemon.stdout.readline())
        finally:
            daemon.kill()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
@real
async def test_a_daemon_that_ends_or_stops_lets_all_go(tmp_path: Path, number: signal.Signals, stopped: bool) -> None:
    """Killed, whether or not the usher is stopped by then; and stopped, which the usher alone notices."""
    if number == signal.SIGSTOP and stopped:
        pytest.skip("of the two one has to run: what they are in is killed by systemd's watchdog")
    file = tmp_path / "libcuda.so.1"
    file.write_bytes(b"library")
    with contextlib.ExitStack() as stack:
        daemon, pid = stack.enter_context(daemon_of(file))
        program = Place(mock.Mock(), file, {}, [], stack).opener()
        assert not await program.has_opened(SOON_S)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        daemon.send_signal(number)
        began = time.monotonic()
        assert await program.has_opened()
        if number == signal.SIGSTOP:
            assert time.monotonic() - began < ushering.LEASE_S + 2
            daemon.send_signal(signal.SIGCONT)
            later = Place(mock.Mock(), file, {}, [], stack).opener()
            with trio.fail_after(SECONDS):
                while await later.has_opened(SOON_S):
                    later = Place(mock.Mock(), file, {}, [], stack).opener()


@real
async def test_a_program_that_waits_ends_by_a_signal(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.freeze(ROOT)
        for number in (signal.SIGTERM, signal.SIGKILL):
            program = at.opener()
            await at.waiting(1)
            program.kill(number)
            await seen(functools.partial(gone, program.pid))
            await at.waiting(0)


def gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return procfs.status(pid).has_ended
    except ProcessLookupError:
        return True


@pytest.mark.logs("too many programs wait in frozen slices: 1 went on")
@real
async def test_too_many_go_on(tmp_path: Path) -> None:
    """As many wait as the usher has descriptors for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 2
    with mock.patch.object(subprocess, "Popen", functools.partial(limited, ushering.SPARE + most)):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == limit
        await at.freeze(ROOT)
        programs = [at.opener() for _ in range(most)]
        await at.waiting(most)
        assert await at.opener().has_opened()
        await at.freeze()
        for program in programs:
            assert await program.has_opened()
    finally:
        await context.__aexit__(None, None, None)


def limited(descriptors: int, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that can have no more descriptors."""
    return POPEN(["prlimit", f"--nofile={descriptors}:{descriptors}", *words], **options)


POPEN = subprocess.Popen


@real
async def test_files_are_marked_only_while_something_is_frozen(tmp_path: Path) -> None:
    """Otherwise an opening costs nothing, and waits for nothing."""
    async with place(tmp_path) as at:
        assert not marks(at.usher.pid)
        await at.freeze(ROOT)
        assert len(marks(at.usher.pid)) == 1
        await at.freeze()
        assert not marks(at.usher.pid)


def has_mark(of: Usher, words: str) -> bool:
    """Return whether its marks contain these words. It is told something first, since it then looks for files."""
    of.changed()
    return any(words in mark for mark in marks(of.pid))


def marks(pid: int | None) -> list[str]:
    """Return the inodes that a process has marked (proc_pid_fdinfo(5))."""
    words = (path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir())
    return [line for text in words for line in text.splitlines() if line.startswith("fanotify ino:")]


@pytest.mark.logs("none of .*/node is there: no program waits")
@real
async def test_a_device_node_is_no_file_that_can_be_had_wait(tmp_path: Path) -> None:
    node = tmp_path / "node"
    os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    async with place(tmp_path, os.fspath(node)) as at:
        await at.freeze(ROOT)
        assert not marks(at.usher.pid)


@pytest.mark.logs("none of .*/later is there: no program waits")
@real
async def test_a_file_that_comes_later_and_one_that_is_replaced(tmp_path: Path) -> None:
    """For example when a driver is installed."""
    later = tmp_path / "later"
    with mock.patch.object(subprocess, "Popen", often):
        context = place(tmp_path, os.fspath(later))
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        for _ in range(2):
            (tmp_path / "new").write_bytes(b"library")
            (tmp_path / "new").rename(later)
            number = f"{later.stat().st_ino:x}"
            await seen(functools.partial(has_mark, at.usher, f"ino:{number} "))
            assert not await at.opener(file=later).has_opened(SOON_S)
    finally:
        await context.__aexit__(None, None, None)


@real
async def test_a_file_that_has_the_inode_of_the_one_before_it(tmp_path: Path) -> None:
    """Filesystems reuse it at once; the old mark went with the old file."""
    file = tmp_path / "libcuda.so.1"
    with mock.patch.object(subprocess, "Popen", often):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        number = file.stat().st_ino
        file.unlink()
        file.write_bytes(b"another")
        others = iter(range(1000))
        while file.stat().st_ino != number:
            file.rename(tmp_path / str(next(others, pytest.skip)))
            file.write_bytes(b"another")
        await seen(functools.partial(has_mark, at.usher, f"ino:{number:x} "))
        assert not await at.opener().has_opened(SOON_S)
    finally:
        await context.__aexit__(None, None, None)


def altered(code: str, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start an usher that also runs this code. Any other process is started as usual."""
    if "backend.process.ushering" not in words:
        return POPEN(words, **options)
    program = f"import signal\nfrom backend.process import fanotify, ushering\n{code}\nushering.main()"
    return POPEN([words[0], "-c", program, *words[3:]], **options)


often = functools.partial(altered, "ushering.MARK_S = 0.0")
"""An usher that looks for the files all the time."""

HANGS = "ushering.Ushering._look_again = lambda self: signal.pause()"
"""Code of an usher that hangs once it has marked the files, before it answers."""


@pytest.mark.logs("usher: no answer in time: ", "usher: no answer in time, again within 3600 s: off until")
@real
async def test_one_that_hangs_holds_all_for_seconds_and_the_second_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first mark on; programs of any slice wait then."""
    monkeypatch.setattr(subprocess, "Popen", functools.partial(altered, HANGS))
    file = tmp_path / "libcuda.so.1"
    file.write_bytes(b"library")
    facts: dict[str, str] = {}
    one = Usher([os.fspath(file)], lambda: [Slice("/of-another")], facts)
    with contextlib.ExitStack() as openers:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.run)
            await seen(lambda: has_any(one.pid))
            program = Place(one, file, facts, [], openers).opener()
            assert await program.has_opened(usher.START_S / 3)
            await seen(lambda: facts["usher"] == "off")
            assert one.pid is None
            await one.told()  # without a waiting writer
        assert await Place(one, file, facts, [], openers).opener().has_opened()


def has_any(pid: int | None) -> bool:
    """Return whether that process has a mark."""
    try:
        return pid is not None and bool(marks(pid))
    except OSError:  # it has ended
        return False


@pytest.mark.logs("usher: no answer in time: ")
@real
async def test_one_that_hangs_seldom_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usher, "ANSWER_S", 0.5)
    monkeypatch.setattr(usher, "HANGS_S", 0.0)
    async with place(tmp_path) as at:
        for _ in range(2):
            former = at.usher.pid
            assert former is not None
            os.kill(former, signal.SIGSTOP)
            await replaced(at, former)


@real
async def test_one_without_a_processor_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers once it has a processor, and until then does not count as hung; the programs wait on."""
    monkeypatch.setattr(usher, "ANSWER_S", 0.2)
    monkeypatch.setattr(usher, "HANGS_S", SECONDS)
    looks = 0

    def lacks_processor(pid: int) -> bool:
        nonlocal looks
        looks += 1
        if looks == 4 * usher.PARTS:
            os.kill(pid, signal.SIGCONT)
        return True

    async with place(tmp_path) as at:
        await at.freeze(ROOT)
        program = at.opener()
        await at.waiting(1)
        former = at.usher.pid
        assert former is not None
        monkeypatch.setattr(usher, "lacks_processor", lacks_processor)
        os.kill(former, signal.SIGSTOP)
        await seen(lambda: looks > 4 * usher.PARTS)
        assert at.usher.pid == former
        assert at.facts["usher"] == "yes"
        assert not await program.has_opened(0)
        await at.freeze()
        assert await program.has_opened()


@pytest.mark.logs("usher: it has no processor: ")
@real
async def test_one_that_gets_no_processor_is_replaced_and_none_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usher, "ANSWER_S", 0.2)
    monkeypatch.setattr(usher, "STARVED_S", 0.5)
    async with place(tmp_path) as at:
        monkeypatch.setattr(usher, "lacks_processor", lambda pid: True)
        for _ in range(2):
            former = at.usher.pid
            assert former is not None
            os.kill(former, signal.SIGSTOP)
            await replaced(at, former)


@real
async def test_a_daemon_without_a_processor_finds_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets to nothing else for longer than an answer may take, twice: none was late because of that."""
    monkeypatch.setattr(usher, "ANSWER_S", 0.5)
    async with place(tmp_path) as at:
        former = at.usher.pid
        frozen = at.usher._frozen

        def stalls() -> Collection[Slice]:
            time.sleep(2 * usher.ANSWER_S)
            return frozen()

        for _ in range(2):
            at.usher._frozen = stalls
            heard = at.usher._number
            await seen(lambda heard=heard: at.usher._number > heard)  # type: ignore[misc]
            at.usher._frozen = frozen
            await at.freeze()
            assert (at.usher.pid, at.facts["usher"]) == (former, "yes")


@real
async def test_one_that_hangs_under_a_daemon_that_does_nothing_ends_by_itself(tmp_path: Path) -> None:
    file = tmp_path / "libcuda.so.1"
    file.write_bytes(b"library")
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [sys.executable, "-m", "backend.process.ushering", str(os.getpid()), os.fspath(file)]
    with ours, its, contextlib.ExitStack() as stack:
        process = stack.enter_context(altered(HANGS, words, stdin=its))
        stack.callback(process.kill)
        ours.send(ushering.SAID.pack(1, True) + b"/of-another\0")
        await seen(lambda: has_any(process.pid))
        assert await Place(mock.Mock(), file, {}, [], stack).opener().has_opened()
        assert process.wait(SECONDS) == -signal.SIGALRM


@pytest.mark.logs("usher: .*: programs that open CUDA's library in a frozen slice go on, 0 that waited among them")
@real
async def test_at_an_error_in_one_event_all_of_them_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One read(2) brings them all, and the others are not answered any more."""
    monkeypatch.setattr(usher, "ANSWER_S", SECONDS)
    fails = "fanotify.Openings.allow = lambda self, opening: (_ for _ in ()).throw(OSError(5, 'Input/output error'))"
    with mock.patch.object(subprocess, "Popen", functools.partial(altered, fails)):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        await at.freeze(Slice("/of-another"))
        former = at.usher.pid
        assert former is not None
        os.kill(former, signal.SIGSTOP)
        programs = [at.opener() for _ in range(3)]
        for program in programs:
            await seen(functools.partial(is_held, program.pid))
        os.kill(former, signal.SIGCONT)
        for program in programs:
            assert await program.has_opened(SECONDS / 4)
        await seen(lambda: at.usher.pid not in (None, former))
    finally:
        await context.__aexit__(None, None, None)


def is_held(pid: int, threads: int = 1) -> bool:
    """Return whether so many threads of a process sleep in the kernel, as in an opening that waits."""
    return sum(procfs.status(pid, tid).state == b"D" for tid in procfs.threads(pid)) == threads


@pytest.mark.logs("too many programs wait in frozen slices: [0-9]+ went on")
@real
async def test_none_is_refused_where_many_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An opening for which the usher has no descriptor would fail."""
    monkeypatch.setattr(usher, "ANSWER_S", SECONDS)
    with mock.patch.object(subprocess, "Popen", functools.partial(limited, ushering.SPARE + 2)):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        assert at.usher.pid is not None
        os.kill(at.usher.pid, signal.SIGSTOP)
        program = at.opener(program=CROWD)
        await seen(functools.partial(is_held, program.pid, THREADS))
        os.kill(at.usher.pid, signal.SIGCONT)
        await at.waiting(2)
        await at.freeze()
        assert await program.has_opened()
    finally:
        await context.__aexit__(None, None, None)


@real
async def test_a_thread_that_ends_as_another_executes_a_program_does_not_wait(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        await at.freeze(ROOT)
        program = at.opener(program=REPLACED)
        await at.waiting(1)
        program.words.write(b"\n")
        await at.waiting(0)
        assert not gone(program.pid)


@pytest.mark.logs("too many programs wait in frozen slices: 1 went on")
@real
async def test_a_user_with_many_that_wait_has_none_of_another_go_on(public: Path) -> None:
    with mock.patch.object(subprocess, "Popen", functools.partial(limited, ushering.SPARE + 2)):
        context = place(public)
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        one = at.opener()
        await at.waiting(1)
        other = at.opener()
        await at.waiting(2)
        later = at.opener("setpriv", "--reuid=65534", "--clear-groups")
        assert await other.has_opened(), "the last of the user that has two"
        await at.waiting(2)
        await at.freeze()
        assert await one.has_opened()
        assert await later.has_opened()
    finally:
        await context.__aexit__(None, None, None)


def test_which_goes_on_where_no_more_can_wait() -> None:
    def waiters(*whose: str) -> list[ushering.Waiter]:
        return [ushering.Waiter(mock.Mock(), int(word[0]), Slice(f"/{word[1:]}"), ROOT) for word in whose]

    for words, expected in (
        ("1a 1a 1a", 2),  # the newcomer
        ("1a 1a 2a", 1),
        ("1a 2a 1a", 2),  # the newcomer, since its user would have the most
        ("1a 2a 3a", 2),
        ("1a 1b 1a 1c", 2),
        ("1a 1a 1b 1b", 3),
        ("2a 1a 1a 2b 2b 3a", 4),
    ):
        *waiting, came = waiters(*words.split())
        assert ushering.surplus(waiting, came) is [*waiting, came][expected], words


ONCE = """
asked = set()
def once(self, pid):
    if pid in asked:
        signal.pause()
    asked.add(pid)
    return False
ushering.Ushering._is_of_the_daemon = once
"""
"""Code of an usher that hangs when it looks at the parents of a program twice."""


@real
async def test_the_parents_of_what_waits_are_looked_at_once(tmp_path: Path) -> None:
    """There may be 64 of each of 1024, at every beat: an usher that takes too long for them is ended, and all go on."""
    with mock.patch.object(subprocess, "Popen", functools.partial(altered, ONCE)):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        former = at.usher.pid
        program = at.opener()
        await at.waiting(1)
        await at.freeze(ROOT)
        await at.waiting(1)
        assert at.usher.pid == former
        assert not await program.has_opened(0)
    finally:
        await context.__aexit__(None, None, None)


@pytest.mark.logs("none of .*/libcuda.so.1 is there: no program waits")
@real
async def test_a_file_that_has_left_its_place_is_marked_no_longer_than_others(tmp_path: Path) -> None:
    with mock.patch.object(subprocess, "Popen", often):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        at.file.rename(tmp_path / "former")
        await at.freeze(ROOT)
        assert len(marks(at.usher.pid)) == 1, "it is what programs may have by another name"
        await at.freeze()
        assert not marks(at.usher.pid)
    finally:
        await context.__aexit__(None, None, None)


@pytest.mark.logs("usher: .*/libcuda.so.1 .type 0x[0-9a-f]+.: its filesystem may not answer by itself")
@real
async def test_a_file_of_a_filesystem_that_may_not_answer_is_not_marked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(subprocess, "Popen", functools.partial(altered, "ushering.LOCAL = {0x6969}")):
        context = place(tmp_path)
        at = await context.__aenter__()
    try:
        await at.freeze(ROOT)
        await at.freeze(ROOT)
        assert not marks(at.usher.pid)
        assert await at.opener().has_opened()
        assert caplog.text.count("may not answer") == 1
    finally:
        await context.__aexit__(None, None, None)


@real
async def test_thousands_of_slices_are_told_in_parts(tmp_path: Path) -> None:
    async with place(tmp_path) as at:
        many = [Slice(f"/{number}/{'x' * 200}") for number in range(3000)]
        await at.freeze(*many)
        assert await at.opener().has_opened()
        await at.freeze(*many, ROOT)
        program = at.opener()
        assert not await program.has_opened(SOON_S)
        await at.freeze(*many)
        assert await program.has_opened()
