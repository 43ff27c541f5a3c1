"""Programs whose turn is over and that are not done yet: they drain on the runlist, and go off once they are."""

from __future__ import annotations

import contextlib
import errno
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import pytest
import trio

from backend.core.member import Record
from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.core.turns import TurnEnd
from backend.cuda.managed import Standby
from backend.cuda.server import ANSWER_S, WAIT_US
from backend.door.wire import Message, Op
from backend.process.identity import Member, Process
from backend.scheduler import ends
from backend.scheduler.ends import DRAIN_SLICE_US, UNDRAINED_S
from backend.scheduler.failing import AGAIN_S
from backend.scheduler.fair import SWITCH_US
from backend.scheduler.use import Sample
from tests.support.contenders import Bench, Programs
from tests.support.cuda_session import GIB, Drive, Rig, drive, pieces, until_then
from tests.support.harness import MIB, answers, running, virtual
from tests.support.turns import BOUND_US, Gated, begin_turn, drain, end_turn, gated, without

__all__ = ["drive", "pieces"]  # fixtures

Spawn = Callable[..., subprocess.Popen[bytes]]

LONG_US = 2_000_000
"""Bound of a drain in these tests, microseconds."""


def engines(rig: Rig, program: Gated) -> tuple[bool, bool]:
    """Whether it is without GR, and without its copy engines."""
    return without(rig.fake.programs[program.process.pid])


async def draining(rig: Rig, drain_s: float = 0.5) -> Gated:
    """A program of 8 GiB that drains."""
    program = await gated(rig, 8 * GIB, "/job", 0)
    program.drain_s = drain_s
    assert await end_turn(rig.h, program, stays=True) is TurnEnd.LATE
    assert engines(rig, program) == (False, False)
    assert program.is_closed
    return program


def turn_end(rig: Rig, program: Gated) -> TurnEnd | None:
    """What the daemon knows of its turn."""
    return rig.h.controller.population.record(Member(program.process, 0)).compute.turn_end


# With the library


def test_what_drains_gives_memory_and_goes_off_once_it_is_drained(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig)
        began = trio.current_time() - BOUND_US / 1e6
        await rig.h.write(program.file + "gmem.limit.high", "7G")
        assert program.resident == 7 * GIB, "as if it ran: once nothing runs"
        assert trio.current_time() - began == pytest.approx(0.5 + 1 / 32, abs=0.03)
        assert await drain(rig.h, program, LONG_US) is TurnEnd.DRAINED
        assert trio.current_time() - began == pytest.approx(0.5 + 1 / 32, abs=0.03)
        assert engines(rig, program) == (True, False)
        assert program.is_closed
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident == 6 * GIB
        asked = [us for op, us in program.told if op == Op.END_TURN]
        assert all(us <= WAIT_US for us in asked), "what its library does nothing else in"
        assert len(asked) <= 0.5e6 / WAIT_US + 2
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)
        assert not program.is_closed

    drive(test)


def test_what_does_not_drain_goes_off_as_it_is(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        assert await drain(rig.h, program, LONG_US) is TurnEnd.LATE
        assert engines(rig, program) == (True, False)
        assert rig.gpu.footprint(program.process).movable == 0
        assert await rig.h.refused(program.file + "gmem.limit.high", "6G") == errno.EBUSY
        await begin_turn(rig.h, program)
        assert rig.gpu.footprint(program.process).movable == 8 * GIB

    drive(test)


def test_its_next_turn_begins_while_it_drains(drive: Drive) -> None:
    """Without a lever: it is on the runlist. Nothing closes the gate again."""

    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        found: list[TurnEnd | None] = []

        async def wait() -> None:
            found.append(await drain(rig.h, program, LONG_US))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.12)
            await begin_turn(rig.h, program)
            await trio.sleep(WAIT_US / 1e6)
        assert found == [None]
        assert engines(rig, program) == (False, False)
        await trio.sleep(1)
        assert not program.is_closed
        assert program.told[-1][0] == Op.BEGIN_TURN
        assert turn_end(rig, program) is None
        program.drain_s = 0.0
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED, "and it is asked again"

    drive(test)


