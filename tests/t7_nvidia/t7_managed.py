"""Level 7: managed memory under limits. The driver counts it for no program: the GPU's `used` as a whole judges, and
what a neighbour can then allocate."""

from __future__ import annotations

import contextlib
import time

import pynvml

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import GIB, MIB, current, member, program, run_in, slice_of, write

WANTED, LIMIT = 8192, 4
"""MiB that a program allocates, and GiB of them that it may have on the GPU."""
SLACK = 256 * MIB
"""Bytes of the GPU that come and go with contexts, and by which the driver's blocks are off."""
SETTLES_S = 3.0
"""Seconds in which what a kernel touches has come, or stayed."""


def used() -> int:
    """Bytes of the GPU that are in use, by any program."""
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


def test_eight_gib_under_four(gpu_mount: Mounted, elastic: str) -> None:
    """Both ways, while kernels use all of it: the card has no more, every word is right, and with the limit gone all
    comes back."""
    before = used()
    with program(*run_in(gpu_mount), elastic, "PAGE", str(WANTED), "1", "managed") as run:
        group = member(gpu_mount, run)
        wait_for(lambda: used() - before >= WANTED * MIB - SLACK, "all of it is on the GPU", seconds=30)
        assert current(group) >= WANTED * MIB
        for again in range(2):
            begun = time.monotonic()
            write(group, "gmem.limit.high", f"{LIMIT}G")
            took = time.monotonic() - begun
            time.sleep(SETTLES_S)
            on_card, booked, passes = used() - before, current(group), run.passes
            print(f"{again}: the write took {took:.2f} s; booked {booked >> 20} MiB, card {on_card >> 20} MiB more")
            assert booked <= LIMIT * GIB
            assert on_card <= LIMIT * GIB + SLACK
            time.sleep(SETTLES_S)
            assert run.passes > passes, "it goes on, over the bus"
            assert used() - before <= LIMIT * GIB + SLACK, "however often a kernel uses it"
            write(group, "gmem.limit.high", "max")
            wait_for(lambda: used() - before >= WANTED * MIB - SLACK, "it comes back", seconds=30)
        run.finish()


def test_a_neighbour_has_the_rest(gpu_mount: Mounted, elastic: str) -> None:
    """What the limit keeps off the GPU another program allocates, as plain memory."""
    with slice_of(gpu_mount, "managed") as (name, group), contextlib.ExitStack() as stack:
        words = [*run_in(gpu_mount, within=name), elastic, "PAGE", str(WANTED), "1", "managed"]
        run = stack.enter_context(program(*words))
        member(gpu_mount, run)
        write(group, "gmem.limit.max", f"{LIMIT}G")
        time.sleep(SETTLES_S)
        before = used()
        neighbour = stack.enter_context(program(*run_in(gpu_mount), elastic, "PAGE", "4096"))
        member(gpu_mount, neighbour)
        time.sleep(SETTLES_S)
        assert used() - before >= 4 * GIB - SLACK
        assert current(group) <= LIMIT * GIB
        neighbour.finish()
        run.finish()


def test_an_allocation_over_a_hard_limit_is_in_the_host(gpu_mount: Mounted, elastic: str) -> None:
    """It succeeds, as the driver's does; of it no more comes to the GPU than there is room for."""
    before = used()
    limit = f"gmem.limit.max={LIMIT}G"
    with program(*run_in(gpu_mount, limit), elastic, "PAGE", str(WANTED), "1", "managed") as run:
        group = member(gpu_mount, run)
        time.sleep(SETTLES_S)
        print(f"booked {current(group) >> 20} MiB, card {(used() - before) >> 20} MiB more")
        assert current(group) <= LIMIT * GIB
        assert used() - before <= LIMIT * GIB + SLACK
        assert group.flat("gmem.events")["oom_kill"] == 0
        run.finish()
