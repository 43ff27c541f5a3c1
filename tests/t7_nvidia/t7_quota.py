"""compute.max on a real GPU: the work of programs with a quota, as counted by the programs themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.cgroups import enter, slice_path
from tests.support.mounted import Mounted
from tests.t7_nvidia.bursting import bursts
from tests.t7_nvidia.conftest import Worker, rates, wait_for
from tests.t7_nvidia.programs import group_of, run_in

Start = Callable[..., Worker]

KERNEL_US = 500
"""Duration of a kernel, microseconds."""
SETTLED_S = 6.0
"""Time after which use that was reported late at first is paid off, seconds."""
SETTLED_FOUR_S = 20.0
"""The same for four programs without the library: it takes longer to learn that they always work."""
SECONDS = 10.0
"""Time over which a quota must hold, seconds."""
NEAR = {100_000: 0.03, 1_000_000: 0.05}
"""Relative tolerance, by period in microseconds."""

each_way = pytest.mark.parametrize("library", [True, False], ids=["library", "levers"])
each_period = pytest.mark.parametrize("period", list(NEAR), ids=["100ms", "1s"])
each_share = pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8])


def begun(mount: Mounted, worker: Start, *, library: bool) -> tuple[Worker, float]:
    """Start a program that always has work, in the tree; return it and the kernels a second that it does alone."""
    one = worker(KERNEL_US, before=run_in(mount) if library else ())
    one.started()
    group_of(mount, one)
    (full,) = rates(one, seconds=3)
    return one, full


def limit(mount: Mounted, one: Worker, share: float, period: int) -> None:
    (mount.group(one.pid) / "compute.max").write_text(f"{round(share * period)} {period}\n")


@pytest.mark.timeout(120)
@each_way
@each_period
@each_share
def test_one_that_is_alone(gpu_mount: Mounted, worker: Start, share: float, period: int, library: bool) -> None:
    one, full = begun(gpu_mount, worker, library=library)
    limit(gpu_mount, one, share, period)
    time.sleep(SETTLED_S)
    (rate,) = rates(one, seconds=SECONDS)
    print(f"{share} of {period} us, {'library' if library else 'levers'}: {rate / full:.4f} of {full:.0f} kernels/s")
    assert rate / full == pytest.approx(share, rel=NEAR[period])


@pytest.mark.timeout(120)
@each_way
@each_period
@pytest.mark.parametrize("share", [0.1, 0.3])
def test_beside_another(gpu_mount: Mounted, worker: Start, share: float, period: int, library: bool) -> None:
    """The program has its quota, and the other one the rest, except the cost of switches."""
    one, full = begun(gpu_mount, worker, library=library)
    limit(gpu_mount, one, share, period)
    other = worker(KERNEL_US)
    other.started()
    group_of(gpu_mount, other)
    time.sleep(SETTLED_S)
    found = [rate / full for rate in rates(one, other, seconds=SECONDS)]
    print(f"{share} of {period} us, {'library' if library else 'levers'}: {found[0]:.4f}, the other {found[1]:.4f}")
    assert found[0] == pytest.approx(share, rel=NEAR[period])
    assert sum(found) >= 0.93


@pytest.mark.timeout(120)
@each_way
@each_period
def test_one_that_idles_in_between(gpu_mount: Mounted, worker: Start, period: int, library: bool) -> None:
    one, full = begun(gpu_mount, worker, library=library)
    over = threading.Event()
    thread = threading.Thread(target=bursts, args=(one, over))
    thread.start()
    try:
        limit(gpu_mount, one, 0.3, period)
        time.sleep(SETTLED_S)
        (rate,) = rates(one, seconds=SECONDS)
    finally:
        over.set()
        thread.join()
    print(f"bursts, {period} us, {'library' if library else 'levers'}: {rate / full:.4f}")
    assert rate / full == pytest.approx(0.3, rel=NEAR[period])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kernel_us", [100, 500, 2000])
def test_a_bound_on_run_ahead_leaves_the_engine_busy(gpu_mount: Mounted, worker: Start, kernel_us: int) -> None:
    """The bound holds for 10 s after the last turn. With a marker at the first and the last launch of a batch, a
    program of short kernels had 0.945 of the engine.
    """
    one = worker(kernel_us, before=run_in(gpu_mount))
    one.started()
    group_of(gpu_mount, one)
    (full,) = rates(one, seconds=3)
    limit(gpu_mount, one, 0.5, 100_000)
    wait_for(lambda: figure(gpu_mount, one, "nr_throttled") > 3, "it stands at its gate now and then")
    (gpu_mount.group(one.pid) / "compute.max").write_text("max\n")
    time.sleep(1)
    (bounded,) = rates(one, seconds=5)
    print(f"{kernel_us} us: {bounded:.0f} of {full:.0f} kernels/s")
    assert bounded / full >= 0.985


def figure(mount: Mounted, one: Worker, name: str) -> int:
    """Return a figure of gcgroup.stat."""
    lines = (mount.group(one.pid) / "gcgroup.stat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


@pytest.mark.timeout(120)
@each_period
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_samples_of_one_that_stands_and_goes_on(gpu_mount: Mounted, worker: Start, share: float, period: int) -> None:
    """All samples are requested, so they tell what the program does. If they tell less than 0.8 of it, the program
    counts as idle in between, and gets more than its quota.
    """
    one, full = begun(gpu_mount, worker, library=False)
    limit(gpu_mount, one, share, period)
    time.sleep(SETTLED_S)
    before = figure(gpu_mount, one, "busy_sampled_usec")
    (rate,) = rates(one, seconds=SECONDS)
    sampled = (figure(gpu_mount, one, "busy_sampled_usec") - before) / 1e6 / SECONDS
    print(f"{share} of {period} us: {rate / full:.4f}, by samples {sampled:.4f}")
    assert 0.85 <= sampled / (rate / full) <= 1.15


def in_slice(mount: Mounted, place: Path, workers: Sequence[Worker]) -> Path:
    """Put the programs into a slice; return its compute.max."""
    for one in workers:
        one.started()
        enter(one.pid, place)
        group_of(mount, one)
    file = mount / "slice" / slice_path(place) / "0" / "compute.max"
    wait_for(file.exists, "the slice is in the tree")
    return file


@pytest.mark.timeout(240)
@each_way
@each_period
def test_a_slice_of_four(gpu_mount: Mounted, place: Path, worker: Start, period: int, library: bool) -> None:
    first, full = begun(gpu_mount, worker, library=library)
    before = run_in(gpu_mount) if library else ()
    four = [first, *(worker(KERNEL_US, before=before) for _ in range(3))]
    in_slice(gpu_mount, place, four).write_text(f"{round(0.3 * period)} {period}\n")
    time.sleep(SETTLED_FOUR_S)
    found = [rate / full for rate in rates(*four, seconds=SECONDS)]
    print(f"four, {period} us, {'library' if library else 'levers'}: {sum(found):.4f}, each {found}")
    assert sum(found) == pytest.approx(0.3, rel=NEAR[period])


@pytest.mark.timeout(240)
def test_a_slice_of_four_that_fork(gpu_mount: Mounted, place: Path, worker: Start) -> None:
    """With the library, one program ends and another begins each second: this gains nothing."""
    first, full = begun(gpu_mount, worker, library=True)
    four = [first, *(worker(KERNEL_US, before=run_in(gpu_mount)) for _ in range(3))]
    in_slice(gpu_mount, place, four).write_text("30000 100000\n")
    time.sleep(SETTLED_S)
    every, before, began = list(four), sum(one.finished for one in four), time.monotonic()
    while time.monotonic() < began + SECONDS:
        time.sleep(1)
        old = four.pop(0)
        old.process.kill()
        old.process.wait()
        four.append(worker(KERNEL_US, before=run_in(gpu_mount)))
        enter(four[-1].pid, place)
        every.append(four[-1])
    part = (sum(one.finished for one in every) - before) / (time.monotonic() - began) / full
    print(f"four that fork: {part:.4f}")
    assert part == pytest.approx(0.3, rel=0.03)