def test_a_wait_that_is_given_up_and_begun_again(drive: Drive) -> None:
    """The answer to the one before it is waited for, and no program is taken to be mute."""

    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        with trio.move_on_after(0.12):
            await drain(rig.h, program, LONG_US)
        assert await drain(rig.h, program, 0) is TurnEnd.LATE
        assert engines(rig, program) == (True, False)
        await begin_turn(rig.h, program)
        assert not program.is_closed

    drive(test)


def test_a_library_that_is_busy_is_waited_for(drive: Drive) -> None:
    """Memory that comes back takes up to 2 s in the thread that answers."""

    async def test(rig: Rig) -> None:
        program = await draining(rig, 0.3)

        async def busy(message: Message) -> Message | None:
            await trio.sleep(1)
            return await program.library(message)

        program.obey = busy
        assert await drain(rig.h, program, LONG_US) is TurnEnd.DRAINED
        assert engines(rig, program) == (True, False)
        program.obey = program.library
        await begin_turn(rig.h, program)
        assert await end_turn(rig.h, program, stays=True) is TurnEnd.LATE
        program.obey = busy
        program.drain_s = 60.0
        assert await drain(rig.h, program, BOUND_US) is TurnEnd.LATE, "nothing says that its gate is open"
        await trio.sleep(1 + ANSWER_S)
        await begin_turn(rig.h, program)

    drive(test)


def test_frozen_and_thawed_while_it_drains(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig, 0.5)
        await rig.h.write(program.file + "compute.freeze", 1)
        assert engines(rig, program) == (True, True)
        assert "frozen 1\n" in await rig.h.read(program.file + "compute.events")
        await rig.h.write(program.file + "compute.freeze", 0)
        assert engines(rig, program) == (False, False)
        assert program.is_closed
        assert await drain(rig.h, program, LONG_US) is TurnEnd.DRAINED
        assert engines(rig, program) == (True, False)

    drive(test)


def test_a_freeze_is_not_kept_waiting_by_a_drain(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, rig.h, program, LONG_US)
            await trio.sleep(0.1)
            began = trio.current_time()
            await rig.h.write(program.file + "compute.freeze", 1)
            assert trio.current_time() - began < 0.1
            assert engines(rig, program) == (True, True)
        assert turn_end(rig, program) is TurnEnd.LATE
        await rig.h.write(program.file + "compute.freeze", 0)
        assert engines(rig, program) == (True, False), "its wait is over"
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)

    drive(test)


@pytest.mark.parametrize("how", ["moved", "dies", "disconnects", "captures"])
def test_what_else_may_become_of_it_while_it_drains(drive: Drive, how: str) -> None:
    async def test(rig: Rig) -> None:
        program, found = await draining(rig, 60), list[TurnEnd | None]()
        group = Member(program.process, 0)

        async def move(*words: Any) -> None:
            standby = words[-1]
            assert isinstance(standby, Standby)
            await standby.begin()
            assert not program.is_closed, "it left its turn"
            standby.over.set()
            raise OSError(errno.EBUSY, "it does not come to a rest")

        async def refuse(message: Message) -> Message | None:
            return message.refuse(errno.EBUSY) if message.op == Op.END_TURN else await program.library(message)

        async def wait() -> None:
            found.append(await rig.h.controller._follower.turning.drain(group, LONG_US))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.12)
            match how:
                case "moved":
                    rig.gpu.mover.move = move  # type: ignore[method-assign]
                    with trio.fail_after(1):
                        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY
                case "dies":
                    await rig.die(program)
                case "disconnects":
                    program.socket.close()
                    await until_then(lambda: program.process not in rig.gpu.managed)
                case _:
                    program.obey = refuse
        if how in ("moved", "dies"):
            assert found == [None]
            await trio.sleep(1)
            assert not program.is_closed, "nor is it closed again by what waited"
            assert program.process not in rig.gpu.managed
            assert rig.h.controller.population.holds(group) is (how == "moved")
            if how == "moved":
                assert engines(rig, program) == (False, False)
                assert turn_end(rig, program) is None
                assert not rig.h.controller._follower.place(group).off
            return
        await rig.h.controller._follower.apply(group)
        assert found == [TurnEnd.UNGATED], "its gate is open"
        assert engines(rig, program) == (True, True)

    drive(test, 2)


