"""Requests are taken in a row, and no task is left out: over pipes, without a mount."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from ggroupfs.fs.receiving import ROW, Lock, Requests
from ggroupfs.fs.yielding import shorten_slices
from tests.support.harness import virtual


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Yield the end that is read, and the end that is written."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


class Others:
    """The rest of the daemon, which counts its turns."""

    def __init__(self) -> None:
        self.turns = 0

    async def run(self) -> None:
        while True:
            self.turns += 1
            await trio.lowlevel.checkpoint()

    async def have_none_in_a_row(self, requests: Requests, here: int) -> None:
        """Take a request, which may be waited for, and then a row of ROW, during which the rest has no turn."""
        await requests.wait_readable(here)
        os.read(here, 1)
        before = self.turns
        for _ in range(ROW):
            await requests.wait_readable(here)
            os.read(here, 1)
        assert self.turns == before


@virtual
async def test_a_row_is_taken_without_a_turn_and_then_there_is_one(pipe: tuple[int, int]) -> None:
    here, there = pipe
    os.write(there, bytes(10 * ROW))
    requests, others, rows = Requests(), Others(), 9
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others.run)
        for _ in range(rows):
            await others.have_none_in_a_row(requests, here)
        assert rows - 1 <= others.turns <= rows + 1, "the others have one turn between two rows"
        nursery.cancel_scope.cancel()


@virtual
async def test_what_a_program_asks_once_it_runs_belongs_to_the_row(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answered program waits for the daemon's CPU, and writes its next request once it has it."""
    here, there = pipe
    monkeypatch.setattr(os, "sched_yield", lambda: os.write(there, b"x"))
    requests, others = Requests(yields=True), Others()
    os.write(there, b"x")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others.run)
        await others.have_none_in_a_row(requests, here)
        nursery.cancel_scope.cancel()


@virtual
async def test_a_daemon_that_would_pay_for_it_does_not_yield(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pipe
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it yields"))
    requests = Requests()
    async with trio.open_nursery() as nursery:
        for _ in range(ROW):
            nursery.start_soon(requests.wait_readable, here)
            await wait_all_tasks_blocked()
            os.write(there, b"x")
            await wait_all_tasks_blocked()
            os.read(here, 1)


def test_slices_are_short_where_the_kernel_keeps_them() -> None:
    """For the asking thread, whose nice value and policy stay the same."""

    def look() -> tuple[int, int]:
        return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def ask() -> tuple[bool, bool]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3)
        before = look()
        return shorten_slices(), look() == before

    linux = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask).result() == (linux >= (6, 12), True)


@virtual
async def test_what_is_not_there_is_waited_for(pipe: tuple[int, int]) -> None:
    here, there = pipe
    requests, taken = Requests(), []

    async def take() -> None:
        while True:
            await requests.wait_readable(here)
            taken.append(os.read(here, 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        for count in range(2 * ROW):
            await wait_all_tasks_blocked()
            assert len(taken) == count
            os.write(there, b"x")
        nursery.cancel_scope.cancel()


@virtual
async def test_a_row_ends_when_the_daemon_does(pipe: tuple[int, int]) -> None:
    """However many requests there are."""
    here, there = pipe
    os.write(there, bytes(10 * ROW))
    requests = Requests()
    with trio.CancelScope() as scope:
        scope.cancel()
        while True:
            await requests.wait_readable(here)
            os.read(here, 1)
    assert os.read(here, 20 * ROW), "some are left"


@virtual
async def test_the_task_that_lets_go_takes_it_again_first() -> None:
    """A waiting task gets the lock as soon as the task that took it again has to wait itself."""
    lock, had = Lock(), []

    async def worker(number: int, times: int) -> None:
        for _ in range(times):
            async with lock:
                had.append(number)
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery, lock:
        for number in range(3):
            nursery.start_soon(worker, number, 4)
        await wait_all_tasks_blocked()
        assert had == []
    assert [had[4 * n : 4 * n + 4] for n in range(3)] == [[n] * 4 for n in had[::4]]
    assert sorted(had[::4]) == [0, 1, 2]


@given(st.lists(st.lists(st.sampled_from(["take", "wait", "turn", "end"]), max_size=8), min_size=1, max_size=6))
def test_one_at_a_time_and_each_in_the_end(workers: list[list[str]]) -> None:
    """Whatever workers do with and without the lock, and whichever ends while it waits."""

    @virtual
    async def run() -> None:
        lock, inside, ended = Lock(), 0, 0

        async def worker(words: list[str]) -> None:
            nonlocal inside, ended
            with trio.move_on_after(0.5 if "end" in words else 60):
                for word in words:
                    if word == "turn":
                        await trio.lowlevel.checkpoint()
                        continue
                    async with lock:
                        inside += 1
                        assert inside == 1
                        try:
                            if word != "take":
                                await trio.sleep(1 if word == "end" else 0.1)
                        finally:
                            inside -= 1
            ended += 1

        async with trio.open_nursery() as nursery:
            for words in workers:
                nursery.start_soon(worker, words)
        assert ended == len(workers)

    run()
