"""Running programs that move between two GPUs: their results, the time that they stand still, and failures."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pynvml
import pytest

from backend.nvidia.checkpoint.journal import directory
from backend.nvidia.mover import BEGUN_S
from ggroupfs.client import Member, flat
from tests.support.mounted import Mounted, daemons, kill
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import GIB, MIB, Program, member, program, run_in, where, write
from tests.t7_nvidia.trained import STEPS, outcome, torch

TIMES = 20
WITH_OR_WITHOUT = pytest.mark.parametrize("library", [False, True], ids=["without", "with"])
"""Parameter: whether our library is in the program."""


def card(gpu: int) -> pynvml.c_nvmlMemory_t:
    """Return the memory of a GPU, `free` and `total`, in bytes."""
    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu))
    finally:
        pynvml.nvmlShutdown()


def at(mount: Mounted, run: Program, gpu: int) -> Member:
    """Return its control files, once it is on a GPU."""
    wait_for(lambda: mount.group(run.process.pid, gpu).exists(), f"it is on GPU {gpu}")
    return Member(run.process.pid, gpu, mount.group(run.process.pid, gpu))


@pytest.fixture(scope="module")
def links() -> tuple[float, float]:
    """Return the bandwidth of PCIe, and of NVLink or whatever connects the two GPUs, in GB/s."""
    pytest.importorskip("torch")
    output = subprocess.check_output([sys.executable, Path(__file__).with_name("links.py")], text=True)
    pcie, between = map(float, output.split())
    print(f"PCIe {pcie:.1f} GB/s, from GPU to GPU {between:.1f} GB/s")
    return pcie, between


@contextmanager
def longest_pause(run: Program) -> Iterator[list[float]]:
    """Measure the longest time, in seconds, in which the program finished no pass while the body ran."""
    result, stop = [0.0], threading.Event()

    def watch() -> None:
        passes, since = run.passes, time.monotonic()
        while not stop.is_set():
            now = time.monotonic()
            result[0] = max(result[0], now - since)
            if run.passes != passes:
                passes, since = run.passes, now
            time.sleep(0.0005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield result
        before = run.passes
        wait_for(lambda: run.passes > before + 1 or run.process.poll() is not None, "it goes on", seconds=60)
    finally:
        stop.set()
        thread.join()


@pytest.mark.timeout(500)
@WITH_OR_WITHOUT
def test_training_moves_back_and_forth(gpu_mount: Mounted, library: bool) -> None:
    """After twenty moves the losses are those of a run that stayed, to the bit; limits and shares follow it."""
    with torch(None, "train") as run:
        expected, _ = outcome(run)
    with torch(gpu_mount if library else None, "train", may=0) as run:
        wait_for(lambda: where(run.process.pid) == [0], "it is on GPU 0", seconds=60)
        write(at(gpu_mount, run, 0), "compute.timeslice", 4)
        took = []
        for number in range(TIMES):
            steps = (number + 1) * (STEPS // (TIMES + 1))
            run.set(16, steps)
            wait_for(lambda steps=steps: run.passes >= steps - 2, "it trains", seconds=60)  # type: ignore[misc]
            here, there = number % 2, 1 - number % 2
            began = time.monotonic()
            write(at(gpu_mount, run, here), "compute.migrate", there)
            took.append(time.monotonic() - began)
            assert where(run.process.pid) == [there]
            assert os.listdir(gpu_mount / run.process.pid) == [str(there)]
            assert at(gpu_mount, run, there).read("compute.timeslice") == "4"
            if library:
                write(at(gpu_mount, run, there), "gmem.limit.high", 1 << (31 if number % 2 else 40))
        run.set(16, STEPS)
        losses, _ = outcome(run)
    print(f"{TIMES} moves of {min(took):.2f} to {max(took):.2f} s; losses equal: {losses == expected}")
    assert losses == expected


@pytest.mark.timeout(500)
@pytest.mark.parametrize("gib", [1, 4, 8, 16])
@WITH_OR_WITHOUT
def test_how_long_it_stands_still(
    gpu_mount: Mounted, elastic: str, links: tuple[float, float], library: bool, gib: int
) -> None:
    """Without the library everything goes to the host and back; with it, directly from one GPU to the other."""
    pcie, between = links
    size = gib * 1.0737
    with program(*(run_in(gpu_mount) if library else []), elastic, "PAGE", str(gib << 10)) as run:
        wait_for(lambda: run.passes > 2, "it works", seconds=60)
        pauses = []
        for here, there in ((0, 1), (1, 0)):
            group, before = at(gpu_mount, run, here), run.passes
            with longest_pause(run) as pause:
                write(group, "compute.migrate", there)
            pauses.append(pause[0])
            print(
                f"{gib} GiB, {'with' if library else 'without'} the library, {here} to {there}: "
                f"stood still for {pause[0]:.3f} s; there and back over PCIe takes {2 * size / pcie:.3f} s or more, "
                f"from GPU to GPU {size / between:.3f}"
            )
            assert where(run.process.pid) == [there]
            if library:
                after = at(gpu_mount, run, there)
                wait_for(
                    lambda after=after: flat(after.read("gcgroup.stat"))["managed"] == 1,  # type: ignore[misc]
                    "it speaks",
                )
                wait_for(
                    lambda here=here: card(here).free > card(here).total - 2 * GIB,  # type: ignore[misc]
                    "all of it has come",
                )
            wait_for(lambda before=before: run.passes > before + 2, "it goes on")  # type: ignore[misc]
        if library:
            assert min(pauses) < 1, "0.5 are the driver's, for a context and nothing else"
        run.finish()


@pytest.mark.timeout(200)
def test_one_that_is_in_the_host_in_part_moves(gpu_mount: Mounted, elastic: str) -> None:
    """Of 4 GiB, 2 are in the host: they are there afterwards, and come back on the other GPU."""
    with program(*run_in(gpu_mount), elastic, "PAGE", "4096", "4") as run:
        group = member(gpu_mount, run)
        write(group, "gmem.limit.high", 3 * GIB)
        for here, there in ((0, 1), (1, 0)):
            group = at(gpu_mount, run, here)
            assert flat(group.read("gmem.stat"))["swapped"] > GIB
            with longest_pause(run) as pause:
                write(group, "compute.migrate", there)
            print(f"4 GiB, 1.5 of them in the host, {here} to {there}: stood still for {pause[0]:.3f} s")
            group = at(gpu_mount, run, there)
            assert group.read("gmem.limit.high") == str(3 * GIB)
            write(group, "gmem.limit.high", 2 * GIB)  # at once, perhaps before it has reconnected
            write(group, "gmem.limit.high", 3 * GIB)
        write(group, "gmem.limit.high", "max")
        wait_for(lambda: flat(group.read("gmem.stat"))["swapped"] == 0, "all of it has come back")
        run.finish()


@pytest.mark.timeout(200)
@WITH_OR_WITHOUT
def test_no_room_is_refused_and_it_goes_on(gpu_mount: Mounted, elastic: str, library: bool) -> None:
    """The other GPU has only 1 GiB free: nothing is locked, and nothing is lost."""
    there = ("env", "CUDA_VISIBLE_DEVICES=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
    with (
        program(*(run_in(gpu_mount) if library else []), elastic, "PAGE", "4096") as run,
        program(*there, elastic, "PAGE", str((card(1).free - GIB) // MIB - 1024)) as full,
    ):
        for one in (run, full):
            wait_for(lambda one=one: one.passes > 2, "it works", seconds=60)  # type: ignore[misc]
        group = at(gpu_mount, run, 0)
        at(gpu_mount, full, 1)
        with longest_pause(run) as pause, pytest.raises(OSError, match=re.escape(os.strerror(errno.ENOSPC))):
            write(group, "compute.migrate", 1)
        print(f"refused; longest pause {pause[0] * 1e3:.0f} ms")
        assert where(run.process.pid) == [0]
        run.finish()
        full.finish()


NOTED = ("", "reserve", "lock", "restore")
"""Steps that an agent notes as it begins them, in order."""
MOMENTS = (
    *(("", 0.05), ("reserve", 0.0), ("reserve", 0.05), ("lock", 0.0), ("lock", 0.1), ("lock", 0.3), ("lock", 0.36)),
    *(("restore", 0.0), ("restore", 0.1), ("restore", 0.4)),
)
"""A step, and the seconds after it. With the library it stands by from `reserve` on; its checkpoint takes 0.35 s."""


@pytest.mark.timeout(400)
@WITH_OR_WITHOUT
def test_the_daemon_is_killed_in_the_middle(tmp_path: Path, elastic: str, library: bool) -> None:
    """At each step of a move of 4 GiB: the program ends up whole, on one GPU, and the next mount moves it again."""
    been = set()
    with ExitStack() as stack:
        start = stack.enter_context(daemons(tmp_path, gpu="nvidia", also=("pid ", "process ")))
        mount = start()
        run = stack.enter_context(program(*(run_in(mount) if library else []), elastic, "PAGE", "4096"))
        wait_for(lambda: run.passes > 2, "it works", seconds=60)
        for step, seconds in MOMENTS:
            (here,) = where(run.process.pid)
            group = at(mount, run, here)
            if library:
                wait_for(
                    lambda group=group: flat(group.read("gcgroup.stat"))["managed"] == 1,  # type: ignore[misc]
                    "it speaks",
                )
            time.sleep(BEGUN_S)  # only then is it known whether an agent of the old daemon is at work
            mover = threading.Thread(target=_try, args=(group, 1 - here))
            mover.start()
            if step:
                late = NOTED[NOTED.index(step) :]
                wait_for(lambda late=late: noted(run) in late, f"the agent comes to {step}")  # type: ignore[misc]
            time.sleep(seconds)
            kill(mount)
            mover.join()
            before = run.passes
            mount = start()
            wait_for(lambda before=before: run.passes > before + 2, "it goes on", seconds=30)  # type: ignore[misc]
            places = where(run.process.pid)
            print(f"killed {seconds:.2f} s after {step or 'the write'}: on GPU {places}")
            assert len(places) == 1
            been.update(places)
        assert been == {0, 1}, "it moves, at some moments"
        run.finish()


def noted(run: Program) -> str:
    """Return the step that the agent noted last, read without the lock that shows whether the agent lives."""
    for path in directory().glob(f"{run.process.pid}.*"):
        with suppress(ValueError, FileNotFoundError):
            return str(json.loads(path.read_bytes())["step"])
    return ""


def _try(group: Member, gpu: int) -> None:
    try:
        write(group, "compute.migrate", gpu)
    except OSError as error:  # no process is left to answer
        print(f"asked for GPU {gpu}: {error.strerror}")


def test_the_order_of_gpus_is_the_programs_own(gpu_mount: Mounted, elastic: str) -> None:
    """With CUDA_VISIBLE_DEVICES=1,0 its device 0 is GPU 1, and it still moves to the GPU that was requested."""
    with program("env", "CUDA_VISIBLE_DEVICES=1,0", "CUDA_DEVICE_ORDER=PCI_BUS_ID", elastic, "PAGE", "256") as run:
        wait_for(lambda: run.passes > 2, "it works", seconds=60)
        group = at(gpu_mount, run, 1)
        write(group, "compute.migrate", 0)
        assert where(run.process.pid) == [0]
        run.finish()