# With the scheduler: programs that fill behind another, on the software GPU

KERNEL_US = 5_000
"""Microseconds of a kernel of a program that fills."""
AHEAD = 4
"""Kernels that it is ahead: 20 ms, which is its run-ahead and one kernel."""
SIZE = 8 * MIB
"""What each of them holds."""


class Fillers(Programs):
    """Programs whose gate holds them."""

    async def filler(self, cgroup: str = "/jobs", *, kernel_us: int = KERNEL_US, ahead: int = AHEAD) -> Process:
        """One that always has something to do, with all of its memory, and waits until it may launch that."""
        process = await self.h.arrive(self.spawn().pid, cgroup)
        number = await self.gpu.open_context(process, 8, lambda finished: None, gated=True)
        pages = await self.gpu.allocate(process, SIZE)
        self.nursery.start_soon(self._fill, process, number, kernel_us, ahead, pages)
        await self.h.write(f"{process.pid}/0/compute.priority", 9)
        return process

    async def _fill(self, process: Process, number: int, kernel_us: int, ahead: int, pages: range) -> None:
        queue = self.gpu._tenants[process].tsgs[number].queue
        with contextlib.suppress(OSError):
            while True:
                if len(queue) < ahead:
                    await self.gpu.launch(process, number, 1, kernel_us, pages)
                else:
                    await trio.sleep(0.002)
                    self.gpu.activity(process)

    async def lead(self) -> Process:
        """One of better priority that is always busy."""
        process = await self.batch(kernel_us=20_000)
        await self.h.write(f"{process.pid}/0/compute.priority", 0)
        return process

    def is_off(self, process: Process) -> bool:
        """Whether it is off the runlist for its turn."""
        return self.gpu._tenants[process].engines is Engines.GR

    def record(self, process: Process) -> Record:
        """What the daemon knows of it."""
        return self.h.controller.population.record(Member(process, 0))

    async def stat(self, process: Process, name: str) -> int:
        """A word of its gmem.stat; 0 where it is not told."""
        said = dict(line.split() for line in (await self.h.read(f"{process.pid}/0/gmem.stat")).splitlines())
        return int(said.get(name, 0))


class Lagging(Bench):
    """A software GPU whose figures are LAG_S old when they are read, ten times a second, as those of a trace."""

    LAG_S = 0.2

    def __init__(self) -> None:
        super().__init__()
        self._heard: dict[Process, list[tuple[float, int]]] = {}

    def activity(self, process: Process) -> Activity:
        found = super().activity(process)
        if found.gpu_usec is None:
            return found
        heard = self._heard.setdefault(process, [(0.0, 0)])
        at = int(10 * trio.current_time()) / 10 - self.LAG_S
        while len(heard) > 1 and heard[1][0] <= at:
            del heard[0]
        return attrs.evolve(found, gpu_usec=heard[0][1])

    async def follow(self) -> None:
        """Writes the trace, for ever: whatever programs do, what is read is no older."""
        while True:
            for process in self._tenants:
                self._heard.setdefault(process, [(0.0, 0)]).append((trio.current_time(), self.used(process)))
            await trio.sleep(0.005)

    def used(self, process: Process) -> int:
        used = super().activity(process).gpu_usec
        assert used is not None
        return used


