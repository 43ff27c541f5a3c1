"""compute.max over a GPU that is late, switches and samples as an H200 does, in virtual time: as t7_quota.py has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import trio

from backend.process.identity import Process
from tests.support.harness import virtual
from tests.support.quota_real import Real, bursts
from tests.support.quotas import Limited, Spawn, limited

NEAR = {100_000: 0.03, 1_000_000: 0.05}
"""Part by which the work of 10 s may be off, by period, microseconds."""
SETTLED_S, SETTLED_FOUR_S, SECONDS = 6.0, 20.0, 10.0

STEP_S, STEPS = 0.1, 60
"""Seconds between the beginnings of two times of SECONDS, and their number: some cycles of each kind."""

each_way = pytest.mark.parametrize("library", [True, False], ids=["library", "levers"])


async def shares(p: Limited, those: Sequence[Process], settled_s: float = SETTLED_S) -> list[float]:
    await trio.sleep(settled_s)
    found = await p.shares(those, SECONDS)
    print(found)
    return found


async def worst(p: Limited, wanted: float, worked: Callable[[], int]) -> float:
    """Return by which part the work of any time of SECONDS is off, at most. A test that begins when a cycle does cannot
    tell: programs that share an engine have all of it for 30 ms, or nothing."""
    seen = list[int]()
    for _ in range(round(SECONDS / STEP_S) + STEPS):
        p.gpu._engine.advance()
        seen.append(worked())
        await trio.sleep(STEP_S)
    found = [(last - first) / SECONDS / 1e6 for first, last in zip(seen, seen[round(SECONDS / STEP_S) :], strict=False)]
    print(min(found), max(found))
    return max(abs(part / wanted - 1) for part in found)


@each_way
@pytest.mark.parametrize(("share", "period"), [(0.3, 100_000), (0.8, 100_000), (0.3, 1_000_000)])
@virtual
async def test_one_that_is_alone(spawn: Spawn, share: float, period: int, library: bool) -> None:
    async with limited(spawn, gpu=Real()) as p:
        one = await p.program(library=library)
        await trio.sleep(3)
        await p.h.write(f"{one.pid}/0/compute.max", f"{round(share * period)} {period}")
        (found,) = await shares(p, [one])
        assert found == pytest.approx(share, rel=NEAR[period])


@each_way
@pytest.mark.parametrize(("share", "period"), [(0.1, 100_000), (0.3, 100_000)])
@virtual
async def test_beside_another(spawn: Spawn, share: float, period: int, library: bool) -> None:
    async with limited(spawn, gpu=Real()) as p:
        one = await p.program(library=library)
        await trio.sleep(3)
        await p.h.write(f"{one.pid}/0/compute.max", f"{round(share * period)} {period}")
        other = await p.program(library=False)
        found = await shares(p, [one, other])
        assert found[0] == pytest.approx(share, rel=NEAR[period])
        assert sum(found) >= 0.93


@each_way
@pytest.mark.parametrize(("share", "others"), [(0.1, 1), (0.3, 1), (0.2, 3)])
@virtual
async def test_at_any_time_beside_others(spawn: Spawn, share: float, others: int, library: bool) -> None:
    """What a program had of the engine is told only once it stands, and where it is in its slice is not told at all."""
    async with limited(spawn, gpu=Real()) as p:
        one = await p.program(library=library)
        await trio.sleep(3)
        await p.h.write(f"{one.pid}/0/compute.max", f"{round(share * 100_000)} 100000")
        for _ in range(others):
            await p.program(library=False)
        await trio.sleep(SETTLED_S)
        assert await worst(p, share, lambda: p.worked(one)) <= NEAR[100_000]


@pytest.mark.parametrize(("library", "period"), [(True, 100_000), (False, 100_000), (False, 1_000_000)])
@virtual
async def test_one_that_idles_in_between(spawn: Spawn, period: int, library: bool) -> None:
    async with limited(spawn, gpu=Real()) as p:
        one = await bursts(p, library=library)
        await trio.sleep(3)
        await p.h.write(f"{one.pid}/0/compute.max", f"{round(0.3 * period)} {period}")
        (found,) = await shares(p, [one])
        assert found == pytest.approx(0.3, rel=NEAR[period])


@pytest.mark.parametrize(("share", "period"), [(0.1, 100_000), (0.5, 100_000)])
@virtual
async def test_samples_of_one_that_stands_and_goes_on(spawn: Spawn, share: float, period: int) -> None:
    async with limited(spawn, gpu=Real()) as p:
        one = await p.program(library=False)
        await trio.sleep(3)
        await p.h.write(f"{one.pid}/0/compute.max", f"{round(share * period)} {period}")
        await trio.sleep(SETTLED_S)
        before = p.gpu.activity(one).busy_sampled_usec or 0
        (found,) = await p.shares([one], SECONDS)
        sampled = ((p.gpu.activity(one).busy_sampled_usec or 0) - before) / SECONDS / 1e6
        print(found, sampled)
        assert 0.85 <= sampled / found <= 1.15


@each_way
@virtual
async def test_a_slice_of_four(spawn: Spawn, library: bool) -> None:
    async with limited(spawn, gpu=Real()) as p:
        four = [await p.program("/jobs", library=library) for _ in range(4)]
        await trio.sleep(3)
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")
        found = await shares(p, four, SETTLED_FOUR_S)
        assert sum(found) == pytest.approx(0.3, rel=0.03)


@each_way
@virtual
async def test_a_slice_of_four_that_fork(spawn: Spawn, library: bool) -> None:
    """Each second one program ends and another begins; the quota holds over any time."""
    async with limited(spawn, gpu=Real()) as p:
        four, gone = [await p.program("/jobs", library=library) for _ in range(4)], [0]
        await p.h.write("slice/jobs/0/compute.max", "30000 100000")

        async def come_and_go() -> None:
            while True:
                await trio.sleep(1)
                first = four.pop(0)
                gone[0] += p.worked(first)
                await p.end(first)
                four.append(await p.program("/jobs", library=library))

        p.nursery.start_soon(come_and_go)
        await trio.sleep(SETTLED_S)
        assert await worst(p, 0.3, lambda: gone[0] + sum(map(p.worked, four))) <= 0.03
