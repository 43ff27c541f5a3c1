"""How the scheduler ends turns: which programs it waits for, and how long, depending on what is known of a program."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import attrs
import pytest
import trio

import backend.cuda.managed
from backend.core.member import COMES_S, Undrained
from backend.core.records import Activity, Place
from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process
from backend.scheduler.ends import DRAIN_AWAY_US, DRAIN_MOST_US, DRAIN_UNTOLD_US, DRAIN_US, UNDRAINED_S
from backend.scheduler.parts import Pace
from backend.scheduler.scheduler import Scheduler
from tests.support.cuda_session import GIB, Drive, Rig, drive, pieces, takes, until_then
from tests.support.draining import SIZE, Sampled, Untold, fillers
from tests.support.harness import MIB, Harness, StubGpu, answers, running, settle, virtual
from tests.support.turns import coming_back, gated, without

__all__ = ["drive", "pieces"]  # fixtures

Spawn = Callable[..., subprocess.Popen[bytes]]

ANSWER_S = 0.08
"""Longest time that an answer takes of a program that waits for its launched work and is no longer waited for,
seconds.
"""


@attrs.define
class Turns:
    """A scheduler that decides nothing, and its state of one program."""

    scheduler: Scheduler
    process: Process

    @classmethod
    def of(cls, h: Harness, gpu: Any, process: Process, nursery: trio.Nursery) -> Turns:
        """Make the turns of a program."""
        scheduler = Scheduler(gpu, h.ledger, h.controller.population, h.controller._follower, 1.0)
        scheduler._ends.nursery = nursery
        return cls(scheduler, process)

    @property
    def record(self) -> Any:
        """The daemon's record of the program."""
        return self.scheduler._population.record(Member(self.process, 0))

    async def end(self) -> None:
        """End its turn."""
        await self.scheduler._change(self.process, Place(100, off=True))

    async def begin(self) -> None:
        """Begin its next turn."""
        await self.scheduler._change(self.process, Place(100))

    def back_off(self) -> None:
        """Note that its kernels did not end in time some turns ago."""
        self.record.scheduled.undrained = Undrained(trio.current_time() + 60, 60)

    def ended(self) -> TurnEnd | None:
        """How its last turn ended; None while it has a turn."""
        found: TurnEnd | None = self.record.compute.turn_end
        return found

    @property
    def drains(self) -> bool:
        """Whether it is on the runlist to drain."""
        return bool(self.record.compute.place.drains)


@virtual
async def test_where_no_use_is_told_it_is_waited_for_by_the_clock(spawn: Spawn) -> None:
    """Where that time was not enough, the next turns end without any wait."""
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        turns = Turns.of(h, gpu, await h.arrive(spawn().pid), nursery)
        gpu.works[turns.process] = Activity(tsgs=1, attached=1, managed=True)
        gpu.ends[turns.process] = TurnEnd.LATE, 60.0
        async with takes((DRAIN_US + DRAIN_UNTOLD_US) / 1e6, (DRAIN_US + DRAIN_UNTOLD_US) / 1e6 + 0.01):
            await turns.end()
            assert turns.drains
            assert turns.process not in gpu.without_gr
            while turns.drains:  # noqa: ASYNC110 - it is found by polling
                await trio.sleep(0.001)
        assert gpu.without_gr == {turns.process}
        assert turns.ended() is TurnEnd.LATE
        await turns.begin()
        async with takes(0, 0.001):
            await turns.end()
        assert gpu.without_gr == {turns.process}
        await turns.begin()
        await trio.sleep(UNDRAINED_S)
        await turns.end()
        assert turns.drains


@pytest.mark.parametrize("told", [True, False])
@virtual
async def test_what_reads_over_the_bus_is_waited_for(spawn: Spawn, told: bool) -> None:
    """Off the runlist in the middle of that it would keep its memory, and begin its next memory turn without the rest:
    as slowly, so that it would be as late again."""
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        turns = Turns.of(h, gpu, await h.arrive(spawn().pid), nursery)
        gpu.works[turns.process] = Activity(tsgs=1, attached=1, managed=True, gpu_usec=0 if told else None)
        gpu.ends[turns.process] = TurnEnd.LATE, 60.0
        turns.scheduler._ends._is_away = lambda process: process == turns.process
        turns.record.scheduled.rests = True
        turns.back_off()
        undrained = turns.record.scheduled.undrained
        await turns.end()
        assert turns.drains
        await trio.sleep(DRAIN_AWAY_US / 1e6 - 0.2)
        assert turns.drains
        await trio.sleep(0.3)
        assert gpu.without_gr == {turns.process}, "but not for ever"
        assert turns.record.scheduled.undrained is undrained
        turns.record.scheduled.undrained = None
        await turns.begin()
        await turns.end()
        await trio.sleep(DRAIN_AWAY_US / 1e6 + 0.2)
        assert turns.record.scheduled.undrained is None, "it is waited for the next time, too"


