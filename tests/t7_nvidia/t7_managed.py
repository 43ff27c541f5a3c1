"""Level 7: managed memory under limits. The driver counts it for no program: the GPU's `used` as a whole judges, and
what a neighbour can then allocate.

A block of 2 MiB whose contents have gone to the host stays the driver's, in `used`, until an allocation needs the room;
then it goes before all else, without a copy (`va_block_unused`, kernel-open/nvidia-uvm/uvm_pmm_gpu.c of NVIDIA's open
modules). So `used` judges after a neighbour has had what there is. What kernels use over the bus their speed tells.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path

import pynvml
import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import ERROR, GIB, MIB, Program, current, member, program, run_in, slice_of, write

WANTED, LIMIT = 8192, 4
"""MiB that a program allocates, and GiB of them that it may have on the GPU."""
SLACK = 256 * MIB
"""Bytes of the GPU that come and go with contexts, and by which the driver's blocks are off."""
SETTLES_S = 3.0
"""Seconds in which what a kernel touches has come, or stayed."""
OVER_THE_BUS = 0.25
"""Most of a program's speed that it can have left with half of its memory over the bus: an H200 reads 4 TB/s of its
own, and 0.05 of the host's."""
OWN = 1024
"""MiB of a GPU that a program has besides its memory, at most, and by which what is free is off."""
STEP = 256
"""MiB by which a neighbour that has no room asks for less."""


def memory() -> tuple[int, int]:
    """Return the bytes of the GPU that are in use, by any program, and those that are free."""
    pynvml.nvmlInit()
    try:
        found = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
        return int(found.used), int(found.free)
    finally:
        pynvml.nvmlShutdown()


def used() -> int:
    return memory()[0]


def in_host(pid: int) -> int:
    """Return the bytes that the kernel counts for a process in mappings of the driver's managed memory."""
    found, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(encoding="utf-8", errors="replace").splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            ours = "/dev/nvidia-uvm" in line
        elif ours and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found


def works_or_ended(run: Program) -> bool:
    """Return whether a program has done some passes, or ended."""
    return run.passes > 2 or run.process.poll() is not None


def had_beyond(elastic: str, beyond: int) -> int:
    """Have a program without the library allocate and use what is free, and as much beyond that as it gets: `beyond`
    MiB, or up to OWN less. Return how many MiB these were, -1 for none. It has ended then.
    """
    free = memory()[1] >> 20
    for more in range(beyond, beyond - OWN - STEP, -STEP):
        with program(elastic, "PAGE", str(free + more)) as run:
            wait_for(partial(works_or_ended, run), "it works or ends", seconds=30)
            if run.process.poll() is None:
                run.finish()
                return more
            print(f"{free} + {more} MiB: error {run.u32(ERROR)}")
    return -1


@pytest.mark.timeout(240)
def test_eight_gib_under_four(gpu_mount: Mounted, elastic: str) -> None:
    """Both ways, while kernels use all of it: half is used over the bus, a neighbour gets the room, the card has no
    more of it then, every word is right, and with the limit gone all comes back.
    """
    before = used()
    with program(*run_in(gpu_mount), elastic, "PAGE", str(WANTED), "1", "managed") as run:
        group = member(gpu_mount, run)
        wait_for(lambda: used() - before >= WANTED * MIB - SLACK, "all of it is on the GPU", seconds=30)
        assert current(group) >= WANTED * MIB
        full = run.u64(8)
        for again in range(2):
            begun = time.monotonic()
            write(group, "gmem.limit.high", f"{LIMIT}G")
            took = time.monotonic() - begun
            time.sleep(SETTLES_S)
            on_card, booked, passes = used() - before, current(group), run.passes
            print(f"{again}: the write took {took:.2f} s; booked {booked >> 20} MiB, card {on_card >> 20} MiB more")
            print(
                f"in the host {in_host(run.pid) >> 20} MiB; {run.u64(8) / 1e9:.0f} GB/s of {full / 1e9:.0f}", flush=True
            )
            assert booked <= LIMIT * GIB
            assert run.u64(8) <= OVER_THE_BUS * full
            room = had_beyond(elastic, WANTED - LIMIT * 1024)
            time.sleep(SETTLES_S)
            on_card = used() - before
            print(f"a neighbour had {room} MiB more than was free; card {on_card >> 20} MiB more then", flush=True)
            assert room >= WANTED - LIMIT * 1024 - OWN
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