class Untold(Bench):
    """A software GPU whose driver refuses the trace: nothing tells what a process uses."""

    is_traced = False
    """Whether there is a trace all the same."""

    def activity(self, process: Process) -> Activity:
        found = super().activity(process)
        return found if self.is_traced else attrs.evolve(found, gpu_usec=None, stays=None)

    def used(self, process: Process) -> int:
        used = super().activity(process).gpu_usec
        assert used is not None
        return used


class Sampled(Untold):
    """A software GPU that estimates once a second what a process used, as from samples of NVML."""

    def __init__(self) -> None:
        super().__init__()
        self._estimates: dict[Process, tuple[int, int]] = {}  # the second, and the estimate

    def activity(self, process: Process) -> Activity:
        second, (at, estimate) = int(trio.current_time()), self._estimates.get(process, (-1, 0))
        if at != second:
            estimate = super().used(process)
            self._estimates[process] = second, estimate
        return attrs.evolve(super().activity(process), gpu_usec_estimate=estimate)


@contextlib.asynccontextmanager
async def fillers(spawn: Spawn, gpu: Bench | None = None) -> AsyncIterator[Fillers]:
    """A GPU, its daemon with a scheduler, and the programs on it."""
    gpu = gpu or Bench()
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        if isinstance(gpu, Lagging):
            nursery.start_soon(gpu.follow)
        yield Fillers(h, gpu, spawn, nursery)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ahead", [AHEAD, 200])
@virtual
async def test_limits_of_those_that_wait_behind_one_that_is_always_busy(spawn: Spawn, ahead: int) -> None:
    """No write is refused, to none of them, and their slice holds its limit. What would be far ahead is held."""
    async with fillers(spawn) as p:
        service, _ = await p.service(load=0.1)
        await p.h.write(f"{service.pid}/0/compute.priority", 0)
        three = [await p.filler(ahead=ahead) for _ in range(3)]
        await trio.sleep(15)  # what each was ahead before its first turn has run
        lead, began, before = await p.lead(), trio.current_time(), p.gpu.used(service)
        await trio.sleep(5)
        rng, refused, waited = random.Random(1), [], 0
        for _ in range(20):
            process = rng.choice(three)
            while not p.is_off(process):  # noqa: ASYNC110 - the runlist tells nothing
                await trio.sleep(0.02)
            limit = rng.randrange(2, 8) * MIB
            refused.append(await answers(p.h.write(f"{process.pid}/0/gmem.limit.high", limit)))
            assert int(await p.h.read(f"{process.pid}/0/gmem.current")) <= limit or refused[-1]
            waited += p.is_off(process)
            await p.h.write(f"{process.pid}/0/gmem.limit.high", "max")
        assert refused == [0] * 20
        assert waited >= 18, "it was off all the while"
        await p.h.write("slice/jobs/0/gmem.limit.high", 2 * SIZE)
        for _ in range(100):
            await trio.sleep(0.05)
            assert int(await p.h.read("slice/jobs/0/gmem.current")) <= 2 * SIZE
        used = p.gpu.used(lead) + p.gpu.used(service) - before
        assert used > 0.95e6 * (trio.current_time() - began), "those before them have nearly all of the engine"


