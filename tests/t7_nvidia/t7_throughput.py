"""Speed of a program with less GPU memory than it holds, compared with the same program on unified memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import CYCLE, MIB, Program, cycles, held, member, program, run_in, write

HOT_NS, FULL_NS = 64, 72
"""Offsets at which elastic.cu reports the duration of its last passes."""
SIZE, PARTS = 8192, 64
"""MiB, and number of allocations, of the program whose throughput is measured."""


def settled(run: Program, seconds: float = 8) -> float:
    """Return the passes a second, once another second makes them no faster by 5 %, or after `seconds`."""
    end = time.monotonic() + seconds
    before = [cycles(run, 1)]
    while time.monotonic() < end:
        now = cycles(run, 1)
        before.append(now)
        if len(before) > 3 and now <= max(before[:-1]) * 1.05:
            break
    return cycles(run, 2)


def ours(mount: Mounted, elastic: str, percents: Sequence[int], *options: str) -> tuple[dict[int, float], int]:
    """Return the remaining throughput at each percentage of the footprint; and how much of that is not its memory."""
    with program(*run_in(mount), elastic, "PAGE", str(SIZE), str(PARTS), *options) as run:
        group = member(mount, run)
        footprint = held(group)
        full = cycles(run, 2)
        points = {}
        for percent in percents:
            write(group, "gmem.limit.high", footprint * percent // 100)
            points[percent] = settled(run) / full
        write(group, "gmem.limit.high", "max")
        print(f"footprint {footprint >> 20} MiB, full {full:.1f} passes/s")
        run.finish()
    return points, footprint - SIZE * MIB


def unified(elastic: str, *options: str) -> float:
    """Return the passes a second of the program on unified memory."""
    with program(elastic, "PAGE", str(SIZE), str(PARTS), "managed", *options) as run:
        wait_for(lambda: run.passes > 0 or run.process.poll() is not None, "it works", seconds=60)
        assert run.process.poll() is None
        last = FULL_NS if "inner" in options else HOT_NS
        end = time.monotonic() + 3

        def enough() -> bool:
            slow = run.passes > 1 and run.u64(last) > 0.3e9 and time.monotonic() > end
            return slow or run.passes > CYCLE + 1 or run.process.poll() is not None

        wait_for(enough, "it goes on", seconds=90)
        assert run.process.poll() is None
        if run.passes > CYCLE + 1:
            result = cycles(run, 1)
        elif "inner" in options:
            result = 1e9 / run.u64(FULL_NS)
        else:  # a cycle takes many seconds; its passes are like the last ones
            result = 1e9 * CYCLE / ((CYCLE - 1) * run.u64(HOT_NS) + run.u64(FULL_NS))
        run.finish()
    return result


def budget(percent: int, besides: int) -> str:
    """Return the MiB of data that fit if a program has `percent` of its footprint, which includes `besides`."""
    return str(((SIZE * MIB + besides) * percent // 100 - besides) >> 20)


@pytest.mark.timeout(600)
def test_throughput_curve(gpu_mount: Mounted, elastic: str) -> None:
    """Remaining throughput at 90, 70, 50 and 40 % of the footprint, with half of its memory cold.

    Unified memory has no limit of its own; elastic.cu describes three ways to keep it within one.
    """
    percents = (90, 70, 50, 40)
    points, besides = ours(gpu_mount, elastic, percents)
    full = unified(elastic)
    print(f"unified memory, all of it resident: {full:.1f} passes/s")
    print(f"  %     data      ours    faults  prefetch   advised   of the full rate; besides data {besides >> 20} MiB")
    table = {}
    for percent in percents:
        data = budget(percent, besides)
        table[percent] = {how: unified(elastic, data, how) / full for how in ("faults", "prefetch", "advised")}
        rest = " ".join(f"{table[percent][how]:9.4f}" for how in ("faults", "prefetch", "advised"))
        print(f"{percent:3d} {data:>5} MiB {points[percent]:9.4f} {rest}", flush=True)
    assert points[70] > 0.02
    for percent in percents:
        assert points[percent] >= table[percent]["faults"], f"slower than unified memory at {percent} %"


@pytest.mark.timeout(300)
def test_throughput_where_nothing_is_cold(gpu_mount: Mounted, elastic: str) -> None:
    """The worst case: everything is used in every pass."""
    percents = (90, 50)
    points, besides = ours(gpu_mount, elastic, percents, "inner")
    full = unified(elastic, "inner")
    print(f"unified memory, all of it resident: {full:.1f} passes/s")
    faults = {percent: unified(elastic, budget(percent, besides), "faults", "inner") / full for percent in percents}
    for percent in percents:
        print(
            f"{percent} %: ours {points[percent]:.4f}, unified memory by faults {faults[percent]:.4f} of the full rate"
        )
    for percent in percents:
        assert points[percent] >= faults[percent], f"slower than unified memory at {percent} %"
