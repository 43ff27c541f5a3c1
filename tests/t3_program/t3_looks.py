"""The daemon beside programs whose files make their reader wait: it goes on, and so do all other programs."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import trio
from trio.testing import MockClock

from backend.common import threads
from backend.door import tenants
from backend.door.wire import SIZE, Message, Op
from backend.process import identity, looks, procfs
from backend.process.identity import Process
from tests.support.harness import Harness, answers, running, time_for_a_look, until, virtual
from tests.support.mounted import eventually

Spawn = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).parents[2]
OTHER = 65534
"""User of the programs that hold on to readers."""


class Holding:
    """Programs of a user that block a reader of their files."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.readers = 0
        self._real = procfs.of_process, procfs.read_stat

    def of_process(self, pid: int, name: str) -> bytes:
        """Stand in for :func:`procfs.of_process`, in which the loop would stand still."""
        if name == "stat":
            self._wait_for(pid)
        return self._real[0](pid, name)

    def read_stat(self, fd: int) -> procfs.Stat:
        """Stand in for :func:`procfs.read_stat`."""
        self._wait_for(int(os.readlink(f"/proc/self/fd/{fd}").split("/")[2]))
        return self._real[1](fd)

    def _wait_for(self, pid: int) -> None:
        if identity.owner_of(pid) == OTHER:
            self.readers += 1
            self.go.wait()


@pytest.fixture
def holding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holding]:
    found = Holding()
    monkeypatch.setattr(procfs, "of_process", found.of_process)
    monkeypatch.setattr(procfs, "read_stat", found.read_stat)
    yield found
    found.go.set()
    eventually(lambda: not looks._users, "they came back")


@pytest.fixture
def others() -> Iterator[Callable[[str], int]]:
    """Return a function that starts programs of that user: each says hello at a socket and waits."""
    pids: list[int] = []

    def start(path: str = "") -> int:
        become, became = os.pipe()
        pids.append(pid := os.fork())
        if pid:
            os.close(became)
            os.read(become, 1)  # returns at the end of the pipe; until then the process is root's
            os.close(become)
            return pid
        try:
            os.setgid(OTHER)
            os.setuid(OTHER)
            os.close(became)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                if path:
                    connection.connect(path)
                    connection.send(Message(Op.HELLO, 1).encode())
                signal.pause()
        finally:
            os._exit(0)

    yield start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Echo:
    """A session that answers."""

    known: Sequence[Process] = ()

    def __init__(self, process: Process, line: tenants.Line) -> None:
        self.process, self._line = process, line
        Echo.known = [*Echo.known, process]

    async def run(self) -> None:
        while message := await self._line.receive():
            await self._line.send(message.answer())

    def close(self) -> None:
        pass


@pytest.mark.logs("a program cannot be served: programs of its user do not let", "it does not let itself be looked at")
def test_who_comes_and_does_not_let_itself_be_looked_at_keeps_nobody(
    holding: Holding, others: Callable[[str], int], public: Path
) -> None:
    """A program that comes after it is served at once, and connected ones go on; the held one is dropped in time."""
    path, clock = public / "socket", MockClock()  # which stands still, so a busy machine makes no caller late
    Echo.known = []

    async def served(path: Path) -> None:
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            await connection.connect(os.fspath(path))
            await connection.send(Message(Op.HELLO, 1).encode())
            assert Message.decode(await connection.recv(SIZE)).reply

    async def test() -> None:
        with tenants.listening(path) as listener:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(tenants.serve, listener, Echo)
                await served(path)
                count = looks.STUCK + 3
                for _ in range(count):
                    others(os.fspath(path))
                await until(lambda: holding.readers, "the first is looked at")
                for number in range(1, looks.STUCK + 1):
                    await until(
                        lambda number=number: holding.readers == number,  # type: ignore[misc]
                        "it is looked at",
                    )
                    await served(path)
                    await time_for_a_look(clock)
                await until(lambda: not list(tenants_of(nursery)), "all of them are hung up on")
                await served(path)
                assert holding.readers == looks.STUCK
                assert {process.pid for process in Echo.known} == {os.getpid()}
                holding.go.set()
                await until(lambda: not looks._users, "they came back")
                pid = others(os.fspath(path))
                await until(lambda: Echo.known[-1].pid == pid, "it is served now")
                nursery.cancel_scope.cancel()

    def tenants_of(nursery: trio.Nursery) -> Iterator[object]:
        (serving,) = nursery.child_tasks
        for inner in serving.child_nurseries:
            yield from inner.child_tasks

    trio.run(test, clock=clock)


