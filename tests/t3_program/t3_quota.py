"""compute.max over the software GPU: from a write to a file to the work that programs get done, in virtual time."""

from __future__ import annotations

import pytest
import trio

from tests.support.harness import virtual
from tests.support.quotas import Spawn, limited

PERIODS = (100_000, 1_000_000)
SHARES = (0.1, 0.3, 0.5, 0.8)
NEAR = {100_000: 0.03, 1_000_000: 0.05}
"""Relative error allowed for the work of 10 s, by period in microseconds."""


each_way = pytest.mark.parametrize("library", [True, False], ids=["library", "levers"])
each_sight = pytest.mark.parametrize("traced", [False, True], ids=["told", "traced"])
each_period = pytest.mark.parametrize("period", PERIODS, ids=["100ms", "1s"])
each_share = pytest.mark.parametrize("share", SHARES, ids=lambda share: f"{round(100 * share)}")


def quota(share: float, period: int) -> str:
    return f"{round(share * period)} {period}"


@each_way
@each_sight
@each_period
@each_share
@virtual
async def test_one_that_is_alone(spawn: Spawn, share: float, period: int, traced: bool, library: bool) -> None:
    async with limited(spawn, traced=traced) as p:
        one = await p.program(library=library)
        await p.h.write(f"{one.pid}/0/compute.max", quota(share, period))
        await trio.sleep(3)
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(share, rel=NEAR[period])
        assert library or p.gpu.calls(since=0) < 25 * 13


@pytest.mark.parametrize(
    ("share", "period", "after_s"),
    [(0.3, 100_000, 4.05), (0.5, 100_000, 4.3), (0.3, 1_000_000, 4.15), (0.5, 1_000_000, 4.2)],
)
@virtual
async def test_one_that_is_seen_in_step_with_its_cycles(
    spawn: Spawn, share: float, period: int, after_s: float
) -> None:
    """The program has no library, and stops and runs in cycles of 0.4 s or 1 s. Samples cover a sixth of each second
    and would see it at work too rarely, as the cycles begin then: it would get up to twice its quota."""
    async with limited(spawn, traced=True) as p:
        one = await p.program(library=False)
        await trio.sleep(after_s)
        await p.h.write(f"{one.pid}/0/compute.max", quota(share, period))
        await trio.sleep(6)
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(share, rel=NEAR[period])


@each_way
@each_sight
@each_period
@virtual
async def test_one_that_idles_in_between(spawn: Spawn, period: int, traced: bool, library: bool) -> None:
    """A program that would use 0.6 of the time, in bursts of 30 ms with rests of 20 ms, gets its quota."""
    async with limited(spawn, traced=traced) as p:
        one = await p.program(library=library, work_s=0.03, rest_s=0.02)
        await p.h.write(f"{one.pid}/0/compute.max", quota(0.3, period))
        await trio.sleep(15 if traced and not library else 5)  # samples show its rests only after a while
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(0.3, rel=NEAR[period])


@each_way
@each_sight
@virtual
async def test_one_that_uses_less_is_left_alone(spawn: Spawn, traced: bool, library: bool) -> None:
    async with limited(spawn, traced=traced) as p:
        one = await p.program(library=library, work_s=0.005, rest_s=0.045)
        await trio.sleep(2)
        (before,) = await p.shares([one], 10)
        await p.h.write(f"{one.pid}/0/compute.max", quota(0.5, 100_000))
        await trio.sleep(5)
        throttled = (await p.h.read(f"{one.pid}/0/gcgroup.stat")).split("nr_throttled ")[1].split()[0]
        (found,) = await p.shares([one], 10)
        assert found == pytest.approx(before, rel=0.02)
        assert f"nr_throttled {throttled}\n" in await p.h.read(f"{one.pid}/0/gcgroup.stat")


@each_way
@each_sight
@each_period
@each_share
@virtual
async def test_beside_another(spawn: Spawn, share: float, period: int, traced: bool, library: bool) -> None:
    """Both always have work: one gets its quota, or half of the engine if that is less; the other gets the rest."""
    async with limited(spawn, traced=traced) as p:
        one, other = await p.program(library=library), await p.program()
        await p.h.write(f"{one.pid}/0/compute.max", quota(share, period))
        await trio.sleep(5)
        found = await p.shares([one, other], 10)
        assert found[0] <= share * (1 + NEAR[period])
        if share < 0.5:
            assert found[0] >= share * (1 - NEAR[period])
        assert sum(found) >= 0.98, "nothing is lost by it"


@each_sight
@virtual
async def test_a_slice_with_four_that_fork(spawn: Spawn, traced: bool) -> None:
    """Restarting buys nothing: the last work of a program that ended is charged, and so is its work until it is
    found."""
    async with limited(spawn, traced=traced) as p:
        old = [await p.program("/jobs") for _ in range(4)]
        await p.h.write("slice/jobs/0/compute.max", quota(0.3, 100_000))
        await trio.sleep(3)
        before = sum(map(p.worked, old))
        gone = 0
        for _ in range(40):
            await trio.sleep(0.25)
            first = old.pop(0)
            gone += p.worked(first)
            await p.end(first)
            old.append(await p.program("/jobs"))
        found = (gone + sum(map(p.worked, old)) - before) / 1e7
        assert found == pytest.approx(0.3, rel=0.03)


@each_sight
@each_period
@each_share
@virtual
async def test_a_slice_with_four_without_the_library(spawn: Spawn, share: float, period: int, traced: bool) -> None:
    """Stopping and resuming them all would take twelve calls of the driver, more than a second's share. So one works in
    each cycle, in turns."""
    async with limited(spawn, traced=traced) as p:
        four = [await p.program("/jobs", library=False) for _ in range(4)]
        await p.h.write("slice/jobs/0/compute.max", quota(share, period))
        await trio.sleep(20)  # at first it is unknown that they always work; the excess is paid back
        began, calls = trio.current_time(), p.gpu.calls(since=0)
        found = await p.shares(four, 10)
        assert sum(found) == pytest.approx(share, rel=NEAR[period])
        assert (p.gpu.calls(since=0) - calls) / (trio.current_time() - began) <= 12
        assert max(found) <= 2 * min(found)
