"""Shares of the engine that programs with long kernels get, by weight and by priority: the same as with short ones."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

import pytest
import trio

from backend.process.identity import Process
from tests.support.draining import KERNEL_US, Fillers, fillers
from tests.support.harness import virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

LEAD_LOAD = 0.1
"""Fraction of the engine that the requests of the first program take."""

SETTLED_S, LOOKED_S = 5.0, 40.0
"""Seconds before shares are measured, and seconds of the measurement."""

LONG_US = 300_000
"""Microseconds of a kernel that does not end in time at the end of its turn."""


async def shares(p: Fillers, two: Sequence[Process]) -> list[float]:
    """Return the fraction of time that each of two programs uses, behind one with requests."""
    lead, _ = await p.service(load=LEAD_LOAD)
    await p.h.write(f"{lead.pid}/0/compute.priority", 0)
    await trio.sleep(SETTLED_S)
    return await p.shares(two, LOOKED_S)


@pytest.mark.parametrize("kernels", [(KERNEL_US, KERNEL_US), (LONG_US, KERNEL_US), (KERNEL_US, LONG_US)])
@virtual
async def test_weights_hold_whichever_has_the_long_kernels(spawn: Spawn, kernels: tuple[int, int]) -> None:
    async with fillers(spawn) as p:
        two = [await p.filler(kernel_us=us, ahead=1 if us == LONG_US else 4) for us in kernels]
        for process, weight in zip(two, (100, 300), strict=True):
            await p.h.write(f"{process.pid}/0/compute.weight", weight)
        found = await shares(p, two)
        assert sum(found) > 0.85
        assert found[1] == pytest.approx(0.75 * sum(found), abs=0.02)


@pytest.mark.parametrize("kernels", [(KERNEL_US, KERNEL_US), (LONG_US, KERNEL_US), (KERNEL_US, LONG_US)])
@virtual
async def test_a_better_priority_loses_nothing_to_long_kernels(spawn: Spawn, kernels: tuple[int, int]) -> None:
    """The first program fills behind the second, and now and then a kernel of it drains."""
    async with fillers(spawn) as p:
        two = [await p.filler(kernel_us=us, ahead=1 if us == LONG_US else 4) for us in kernels]
        await p.h.write(f"{two[1].pid}/0/compute.priority", 8)
        found = await shares(p, two)
        assert sum(found) > 0.85
        assert found[0] < 0.05
        assert found[1] > 0.8