@virtual
async def test_levers_of_a_memory_turn_may_take_as_long_as_a_write(spawn: Spawn) -> None:
    """The driver's lock is held for long by calls that make memory of the host, and nothing else waits for these."""
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        turns = Turns.of(h, gpu, await h.arrive(spawn().pid), nursery)
        gpu.ends[turns.process] = TurnEnd.DRAINED, 0.003
        gpu.script("detach", partial(trio.sleep, 0.6))
        assert await turns.scheduler._rest(turns.process, MIB)
        assert gpu.without_gr == {turns.process}
        gpu.script("attach", partial(trio.sleep, 0.6))
        await turns.scheduler._wake(turns.process)
        assert not gpu.without_gr
        gpu.script("detach", partial(trio.sleep, 0.6))
        await turns.end()
        assert not turns.record.compute.place.off, "others wait for that of any other turn"


@virtual
async def test_an_end_of_a_turn_that_is_cancelled_leaves_no_gate_closed(spawn: Spawn) -> None:
    """This holds wherever it was cancelled: while it asked the program, and while it took the engines off."""
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        turns = Turns.of(h, gpu, await h.arrive(spawn().pid), nursery)
        gpu.ends[turns.process] = TurnEnd.DRAINED, 0.003
        gpu.script("detach", partial(trio.sleep, 0.003))
        for seconds in (0.002, 0.004):
            with trio.move_on_after(seconds) as scope:
                await turns.end()
            assert scope.cancelled_caught
            assert turns.ended() is not None
            await settle()
            assert turns.ended() is None
            assert gpu.turns == [("end", turns.process.pid, DRAIN_US), ("begin", turns.process.pid, 0)]
            assert gpu.without_gr == gpu.detached == set()
            assert not turns.record.compute.place.off
            gpu.turns.clear()
        await turns.end()
        assert gpu.without_gr == {turns.process}


