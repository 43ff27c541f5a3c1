"""Looks at programs that make a reader wait: no other look waits, no answer is invented, and their threads are few."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import trio
from trio.testing import MockClock

from backend.process import exits, identity, inside, looks, procfs
from backend.process.identity import Process
from tests.support.harness import REAL_S, time_for_a_look, until
from tests.support.mounted import eventually

Spawn = Callable[..., subprocess.Popen[bytes]]

OTHER = 65534
"""User of the programs that hold on to readers."""


@attrs.define
class Held:
    """Programs from which no read returns, until released."""

    pids: set[int] = attrs.field(factory=set)
    go: threading.Event = attrs.field(factory=threading.Event)
    reads: int = 0
    """Number of reads that are, or were, with one of them."""

    def pass_(self, pid: int) -> None:
        """Hold a reader on its way."""
        if pid in self.pids:
            self.reads += 1
            self.go.wait()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found, stat, maps, owner = Held(), procfs.stat, inside.in_maps, identity.owner_of

    def wait_for(pid: int, read: Callable[[int], object]) -> object:
        found.pass_(pid)
        return read(pid)

    monkeypatch.setattr(looks, "ANSWER_S", 60.0)
    monkeypatch.setattr(procfs, "stat", lambda pid: wait_for(pid, stat))
    monkeypatch.setattr(inside, "in_maps", lambda pid: wait_for(pid, maps))
    monkeypatch.setattr(looks, "owner_of", lambda pid: OTHER if pid in found.pids else owner(pid))
    yield found
    found.go.set()
    eventually(lambda: not looks._users, "they came back")


def refused(work: Callable[[], object], words: str) -> None:
    with pytest.raises(OSError, match=words) as raised:
        work()
    assert raised.value.errno == errno.EBUSY


LATE, TOO_MANY = "it does not let itself be looked at", "programs of its user do not let themselves"

ASKED = {
    "who it is": looks.identified,
    "whether it is still that one": lambda pid: looks.verify(Process(pid, 1)),
    "what is in it": inside.has_library,
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
def test_who_does_not_let_itself_be_looked_at_is_not_known_and_keeps_nobody(
    held: Held, spawn: Spawn, asked: Callable[[int], object]
) -> None:
    """The loop goes on, others are looked at, and no user's programs hold more threads than allowed."""
    pids = [spawn().pid for _ in range(looks.STUCK + 3)]
    held.pids.update(pids)
    clock = MockClock()  # which stands still, so a busy machine makes no look late

    async def ask(pid: int) -> None:
        with pytest.raises(OSError, match=f"{LATE}|{TOO_MANY}") as raised:
            await asked(pid)  # type: ignore[misc]
        assert raised.value.errno == errno.EBUSY

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            for pid in pids:
                nursery.start_soon(ask, pid)
            for count in range(1, looks.STUCK + 1):
                await until(lambda count=count: held.reads == count, "a thread is with it")  # type: ignore[misc]
                assert (await looks.identified(os.getpid())).pid == os.getpid(), "another user's is looked at"
                await time_for_a_look(clock)
        assert held.reads == looks._users[OTHER].at == looks.STUCK
        assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0, "others have theirs"
        with pytest.raises(OSError, match=TOO_MANY):
            await asked(pids[0])  # type: ignore[misc]
        assert held.reads == looks.STUCK
        held.go.set()
        await until(lambda: not looks._users, "they came back")
        assert (await looks.identified(pids[0])).pid == pids[0]

    trio.run(test, clock=clock)


def test_a_thread_of_somebody_else_waits_no_longer(held: Held, spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the threads of levers, or the thread that checks for undone settings."""
    pid = spawn().pid
    held.pids.add(pid)
    ask = partial(looks.look_here, pid, partial(identity.start_time, pid))
    with monkeypatch.context() as patch:
        patch.setattr(looks, "ANSWER_S", 0.01)
        for _ in range(looks.STUCK):
            refused(ask, LATE)
    refused(ask, TOO_MANY)
    eventually(lambda: held.reads == looks.STUCK, "a thread for each")
    assert looks.look_here(os.getpid(), lambda: 1) == 1
    with pytest.raises(ProcessLookupError):
        looks.look_here(os.getpid(), partial(os.kill, (1 << 22) - 1, 0))


def test_many_at_once_wait_for_each_other_and_none_is_refused(spawn: Spawn) -> None:
    """A program that is slow because the machine is slow does not count as holding on."""
    pid, at_once, most = spawn().pid, 0, 0

    def look() -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        found = identity.start_time(pid)
        at_once -= 1
        return found

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(10 * looks.STUCK):
                nursery.start_soon(looks.look, pid, look)

    trio.run(test)
    assert most == 1
    assert not looks._users


def test_who_gives_up_leaves_a_thread_that_counts(held: Held, spawn: Spawn) -> None:
    pid = spawn().pid
    held.pids.add(pid)

    async def test() -> None:
        for count in range(1, looks.STUCK + 1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(looks.identified, pid)
                await until(lambda count=count: held.reads == count, "a thread is with it")  # type: ignore[misc]
                nursery.cancel_scope.cancel()
        with pytest.raises(OSError, match=TOO_MANY):
            await looks.identified(pid)

    trio.run(test)


def test_who_is_cancelled_before_there_is_a_thread_leaves_none() -> None:
    async def test() -> None:
        with trio.CancelScope() as scope:
            scope.cancel()
            await looks.look(os.getpid(), lambda: 1)
        assert not looks._users

    trio.run(test)


# A machine that stands still, or has no processor for the daemon


@pytest.fixture
def standstill(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first wait of a thread end without a result, after more time than it had: no other thread has run
    meanwhile. In the second wait they run."""
    waits, hours = itertools.count(), itertools.count()

    def turn() -> bool:
        if next(waits) == 0:
            return False
        held.go.set()
        return True

    class Event(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return turn() and super().wait(REAL_S)

    class Semaphore(threading.Semaphore):
        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            return turn() and super().acquire(timeout=REAL_S)

    monkeypatch.setattr(looks, "threading", SimpleNamespace(Event=Event, Semaphore=Semaphore, Lock=threading.Lock))
    monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))


