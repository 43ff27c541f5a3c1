"""Limits around memory turns: those below the level that has them, and those above it."""

from __future__ import annotations

import pytest
import trio

from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, running, virtual
from tests.support.loopers import Programs, Spawn
from tests.support.switched import Looper, soft


@virtual
async def test_one_over_a_limit_of_its_own_has_others_take_no_turns(spawn: Spawn) -> None:
    """There is room for all that may come."""
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        other = (await programs.come(48, "/other")).process
        await programs.come(64, "/jobs")
        await h.write("slice/jobs/0/gmem.limit.high", 16 * MIB)
        await trio.sleep(20)
        assert programs.turns(other) == 0
        assert gpu.working_set(other).missing == 0
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("leads", [True, False])
@virtual
async def test_one_over_a_limit_of_its_own_takes_no_room_of_others(spawn: Spawn, leads: bool) -> None:
    """Whether it goes before them by its priority, or has work now and then alone."""
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        first = await programs.come(92, "/jobs")
        nursery.start_soon(_nap, first, gpu)
        await h.write("slice/jobs/0/gmem.limit.high", 16 * MIB)
        others = [(await programs.come(24, f"/{name}")).process for name in "abc"]
        if leads:
            await h.write("slice/jobs/0/compute.priority", 0)
        await trio.sleep(20)
        assert [programs.turns(other) for other in others] == [0, 0, 0]
        assert [gpu.working_set(other).missing for other in others] == [0, 0, 0]
        nursery.cancel_scope.cancel()


async def _nap(one: Looper, gpu: SoftGpu) -> None:
    one.scope.cancel()
    while True:
        await gpu.launch(one.process, one.tsg, 1, one.step_us, one.pages)
        await trio.sleep(0.3)


@pytest.mark.parametrize("high", [56, 80])
@virtual
async def test_a_slice_whose_limit_is_more_than_is_left_has_turns_in_what_is_left(spawn: Spawn, high: int) -> None:
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        await programs.come(40, "/other")
        await h.write("slice/other/0/gmem.limit.low", 40 * MIB)
        for _ in range(2):
            await programs.come(48, "/jobs")
        await h.write("slice/jobs/0/gmem.limit.high", high * MIB)
        await trio.sleep(10)
        _, *jobs = await programs.steps(10)
        assert sum(jobs) >= 0.3 * 10 / 0.002, "0.44 where they take turns, 0.06 where they read over the bus"
        nursery.cancel_scope.cancel()