@pytest.mark.parametrize("kernel_us", [3_000_000, 60_000_000])
@virtual
async def test_long_kernels_go_off_as_they_are_and_are_waited_for_less_and_less(spawn: Spawn, kernel_us: int) -> None:
    """Behind one that leaves them nearly all of the engine, of which the longer slice has the most: they are given up
    long before DRAIN_MOST_US. (One of 2 s ends in a turn of 2 s and the drain after that.)"""
    async with fillers(spawn) as p:
        lead, _ = await p.service(load=0.1)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        long, short = await p.filler(kernel_us=kernel_us, ahead=1), await p.filler()
        record = p.h.controller.population.record(Member(long, 0))
        drained_s, late, longest_s = 0.0, 0, 0.0
        before = p.gpu.used(long), p.gpu.used(short)
        for _ in range(600):
            await trio.sleep(0.1)
            drained_s += 0.1 * record.compute.place.drains
            if record.scheduled.undrained is not None:
                longest_s = max(longest_s, record.scheduled.undrained.wait)
            if p.is_off(long):
                is_late = record.compute.turn_end is TurnEnd.LATE
                late += is_late
                assert is_late == (p.gpu.footprint(long).movable == 0)
                assert await p.stat(long, "unmovable") == (SIZE if is_late else 0)
        assert late > 50, "it goes off as it is"
        assert longest_s >= 2 * UNDRAINED_S
        assert 0 < drained_s < 4, "not at each of its turns, nor for all of DRAIN_MOST_US"
        used = p.gpu.used(long) - before[0], p.gpu.used(short) - before[1]
        assert min(used) > 0.8 * max(used), "both go on, and neither has more than the other"


@pytest.mark.parametrize(
    ("kernel_us", "lags"),
    [
        *[(us, False) for us in (150_000, 200_000, 300_000, 500_000, 2_000_000)],
        *[(us, True) for us in (150_000, 300_000, 2_000_000)],
    ],
)
@virtual
async def test_long_kernels_have_no_more_than_their_share(spawn: Spawn, kernel_us: int, lags: bool) -> None:
    """One at a time, beside a program of short ones that is to have as much: what drains is charged to what drains."""
    async with fillers(spawn, Lagging() if lags else None) as p:
        lead, _ = await p.service(load=0.1)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        two = [await p.filler(kernel_us=kernel_us, ahead=1), await p.filler()]
        await trio.sleep(5)
        long, short = await p.shares(two, 40)
        assert long + short > 0.85
        assert long == pytest.approx(short, abs=0.06), "half a turn of 2 s in 40 s, to or fro"


@pytest.mark.parametrize("gpu", [Untold, Sampled])
@pytest.mark.parametrize("kernel_us", [300_000, 500_000, 2_000_000])
@virtual
async def test_where_nothing_tells_what_drains_it_is_late(spawn: Spawn, gpu: type[Bench], kernel_us: int) -> None:
    """It could not be charged, and would have what the other has not."""
    async with fillers(spawn, gpu()) as p:
        lead, _ = await p.service(load=0.1)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        two = [await p.filler(kernel_us=kernel_us, ahead=1), await p.filler()]
        await trio.sleep(5)
        long, short = await p.shares(two, 40)
        assert long + short > 0.85
        assert long == pytest.approx(short, abs=0.06)


@virtual
async def test_long_kernels_of_one_of_three(spawn: Spawn) -> None:
    """And behind one that has half of the engine."""
    async with fillers(spawn) as p:
        lead, _ = await p.service(load=0.5)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        three = [await p.filler(kernel_us=300_000, ahead=1), await p.filler(), await p.filler()]
        await trio.sleep(5)
        found = await p.shares(three, 40)
        assert sum(found) > 0.45
        assert found == pytest.approx([sum(found) / 3] * 3, abs=0.03)


async def draining_filler(p: Fillers) -> Process:
    """One with a kernel that does not end, behind another and beside a third, as it drains."""
    lead, _ = await p.service(load=0.1)
    await p.h.write(f"{lead.pid}/0/compute.priority", 0)
    long, _ = await p.filler(kernel_us=60_000_000, ahead=1), await p.filler()
    with trio.fail_after(10):
        while not p.record(long).compute.draining:  # noqa: ASYNC110 - the scheduler tells nothing
            await trio.sleep(0.01)
    return long