def test_a_machine_that_stands_still_makes_no_program_one_that_holds_on(held: Held, spawn: Spawn) -> None:
    pid, found, clock = spawn().pid, [], MockClock()
    held.pids.add(pid)

    async def ask() -> None:
        found.append(await looks.identified(pid))

    async def test() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: held.reads, "a thread is with it")
            for _ in range(looks.PARTS - 1):
                await trio.testing.wait_all_tasks_blocked()
                clock.jump(3600.0)
            await trio.testing.wait_all_tasks_blocked()
            held.go.set()
            await until(lambda: not looks._users[OTHER].at, "it came back")
            clock.jump(looks.ANSWER_S)

    trio.run(test, clock=clock)
    assert found == [identity.identify(pid)]


@pytest.mark.usefixtures("standstill")
def test_nor_for_a_thread_of_somebody_else(held: Held, spawn: Spawn) -> None:
    pid = spawn().pid
    held.pids.add(pid)
    assert looks.look_here(pid, partial(identity.identify, pid)).pid == pid


@pytest.mark.usefixtures("standstill")
def test_nor_for_a_daemon_that_begins(held: Held, spawn: Spawn) -> None:
    later = Process(spawn().pid, 1)
    held.pids.add(later.pid)
    assert looks.gone([later]) == {later}


# Local shortages

NO_THREAD = RuntimeError("can't start new thread")


def test_no_thread_to_look() -> None:
    with mock.patch.object(trio.to_thread, "run_sync", side_effect=NO_THREAD), pytest.raises(BlockingIOError):
        trio.run(looks.identified, os.getpid())
    with mock.patch.object(trio.lowlevel, "start_thread_soon", side_effect=NO_THREAD):
        with pytest.raises(BlockingIOError):
            looks.look_here(os.getpid(), lambda: 1)
        assert looks.gone([Process(os.getpid(), 1)]) == frozenset(), "nobody is forgotten for that"
    assert not looks._users


def test_its_own_error_is_not_that_there_is_no_thread() -> None:
    def full() -> None:
        raise BlockingIOError(errno.EAGAIN, "its own")

    with pytest.raises(BlockingIOError, match="its own"):
        trio.run(looks.look, os.getpid(), full)
    with pytest.raises(BlockingIOError, match="its own"):
        looks.look_here(os.getpid(), full)
    assert not looks._users


# State left by an earlier daemon


@pytest.mark.logs("some programs do not let themselves be looked at")
def test_who_does_not_let_itself_be_looked_at_is_taken_for_who_it_was(
    held: Held, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon starts all the same, and a process that is gone, or another by now, is told from a live one."""
    times = iter([0.0, 60.0])  # the others have all the time they need; then it is over
    monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(looks, "START_S", 60.0)
    monkeypatch.setattr(looks, "PARTS", 1)
    stuck, here, dead = (identity.identify(spawn().pid) for _ in range(3))
    later = Process(identity.identify(spawn().pid).pid, 1)
    held.pids.add(stuck.pid)
    os.kill(dead.pid, 9)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    watch = exits.ExitWatch(lambda process: None)
    try:
        assert watch.take_over([stuck, here, dead, later]) == {dead, later}
        assert watch.watches(stuck)
        assert watch.lives(stuck)
        assert watch.lives(here)
        assert not watch.lives(dead)
        assert not watch.watches(later)
        os.kill(here.pid, 9)
        os.waitid(os.P_PID, here.pid, os.WEXITED | os.WNOWAIT)
        assert not watch.lives(here)
        eventually(lambda: held.reads == 1, "a thread is with the one that cannot be looked at")
    finally:
        watch.close()


# Watched processes


def test_two_who_watch_the_same_one_at_once(spawn: Spawn) -> None:
    process = identity.identify(spawn().pid)

    async def test() -> None:
        watch = exits.ExitWatch(lambda process: None)
        before = len(os.listdir("/proc/self/fd"))
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(watch.watch, process)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        watch.close()
        with pytest.raises(ProcessLookupError):
            await watch.watch(process)
        assert len(os.listdir("/proc/self/fd")) == before - 1

    trio.run(test)