def test_mkdir_of_one_is_busy_and_everybody_else_goes_on(holding: Holding, others: Callable[[], int]) -> None:
    async def test() -> None:
        async with running() as h:
            with mock.patch.object(looks, "in_a_thread", threads.in_a_thread):
                process = await h.arrive(os.getpid())
                pid, result = others(), []

                async def make() -> None:
                    result.append(await answers(h.operations.mkdir(1, str(pid).encode(), 0o755, h.ctx)))

                async with trio.open_nursery() as nursery:
                    nursery.start_soon(make)
                    await until(lambda: holding.readers, "it is looked at")
                    assert str(process.pid) in await h.listdir("/")
                    await h.write(f"{process.pid}/0/gmem.limit.high", 1 << 20)
                    assert await answers(h.operations.mkdir(1, b"1", 0o755, h.ctx)) == 0, "that of another user"
                    assert not result
                    await time_for_a_look(clock)
                assert result == [errno.EBUSY]
                assert str(pid) not in await h.listdir("/")
                holding.go.set()
                await until(lambda: not looks._users, "it came back")
                assert await answers(h.operations.mkdir(1, str(pid).encode(), 0o755, h.ctx)) == 0

    clock = MockClock()
    trio.run(test, clock=clock)


@virtual
async def test_who_is_in_the_tree_is_never_looked_at_again(spawn: Spawn) -> None:
    """Its life, place and state come from its pidfd, and from files that never wait."""
    async with running() as h:
        child = spawn()
        process, above = await h.arrive(child.pid), await h.arrive(os.getpid())
        with mock.patch.object(procfs, "stat", side_effect=AssertionError("it is looked at")):
            await everything(h, process)
            child.kill()
            await h.gone(process)
        assert above in [resident.process for resident in h.controller.population.residents()]


async def everything(h: Harness, process: Process) -> None:
    """Do all that is done with a program from its coming to its end."""
    pid = process.pid
    await h.controller.bookkeeper.arrive(process, 0)
    await h.write(f"{pid}/0/gmem.limit.high", 1 << 20)
    for frozen in (1, 0):
        await h.write(f"{pid}/0/compute.freeze", frozen)
    h.world.cgroups[pid] = identity.Slice("/elsewhere")
    await trio.sleep(1)
    assert "elsewhere" in await h.listdir("slice")
    assert await answers(h.operations.rmdir(1, str(pid).encode(), h.ctx)) in (0, errno.EBUSY)
    await h.controller.bookkeeper.arrive(process, 0) if h.controller.population.resident(process) else None


# Code that reads such files

READS = re.compile(
    r"procfs\.stat\(|(?<!thread\.)\b(?:start_time|is_alive)\b(?! =)|(?<![.\w])identify\(|"
    r"/proc/\{[^}]*\}/(?:stat|maps|smaps|mem|environ|exe|cwd|root|ns|fd|io|stack|wchan|auxv|cmdline|task)\b"
)
WHERE = {
    "backend/process/identity.py": "the functions themselves",
    "backend/process/looks.py": "they are asked in threads, for a limited time",
    "backend/process/inside.py": "by it",
    "backend/process/victims.py": "by it",
    "backend/space/spaces.py": "by it",
    "backend/nvidia/linux.py": "by it",
    "backend/nvidia/device.py": "for linux.py",
    "backend/door/peers.py": "of a daemon, before Linux 6.5, for root's commands",
    "backend/nvidia/listed.py": "the System's, in a thread",
    "backend/nvidia/enforce.py": "the System's, in threads of levers",
    "backend/nvidia/release.py": "in threads of the guard, which are left",
    "backend/nvidia/gpu.py": "the System's, for a command",
    "backend/nvidia/selftest.py": "of its own child",
    "backend/nvidia/checkpoint/pinned.py": "in an agent, which is left to itself",
    "ggroupfs/commands/kill.py": "for `top`, in a thread, before a signal that its user asked for",
    "ggroupfs/commands/mounted.py": "of a daemon, for `doctor`, in a thread that is left after 2 s",
}
"""Files of the daemon and the commands that read what a program can make them wait for, with the justification."""


def test_nothing_else_reads_what_a_program_can_have_it_wait_for() -> None:
    found = {
        os.fspath(path.relative_to(ROOT))
        for package in ("backend", "ggroupfs")
        for path in (ROOT / package).rglob("*.py")
        if READS.search(path.read_text())
    }
    assert found == WHERE.keys()
