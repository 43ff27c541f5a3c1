"""Busy periods on a real GPU: the tail of short requests beside a program that fills, and what is left for that.

The same arrivals alone and beside it. By default a reduced set, of less than 4 minutes; BURSTS=full has all cells, and
each for longer.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from tests.support.mounted import Mounted, mounted
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.programs import Program, member, program, rate, run_in, write

FULL = os.environ.get("BURSTS") == "full"
SECONDS = 40.0 if FULL else 7.0
"""Of arrivals, in each cell: at 80 % a p99 of few requests says little (2,000 have a deviation of 24 %)."""
FILL_US = 200
"""Microseconds of a kernel of what fills."""
MOST = 8192
"""Arrivals that requests.cu takes."""
SIZE = 4096 + 2 * 8 * MOST
GO, OVER, COUNT, ALONE_NS, ARRIVALS = 32, 36, 40, 48, 4096
"""Where requests.cu says what."""
SHAPE = 0.5
"""Of the gamma distribution of gaps: a deviation of 1.4 times the mean."""
KERNELS = 10
"""Of a request."""


@attrs.frozen
class Cell:
    """One kind of requests, and how they arrive."""

    service_us: int
    load: float
    bursts: bool
    ratio: float
    """p99 beside what fills, by that alone, at most: the aim, and what so few requests are off by."""
    share: float
    """Speed of what fills, of what the requests leave, at least."""

    def __str__(self) -> str:
        how = "bursts" if self.bursts else "gamma"
        return f"{self.service_us / 1000:g}ms-{how}-{self.load * 100:.0f}"


SHORT, LONG = (1550,) if not FULL else (1000, 1550, 2000), (6500,) if not FULL else (5000, 6500, 8000)
CELLS = [
    *(Cell(us, 0.35, bursts=True, ratio=1.25, share=0.75) for us in (*SHORT, *LONG)),
    *(Cell(us, 0.35, bursts=False, ratio=1.25, share=0.75) for us in SHORT),
    *(Cell(us, 0.6, bursts=False, ratio=1.35, share=0.65) for us in SHORT),
    *(Cell(us, 0.8, bursts=False, ratio=1.6, share=0.5) for us in SHORT),
    *(Cell(us, load, bursts=False, ratio=1.6, share=0.5) for us in LONG for load in (0.35, 0.6, 0.8) if FULL),
]


def arrivals(cell: Cell, service_s: float) -> list[int]:
    """When requests come, nanoseconds: as a gamma process, or for half of each second at twice the load."""
    source, now, found = random.Random(f"{cell}"), 0.0, list[int]()
    load = 2 * cell.load if cell.bursts else cell.load
    while len(found) < MOST:
        now += source.gammavariate(SHAPE, service_s / load / SHAPE)
        wall = now if not cell.bursts else now + 0.5 * int(now / 0.5)
        if wall > SECONDS:
            break
        found.append(round(wall * 1e9))
    return found


def serve(run: Program, requests: Sequence[int]) -> list[float]:
    """Latencies of these requests, seconds."""
    struct.pack_into(f"<{len(requests)}Q", run.page, ARRIVALS, *requests)
    run.set(COUNT, len(requests))
    number = run.u32(GO) + 1
    run.set(GO, number)
    wait_for(lambda: run.u32(OVER) == number or run.process.poll() is not None, "all are served", seconds=5 * SECONDS)
    assert run.process.poll() is None
    found = struct.unpack_from(f"<{len(requests)}Q", run.page, ARRIVALS + 8 * MOST)
    return [ns / 1e9 for ns in found]


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(0.99 * len(latencies))]


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
    """p99 alone, by that beside what fills; the speed of that, of its own alone; and of what the requests leave it."""
    words = run_in(mount)
    with program(*words, requests, "PAGE", "serve", str(cell.service_us), str(KERNELS), size=SIZE) as one:
        wait_for(lambda: one.u64(ALONE_NS) > 0 or one.process.poll() is not None, "it serves", seconds=60)
        assert one.process.poll() is None
        requested = arrivals(cell, one.u64(ALONE_NS) / 1e9)
        alone = serve(one, requested)
        with program(*words, requests, "PAGE", "fill", str(FILL_US), size=SIZE) as other:
            group = member(mount, other)
            time.sleep(1)  # nothing to wait for: it is to be at its speed
            full = rate(other, 2)
            write(group, "compute.priority", 9)
            time.sleep(1)  # as long as the scheduler takes to see both
            before, begun = other.passes, time.monotonic()
            beside = serve(one, requested)
            took = time.monotonic() - begun  # bursts end half a second before SECONDS do
            speed = (other.passes - before) / took / full
            other.finish()
        one.finish()
    load = len(requested) * cell.service_us / 1e6 / took
    return p99(beside) / p99(alone), speed, speed / max(0.01, 1 - load)


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
