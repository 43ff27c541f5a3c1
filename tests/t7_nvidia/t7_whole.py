"""A frozen program without the library goes into the host as a whole, on a real GPU, and comes back at its thaw."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ggroupfs.client import Member
from tests.support.cgroups import enter, slice_path
from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import Worker, wait_for
from tests.t7_nvidia.programs import GIB, MIB, current, group_of, member, nvml_used, program, write

Start = Callable[..., Worker]

BYTES = 4 * GIB
LARGE = 20 * GIB
KERNEL_US = 200
RUNS_S = 0.25
"""Longest time in seconds that a frozen program runs, to reach the state in which the driver can lock it. Its agent
takes seconds to start."""


def taken(run: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    began = time.monotonic()
    run()
    return time.monotonic() - began


def refused(group: Member, name: str, value: object, code: int) -> None:
    with pytest.raises(OSError, match=os.strerror(code)):
        write(group, name, value)


def in_the_host(group: Member, pid: int, nbytes: int = BYTES) -> None:
    """Check that it is in the host, by the driver and by the books."""
    assert nvml_used(pid) == 0
    wait_for(lambda: current(group) == 0, "the books say so")
    assert int(group.read("gmem.swap.current")) >= nbytes


@pytest.mark.timeout(120)
def test_what_takes_longer_than_the_deadline_goes_on(tmp_path_factory: pytest.TempPathFactory, worker: Start) -> None:
    """The caller is told so. The files then show the outcome: a thaw that failed leaves it frozen."""
    with mounted(tmp_path_factory.mktemp("hasty"), "deadline=0.2", gpu="nvidia") as mount:
        run = worker(KERNEL_US, BYTES)
        group = Member(run.pid, 0, group_of(mount, run))
        write(group, "compute.freeze", 1)
        refused(group, "gmem.reclaim", "1M", errno.ETIMEDOUT)
        wait_for(lambda: int(group.read("gmem.swap.current")) >= BYTES, "it goes out", seconds=20)
        in_the_host(group, run.pid)
        refused(group, "compute.freeze", 0, errno.ETIMEDOUT)
        wait_for(lambda: current(group) >= BYTES, "it comes back", seconds=20)
        assert group.read("compute.freeze") == "1"
        time.sleep(0.5)
        finished = run.finished
        time.sleep(0.5)
        assert run.finished == finished
        write(group, "compute.freeze", 0)
        wait_for(lambda: run.finished > finished + 100, "it goes on")
        run.drained()


@pytest.mark.timeout(120)
def test_a_large_one_has_as_long_as_it_takes(gpu_mount: Mounted, worker: Start) -> None:
    """The deadline of a lever, 5 s, is added once more for every 2 GiB."""
    run = worker(KERNEL_US, LARGE)
    group = Member(run.pid, 0, group_of(gpu_mount, run))
    write(group, "compute.freeze", 1)
    out = taken(lambda: write(group, "gmem.reclaim", "1M"))
    in_the_host(group, run.pid, LARGE)
    back = taken(lambda: write(group, "compute.freeze", 0))
    print(f"{LARGE >> 20} MiB: out in {out:.2f} s, back in {back:.2f} s")
    finished = run.finished
    wait_for(lambda: run.finished > finished + 100, "it goes on")
    run.drained()


@pytest.mark.timeout(180)
def test_it_is_what_it_was(gpu_mount: Mounted, elastic: str) -> None:
    """Three times out and back: every word that it wrote is there in the end."""
    with program(elastic, "PAGE", str(BYTES // MIB)) as run:
        group = member(gpu_mount, run)
        before = nvml_used(run.pid)
        assert before >= BYTES
        for _ in range(3):
            write(group, "compute.freeze", 1)
            out = taken(lambda: write(group, "gmem.reclaim", "1M"))
            in_the_host(group, run.pid)
            passes = run.passes
            time.sleep(0.5)
            assert run.passes == passes
            back = taken(lambda: write(group, "compute.freeze", 0))
            wait_for(lambda passes=passes: run.passes > passes + 2, "it goes on", seconds=10)  # type: ignore[misc]
            wait_for(lambda: current(group) >= BYTES, "the books say so")
            assert group.read("gmem.swap.current") == "0"
            print(f"{before >> 20} MiB: out in {out:.2f} s, back in {back:.2f} s")
        run.finish()


@pytest.mark.timeout(120)
def test_it_runs_for_a_moment_only(gpu_mount: Mounted, worker: Start) -> None:
    """The GPU itself counts its kernels. None is lost, and none runs while it is in the host."""
    run = worker(KERNEL_US, BYTES)
    group = Member(run.pid, 0, group_of(gpu_mount, run))
    write(group, "compute.freeze", 1)
    before = run.finished
    out = taken(lambda: write(group, "gmem.reclaim", "1M"))
    kernels = run.finished - before
    in_the_host(group, run.pid)
    time.sleep(0.5)
    assert run.finished - before == kernels
    back = taken(lambda: write(group, "compute.freeze", 0))
    print(f"out in {out:.2f} s, and {kernels} kernels of {KERNEL_US} us meanwhile; back in {back:.2f} s")
    wait_for(lambda: run.finished > before + kernels + 100, "it goes on")
    run.drained()
    assert kernels * KERNEL_US / 1e6 <= RUNS_S


@pytest.mark.timeout(120)
def test_its_slice_takes_it_and_not_one_that_runs(gpu_mount: Mounted, place: Path, worker: Start) -> None:
    frozen, other = (worker(KERNEL_US, BYTES) for _ in range(2))
    for run in (frozen, other):
        enter(run.pid, place)
    group, beside = (Member(run.pid, 0, group_of(gpu_mount, run)) for run in (frozen, other))
    both = Member(0, 0, gpu_mount / "slice" / slice_path(place) / "0")
    wait_for(lambda: both.path.exists() and current(both) > 2 * BYTES, "both are in the slice")
    write(group, "compute.freeze", 1)
    cut = taken(lambda: write(both, "gmem.limit.high", current(beside) + GIB))
    in_the_host(group, frozen.pid)
    print(f"the slice was cut in {cut:.2f} s")
    finished = other.finished
    wait_for(lambda: other.finished > finished + 1000, "the other one runs")
    refused(group, "compute.freeze", 0, errno.ENOSPC)
    write(both, "gmem.limit.high", "max")
    write(group, "compute.freeze", 0)
    for run in (frozen, other):
        finished = run.finished
        wait_for(lambda run=run, finished=finished: run.finished > finished + 100, "it runs")  # type: ignore[misc]
        run.drained()