@virtual
async def test_a_failure_at_the_end_of_one_turn_leaves_that_of_another_to_begin_anew(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one, other = await h.arrive(spawn().pid), await h.arrive(spawn().pid)
        turns = Turns.of(h, gpu, other, nursery)
        gpu.ends |= {one: (TurnEnd.DRAINED, 0.0), other: (TurnEnd.DRAINED, 0.003)}
        scheduler: Any = turns.scheduler
        scheduler._core.decide = places(one, other)
        wait = scheduler._ends.wait
        scheduler._ends.wait = mock.Mock(side_effect=KeyError)
        with pytest.raises(ExceptionGroup):
            await scheduler._step(Pace())
        await settle()
        assert turns.ended() is None
        assert gpu.turns[-1] == ("begin", other.pid, 0)
        scheduler._ends.wait = wait
        await scheduler._step(Pace())
        assert gpu.without_gr == {one, other}


@virtual
async def test_what_a_scheduler_left_as_it_failed_goes_off_all_the_same(spawn: Spawn) -> None:
    """The program had drained just before the failure."""
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        turns = Turns.of(h, gpu, await h.arrive(spawn().pid), nursery)
        gpu.works[turns.process] = Activity(tsgs=1, attached=1, managed=True, gpu_usec=0)
        gpu.ends[turns.process] = TurnEnd.LATE, 60.0
        async with trio.open_nursery() as turns.scheduler._ends.nursery:
            await turns.end()
            assert turns.drains
            gpu.ends[turns.process] = TurnEnd.DRAINED, 0.0
            gpu.script("detach", partial(trio.sleep, 0.01))
            await trio.sleep(0.005)
            assert not turns.drains
            assert not gpu.without_gr
            turns.scheduler._ends.nursery.cancel_scope.cancel()
        await settle()
        assert gpu.without_gr == {turns.process}


def places(*off: Process) -> Any:
    """Return a core that decides on these places."""

    def decide(window: int, contenders: Any, samples: Any, rests: Any) -> Any:
        yield
        return {process: Place(100, off=True) for process in off}

    return decide


@pytest.mark.parametrize("how", ["leaves", "comes"])
@pytest.mark.parametrize("told", [True, False])
@virtual
async def test_what_is_not_waited_for_drains_while_its_memory_moves(spawn: Spawn, how: str, told: bool) -> None:
    """It drains for as long as its move takes, and the scheduler waits no less for it after that."""
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        turns = Turns.of(h, gpu, await h.arrive(spawn().pid), nursery)
        gpu.works[turns.process] = Activity(tsgs=1, attached=1, managed=True, gpu_usec=0 if told else None)
        gpu.ends[turns.process] = TurnEnd.LATE, 60.0
        turns.back_off()
        undrained = turns.record.scheduled.undrained
        if how == "leaves":
            gpu.leaving = {turns.process}
        else:
            turns.record.memory.came_at = trio.current_time()
        await turns.end()
        assert turns.drains
        await trio.sleep(0.9 * COMES_S)
        assert turns.drains
        gpu.leaving = set()
        await trio.sleep(0.1 * COMES_S + DRAIN_UNTOLD_US / 1e6 + 0.01)
        assert gpu.without_gr == {turns.process}
        assert turns.record.scheduled.undrained is undrained
        await turns.begin()
        gpu.leaving = {turns.process}
        await turns.end()
        await trio.sleep(DRAIN_MOST_US / 1e6 - 0.01)
        assert turns.drains
        await trio.sleep(0.02)
        assert gpu.without_gr == {turns.process}, "but not for ever"


@pytest.mark.parametrize("how", ["untold", "back-off", "back-off, untold"])
@pytest.mark.parametrize("why", ["limit", "back"])
def test_a_turn_that_ends_while_memory_moves(drive: Drive, monkeypatch: pytest.MonkeyPatch, why: str, how: str) -> None:
    """The move continues, no write is refused, and the program is drained once the move is over."""
    monkeypatch.setattr(backend.cuda.managed, "PIECE", 8 * GIB)

    async def test(rig: Rig) -> None:
        program = await gated(rig, 16 * GIB, "/", 0)
        usage: Any = rig.gpu._usage
        usage.exact = lambda process: None if "untold" in how else 0
        await rig.h.write(program.file + "gmem.limit.high", "12G")
        await rig.h.write(program.file + "gmem.limit.high", "max")
        turns = Turns.of(rig.h, rig.gpu, program.process, rig.nursery)
        if "back-off" in how:
            turns.back_off()
        codes: list[int] = []

        async def move() -> None:
            if why == "limit":
                codes.append(await answers(rig.h.write(program.file + "gmem.limit.high", "4G")))
            else:
                await coming_back(program)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            await trio.sleep(0.02)
            assert program.listens.locked()
            await turns.end()
            assert turns.ended() is TurnEnd.LATE
            assert without(rig.fake.programs[program.process.pid]) == (False, False)
            assert rig.gpu.footprint(program.process).movable > 0
        with trio.fail_after(2 * DRAIN_UNTOLD_US / 1e6 + ANSWER_S):
            await until_then(lambda: not turns.drains)
        assert turns.ended() is TurnEnd.DRAINED
        assert codes == ([0] if why == "limit" else [])
        assert program.is_closed
        await trio.sleep(0.01)
        assert without(rig.fake.programs[program.process.pid]) == (True, False)
        await turns.begin()
        await trio.sleep(0.01)
        await turns.end()
        assert turns.ended() is TurnEnd.DRAINED
        await turns.begin()

    drive(test)


@pytest.mark.parametrize("gpu", [Untold, Sampled])
@virtual
async def test_limits_of_those_that_fill_where_no_use_is_told(spawn: Spawn, gpu: type[Untold]) -> None:
    """Each program launches all the time, and has more to drain than its slice permits; all drain nevertheless."""
    async with fillers(spawn, gpu()) as p:
        service, _ = await p.service(load=0.1)
        await p.h.write(f"{service.pid}/0/compute.priority", 0)
        two = [await p.filler() for _ in range(2)]
        await trio.sleep(15)  # the run-ahead of each from before its first turn has run
        refused, ends = [], []
        for limit in range(15):
            while not any(map(p.is_off, two)):  # noqa: ASYNC110 - the runlist tells nothing
                await trio.sleep(0.02)
            process = next(filter(p.is_off, two))
            ends.append(p.record(process).compute.turn_end)
            file = f"{process.pid}/0/gmem.limit.high"
            refused.append(await answers(p.h.write(file, (1 + limit % 7) * MIB)))
            await p.h.write(file, SIZE)
            await trio.sleep(0.7)
        assert ends == [TurnEnd.DRAINED] * 15
        assert refused == [0] * 15
