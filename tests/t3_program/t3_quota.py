"""compute.max over the software GPU: from a write into a file to what programs work, in virtual time."""

from __future__ import annotations

import pytest
import trio

from tests.support.harness import virtual
from tests.support.quotas import Spawn, limited

PERIODS = (100_000, 1_000_000)
SHARES = (0.1, 0.3, 0.5, 0.8)
NEAR = {100_000: 0.03, 1_000_000: 0.05}
"""Part by which the work of 10 s may be off, by period, microseconds."""


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
