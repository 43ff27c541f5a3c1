"""The process that has programs of frozen slices wait as they open a file: what waits, what never does, what ends it.

The files are ordinary ones, of which no program but those of the test knows. All that runs here is below the root,
which stands for the slice that is frozen.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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
"""Seconds in which what waits is seen to do so."""

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

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="fanotify(7) needs root")


@attrs.define
class Opener:
    """A program that opens the file."""

    pid: int
    answer: Any
    """The pipe of its words."""

    async def has_opened(self, seconds: float = SECONDS) -> bool:
        """Whether it has the file open by then."""
        with trio.move_on_after(seconds):
            await trio.lowlevel.wait_readable(self.answer)
            words = self.answer.readline().decode().strip()
            assert words in ("opened", ""), words
            return bool(words)
        return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


@attrs.define
class Place:
    """An usher, the file that it looks after, and what is frozen."""

    usher: Usher
    file: Path
    facts: dict[str, str]
    frozen: list[Slice]
    openers: contextlib.ExitStack

    async def freeze(self, *slices: Slice) -> None:
        """Has these frozen, and no others."""
        self.frozen[:] = slices
        self.usher.changed()
        await self.usher.told()

    def opener(self, *before: str, file: Path | None = None, daemons: bool = False) -> Opener:
        """Starts one, by the words before it; one that stays a child of ours with `daemons`."""
        program = OPENER.replace(LEAVE, "\n") if daemons else OPENER
        words = [*before, "/usr/bin/python3", "-c", program, os.fspath(file or self.file)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert process.stdout is not None
        assert process.stdin is not None
        found = Opener(int(process.stdout.readline()), process.stdout)
        self.openers.callback(process.wait)
        self.openers.callback(process.stdout.close)
        self.openers.callback(process.stdin.close)
        self.openers.callback(found.kill)
        return found

    async def waiting(self, count: int) -> None:
        """Returns once so many wait, by the usher's own word."""
        with trio.fail_after(SECONDS):
            while self.facts["usher.waiting"] != str(count):
                self.usher.changed()
                await self.usher.told()
                await trio.sleep(0.001)


@contextlib.asynccontextmanager
async def place(path: Path, *files: str) -> AsyncIterator[Place]:
    """An usher at work."""
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
    """Returns once that is so."""
    with trio.fail_after(SECONDS):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.01)


@contextlib.contextmanager
def starter(file: Path) -> Iterator[Callable[[], object]]:
    """What has a program read the file that is none of ours, without a wait for it."""
    words = ["setsid", "-f", "sh", "-c", 'while read line; do cat "$1" & done', "sh", os.fspath(file)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as process:
        assert process.wait(SECONDS) == 0  # the shell has left us
        assert process.stdin is not None
        yield functools.partial(os.write, process.stdin.fileno(), b"\n")


def real(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs an async test in real time."""

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
    """Its agents and its self-test use CUDA in its own cgroup, whatever is frozen."""
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
    """As in a container that NVIDIA's runtime gave the driver's library, by a bind mount."""
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
    """What is killed ends when it has a processor; it leaves no zombie then."""
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
        await seen(lambda: at.usher.pid not in (None, former) and at.facts["usher"] == "yes")
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
    """A daemon that has all wait which open the file, and the pid of its usher."""
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
    """Killed, be the usher stopped by then or not; and stopped, which is found out by the usher alone."""
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
    """Whether a process has ended."""
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
    """A process that can have no more descriptors."""
    return POPEN(["prlimit", f"--nofile={descriptors}:{descriptors}", *words], **options)


POPEN = subprocess.Popen


@real
async def test_files_are_marked_only_while_something_is_frozen(tmp_path: Path) -> None:
    """Else an opening costs nothing, and waits for nothing."""
    async with place(tmp_path) as at:
        assert not marks(at.usher.pid)
        await at.freeze(ROOT)
        assert len(marks(at.usher.pid)) == 1
        await at.freeze()
        assert not marks(at.usher.pid)


def has_mark(of: Usher, words: str) -> bool:
    """Whether that is said of one of its marks. It is told something, for it looks for files then."""
    of.changed()
    return any(words in mark for mark in marks(of.pid))


def marks(pid: int | None) -> list[str]:
    """The inodes that a process has marked (proc_pid_fdinfo(5))."""
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
    """As when a driver is installed."""
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


def often(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """An usher that looks for the files all the time."""
    program = "import sys; from backend.process import ushering; ushering.MARK_S = 0.0; ushering.main()"
    return POPEN([words[0], "-c", program, *words[3:]], **options)


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
