"""Busy periods on a real GPU: the tail of short requests beside a program that fills, and what is left for that.

The same arrivals alone and beside it. By default a reduced set, of less than 4 minutes; BURSTS=full has all cells, and
each for longer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.programs import member, program, rate, run_in, write
from tests.t7_nvidia.requested import (
    ALONE_NS,
    CELLS,
    FILL_US,
    FULL,
    KERNELS,
    SHORT,
    SIZE,
    Cell,
    arrivals,
    p99,
    serve,
    share,
)


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> str:
    """requests.cu, built."""
    return built(tmp_path_factory, "requests")


@pytest.fixture(scope="module", params=["hold", "no"])
def holding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mounted, str]]:
    """A mount with busy periods, and one without."""
    options = ["hold=no"] if request.param == "no" else []
    with mounted(Path(tmp_path_factory.mktemp("bursts")), *options, gpu="nvidia") as mount:
        yield mount, str(request.param)


def measure(mount: Mounted, requests: str, cell: Cell) -> tuple[float, float, float]:
    """Return p99 beside what fills, by that alone; the speed of that, of its own alone; and of what the requests leave
    it in the time in which they are served (:func:`tests.t7_nvidia.requested.share`)."""
    words = run_in(mount)
    with program(*words, requests, "PAGE", "serve", str(cell.service_us), str(KERNELS), size=SIZE) as one:
        wait_for(lambda: one.u64(ALONE_NS) > 0 or one.process.poll() is not None, "it serves", seconds=60)
        assert one.process.poll() is None
        service_s = one.u64(ALONE_NS) / 1e9
        requested = arrivals(cell, service_s)
        alone = serve(one, requested)
        with program(*words, requests, "PAGE", "fill", str(FILL_US), size=SIZE) as other:
            group = member(mount, other)
            time.sleep(1)  # nothing to wait for: it is to be at its speed
            full = rate(other, 2)
            write(group, "compute.priority", 9)
            time.sleep(1)  # as long as the scheduler takes to see both
            before, begun = other.passes, time.monotonic()
            beside = serve(one, requested)
            passes, took_s = other.passes - before, time.monotonic() - begun
            other.finish()
        one.finish()
    left = share(passes, full, len(requested), service_s, took_s)
    return p99(beside) / p99(alone), passes / took_s / full, left


@pytest.mark.timeout(240)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_tail_of_requests(holding: tuple[Mounted, str], requests: str, cell: Cell) -> None:
    """Beside a program of worse priority; without busy periods it is told, and nothing is asked of it."""
    mount, how = holding
    if how == "no" and not (FULL or (cell.bursts and cell.service_us in SHORT)):
        pytest.skip("in the full set")
    ratio, speed, share = measure(mount, requests, cell)
    print(f"{cell}, {how}: p99 {ratio:.3f} of that alone; what fills {speed:.3f} of its speed, {share:.3f} of the rest")
    if how == "hold":
        assert ratio <= cell.ratio
        assert share >= cell.share