@virtual
async def test_a_program_that_speaks_anew_is_waited_for_again(spawn: Spawn) -> None:
    """It may be another one, after an exec."""
    async with fillers(spawn) as p:
        long = await draining_filler(p)
        while p.record(long).scheduled.undrained is None:  # noqa: ASYNC110
            await trio.sleep(0.01)
        await p.gpu.open_context(long, 8, lambda finished: None, gated=True)
        assert p.record(long).scheduled.undrained is None


@pytest.mark.logs("cannot be scheduled")
@virtual
async def test_a_lever_that_failed_is_not_tried_again_since_a_drain_was_given_up(spawn: Spawn) -> None:
    async with fillers(spawn) as p:
        long = await draining_filler(p)
        scheduler = p.h.controller._schedulers._each[0]
        scheduler._failed(Member(long, 0), OSError(errno.EIO, "the driver"))
        failure = p.record(long).scheduled.failure
        with trio.fail_after(1):
            while p.record(long).compute.turn_end is not None:  # noqa: ASYNC110
                await trio.sleep(0.01)
        await trio.sleep(0.9 * AGAIN_S)
        assert p.record(long).compute.draining is None
        assert p.record(long).scheduled.failure is failure is not None


@virtual
async def test_a_drain_is_given_up_by_what_it_used_though_a_look_had_no_sample_of_it(spawn: Spawn) -> None:
    async with fillers(spawn) as p:
        long = await draining_filler(p)
        looks = p.h.controller._schedulers._each[0]._ends
        (drain,) = looks._drains.values()
        looks.observe({})
        looks.observe({long: Sample(ends.DRAIN_WORK_US + 1)})
        assert drain.scope.cancel_called


@virtual
async def test_a_drain_is_given_up_when_nothing_tells_any_more_what_it_uses(spawn: Spawn) -> None:
    """The driver ended the trace."""
    gpu = Untold()
    gpu.is_traced = True
    async with fillers(spawn, gpu) as p:
        long = await draining_filler(p)
        gpu.is_traced = False
        await trio.sleep(0.2)
        assert p.record(long).compute.draining is None
        assert p.record(long).compute.turn_end is TurnEnd.LATE


async def _latencies(spawn: Spawn) -> tuple[list[float], float, int]:
    """Of requests before two programs that fill: how long each took, what drained, seconds, and the calls that take
    programs off the runlist and put them on."""
    async with fillers(spawn) as p:
        lead, latencies = await p.service(load=0.35)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        two = [await p.filler() for _ in range(2)]
        await trio.sleep(3)
        calls = 0

        async def count(kind: str, act: Any, *words: Any) -> None:
            nonlocal calls
            calls += 1
            await act(*words)

        for kind in ("attach", "detach"):
            act = getattr(p.gpu, kind)
            setattr(p.gpu, kind, lambda *words, kind=kind, act=act: count(kind, act, *words))
        drained, begin = 0.0, len(latencies)
        for _ in range(1000):
            await trio.sleep(0.01)
            drained += 0.01 * any(p.h.controller.population.record(Member(o, 0)).compute.place.drains for o in two)
        return latencies[begin:], drained, calls


def p99(latencies: list[float]) -> float:
    """The 99th percentile."""
    return sorted(latencies)[int(0.99 * len(latencies))]


@virtual
async def test_a_better_priority_waits_for_a_slice_of_a_drain_at_most(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what drains is taken off once, as what does not."""
    found, drained, calls = await _latencies(spawn)
    with monkeypatch.context() as patch:
        patch.setattr(ends, "DRAIN_MOST_US", 0)
        before, never, calls_before = await _latencies(spawn)
    assert drained > 0.2 > never
    slice_s = (DRAIN_SLICE_US + SWITCH_US) / 1e6
    assert sum(found) / len(found) <= sum(before) / len(before) + slice_s / 4
    assert p99(found) <= p99(before) + slice_s
    assert max(found) <= max(before) + 3 * slice_s, "requests that wait for each other"
    assert calls <= calls_before + 2, "no more than that, but for what was under way"
