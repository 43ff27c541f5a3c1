"""Programs that fill behind another, on the software GPU: their drains after the scheduler has ended their turns."""

from __future__ import annotations

import errno
import random
from collections import Counter
from typing import Any

import pytest
import trio

from backend.core.turns import TurnEnd
from backend.process.identity import Member, Process
from backend.scheduler import ends
from backend.scheduler.ends import DRAIN_SLICE_US, UNDRAINED_S
from backend.scheduler.fair import SWITCH_US
from backend.scheduler.scheduler import AGAIN_S
from backend.scheduler.use import Sample
from tests.support.contenders import Bench
from tests.support.draining import AHEAD, SIZE, Fillers, Lagging, Sampled, Untold, fillers
from tests.support.harness import MIB, Spawn, answers, virtual


@pytest.mark.parametrize("ahead", [AHEAD, 200])
@virtual
async def test_limits_of_those_that_wait_behind_one_that_is_always_busy(spawn: Spawn, ahead: int) -> None:
    """No write to any of them is refused, and their slice holds its limit. Work far ahead is held back."""
    async with fillers(spawn) as p:
        service, _ = await p.service(load=0.1)
        await p.h.write(f"{service.pid}/0/compute.priority", 0)
        three = [await p.filler(ahead=ahead) for _ in range(3)]
        await trio.sleep(15)  # until the work launched ahead of the first turn has run
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
    """The leader leaves them nearly all of the engine, and the one with the longer slice gets the most: they are given
    up long before DRAIN_MOST_US. (A kernel of 2 s ends in a turn of 2 s and the drain after it.)"""
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
    """One kernel at a time, beside an equal program with short kernels: the drainer is charged for the drain."""
    async with fillers(spawn, Lagging() if lags else None) as p:
        lead, _ = await p.service(load=0.1)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        two = [await p.filler(kernel_us=kernel_us, ahead=1), await p.filler()]
        await trio.sleep(5)
        long, short = await p.shares(two, 40)
        assert long + short > 0.85
        assert long == pytest.approx(short, abs=0.06), "half a turn of 2 s in 40 s, to or fro"


@pytest.mark.parametrize("gpu", [Untold, Sampled])
@pytest.mark.parametrize("kernel_us", [60_000, 300_000, 500_000, 2_000_000])
@virtual
async def test_where_nothing_tells_what_drains_a_long_kernel_is_late(
    spawn: Spawn, gpu: type[Bench], kernel_us: int
) -> None:
    """Its drain could not be charged, so it would take time from the other, which gives memory whenever it waits."""
    async with fillers(spawn, gpu()) as p:
        lead, _ = await p.service(load=0.1)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        two = [await p.filler(kernel_us=kernel_us, ahead=1), await p.filler()]
        await trio.sleep(5)
        ends = [Counter[TurnEnd | None](), Counter[TurnEnd | None]()]
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                while True:
                    for process, seen in zip(two, ends, strict=True):
                        if p.is_off(process):
                            seen[p.record(process).compute.turn_end] += 1
                    await trio.sleep(0.1)

            nursery.start_soon(look)
            long, short = await p.shares(two, 40)
            nursery.cancel_scope.cancel()
        assert long + short > 0.85
        assert long == pytest.approx(short, abs=0.06)
        late, drained = ends
        assert set(drained) == {TurnEnd.DRAINED}
        assert set(late) <= {TurnEnd.DRAINED, TurnEnd.LATE}
        assert late[TurnEnd.LATE] > 50 or kernel_us == 60_000
        file = f"{two[1].pid}/0/gmem.limit.high"
        for limit in range(1, 6):
            while not p.is_off(two[1]):  # noqa: ASYNC110 - the runlist tells nothing
                await trio.sleep(0.02)
            assert await answers(p.h.write(file, limit * MIB)) == 0
            await p.h.write(file, "max")
            await trio.sleep(0.7)


@virtual
async def test_long_kernels_of_one_of_three(spawn: Spawn) -> None:
    """They fill behind a program that has half of the engine."""
    async with fillers(spawn) as p:
        lead, _ = await p.service(load=0.5)
        await p.h.write(f"{lead.pid}/0/compute.priority", 0)
        three = [await p.filler(kernel_us=300_000, ahead=1), await p.filler(), await p.filler()]
        await trio.sleep(5)
        found = await p.shares(three, 40)
        assert sum(found) > 0.45
        assert found == pytest.approx([sum(found) / 3] * 3, abs=0.03)


async def draining_filler(p: Fillers) -> Process:
    """Return a draining program whose kernel does not end; it fills behind one program and beside another."""
    lead, _ = await p.service(load=0.1)
    await p.h.write(f"{lead.pid}/0/compute.priority", 0)
    long, _ = await p.filler(kernel_us=60_000_000, ahead=1), await p.filler()
    with trio.fail_after(10):
        while not p.record(long).compute.draining:  # noqa: ASYNC110 - the scheduler tells nothing
            await trio.sleep(0.01)
    return long


@virtual
async def test_a_program_that_speaks_anew_is_waited_for_again(spawn: Spawn) -> None:
    """It may be another program, after an exec."""
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
async def test_a_drain_of_one_that_reads_over_the_bus_may_take_as_much_longer(spawn: Spawn) -> None:
    """Its kernels have the engine for as long: turns of memory begin with all programs like that."""
    async with fillers(spawn) as p:
        long = await draining_filler(p)
        looks = p.h.controller._schedulers._each[0]._ends
        (drain,) = looks._drains.values()
        looks._is_away = lambda process: process == long
        looks.observe({long: Sample(ends.DRAIN_WORK_US + 1)})
        assert not drain.scope.cancel_called
        looks.observe({long: Sample(ends.DRAIN_BUS_US)})
        assert drain.scope.cancel_called


@virtual
async def test_a_drain_is_given_up_when_nothing_tells_any_more_what_it_uses(spawn: Spawn) -> None:
    """The driver has ended the trace."""
    gpu = Untold()
    gpu.is_traced = True
    async with fillers(spawn, gpu) as p:
        long = await draining_filler(p)
        gpu.is_traced = False
        await trio.sleep(0.2)
        assert p.record(long).compute.draining is None
        assert p.record(long).compute.turn_end is TurnEnd.LATE


async def _latencies(spawn: Spawn) -> tuple[list[float], float, int]:
    """Measure requests that come before two fillers: their latencies and the time of drains, in seconds, and the number
    of calls that take programs off the runlist or put them on."""
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
    """Return the 99th percentile."""
    return sorted(latencies)[int(0.99 * len(latencies))]


@virtual
async def test_a_better_priority_waits_for_a_slice_of_a_drain_at_most(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draining program is taken off the runlist once, as any other."""
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
