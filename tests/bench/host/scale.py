"""A tree of a thousand and of ten thousand processes, next to as many cgroups."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Unavailable
from tests.bench.host.files import programs
from tests.bench.mounts import GGROUPFS, mount, processes
from tests.bench.report import BenchError
from tests.support.cgroups import cgroup

COUNTS = (1000, 10_000)
LISTS = 3
IDLE_S = 5.0
REFERENCE = "cgroup2"


def listed(directory: Path, entries: int, times: int = LISTS) -> float:
    """Return the milliseconds of an `ls -l`, the fastest of some, with its start. BenchError if it lists too few."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        lines = subprocess.run(["ls", "-l", directory], capture_output=True, text=True, check=True).stdout.splitlines()
        found.append(1e3 * (time.perf_counter() - start))
        if len(lines) < entries:
            raise BenchError(f"ls -l lists {len(lines)} of {entries}")
    return min(found)


def made(directory: Path, names: Sequence[str]) -> float:
    """Return the microseconds that one mkdir takes."""
    start = time.perf_counter()
    for name in names:
        os.mkdir(directory / name)
    return 1e6 * (time.perf_counter() - start) / len(names)


@attrs.define
class Cgroups:
    """Empty cgroups."""

    counts: Sequence[int] = COUNTS
    name: str = REFERENCE

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        for count in self.counts:
            names = [str(number) for number in range(count)]
            try:
                with cgroup(f"ggroup-bench-{os.getpid()}") as path:
                    figures = {"mkdir_us": made(path, names), "list_ms": listed(path, count)}
                    for name in names:
                        with contextlib.suppress(OSError):
                            (path / name).rmdir()
            except (AssertionError, OSError) as error:
                raise Unavailable(f"no cgroups can be made: {error}") from None
            yield {"processes": count}, figures


@attrs.define
class Tree:
    """Processes in a mounted tree."""

    counts: Sequence[int] = COUNTS
    idle_s: float = IDLE_S
    name: str = "ggroupfs"

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        for count in self.counts:
            with processes(programs()["processes"], count) as pids, mount(GGROUPFS) as server:
                mkdir = made(server.mountpoint, [str(pid) for pid in pids])
                ls = listed(server.mountpoint, count)
                time.sleep(1)  # to settle
                start, cpu = time.monotonic(), server.cpu_seconds()
                time.sleep(self.idle_s)
                idle = 100 * (server.cpu_seconds() - cpu) / (time.monotonic() - start)
                figures = {"mkdir_us": mkdir, "list_ms": ls, "memory_mb": server.rss_mb(), "idle_percent": idle}
            yield {"processes": count}, figures


def make(seed: int, counts: Sequence[int] = COUNTS, idle_s: float = IDLE_S) -> Scenario:
    """Return the scenario."""
    return Scenario("scale", REFERENCE, [Cgroups(counts), Tree(counts, idle_s)], parameters={"idle_s": idle_s})
