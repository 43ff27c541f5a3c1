"""Requests on a real GPU, as they come, beside a program that fills (requests.cu)."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Sequence

import attrs

from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import Program

FULL = os.environ.get("BURSTS") == "full"
SECONDS = 40.0 if FULL else 7.0
"""Of arrivals, in each cell: at 80 % a p99 of few requests says little (2,000 have a deviation of 24 %)."""
FILL_US = 200
"""Microseconds of a kernel of what fills."""
MOST = 8192
"""Arrivals that requests.cu takes."""
SIZE = 4096 + 2 * 8 * MOST
GO, OVER, COUNT, ROUNDS, ALONE_NS, ARRIVALS = 32, 36, 40, 44, 48, 4096
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


def share(passes: float, full: float, count: int, service_s: float, took_s: float) -> float:
    """Return the speed of what fills, by what requests leave it of a time of `took_s` seconds.

    That is from when they were told to begin until the last one was served: no time after that counts, in which none
    was to come (half a second of each burst). `passes` is what it did in that time, `full` what it does a second on a
    GPU of its own, `service_s` what each of `count` requests takes on one, as its process measured it: the times of
    arrivals are made by that, too.
    """
    return passes / took_s / full / max(0.01, 1 - count * service_s / took_s)


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(0.99 * len(latencies))]
