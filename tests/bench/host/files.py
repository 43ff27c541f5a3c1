"""The cost of an access to a control file: cgroup2 in the kernel, the cheapest FUSE server, and ggroupfs.

The client is client.c. It, and each server, run on one CPU, as in files.py, which compares the same figures with
budgets: wake-ups across CPUs would hide everything else. The files are memory.max or, where cgroup2 has no such
controller, cgroup.max.depth; and gmem.limit.high of this process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Unavailable
from tests.bench.machine import ROOT
from tests.bench.mounts import GGROUPFS, build, mount
from tests.bench.report import BenchError
from tests.support.cgroups import cgroup

OPERATIONS = ("pread", "cat", "stat", "pwrite", "echo")
CALLS = 1000
BUILD = ROOT / "build" / "bench"
REFERENCE = "a C libfuse server"
Place = contextlib.AbstractContextManager[tuple[Path, str]]
"""A file, and a value that can be written to it."""


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Pin this process, and all that it starts, to one CPU; undone in the end."""
    every = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(every)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def timed(client: Path, file: Path, value: str, calls: int) -> Figures:
    """Return the median of each operation. BenchError if one fails."""
    done = subprocess.run([client, file, value, str(calls), *OPERATIONS], capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"client: {done.stderr}")
    return {f"{name}_us": float(p50) for name, p50, *_ in map(str.split, done.stdout.splitlines())}


@contextlib.contextmanager
def in_cgroup2() -> Iterator[tuple[Path, str]]:
    """Yield a file of a cgroup of our own. Unavailable if none can be made."""
    try:
        with cgroup(f"ggroup-bench-{os.getpid()}") as path:
            limit = path / "memory.max"
            yield (limit, "8589934592") if limit.exists() else (path / "cgroup.max.depth", "100")
    except (AssertionError, OSError) as error:
        raise Unavailable(f"no cgroup can be made: {error}") from None


@contextlib.contextmanager
def served_by(command: Sequence[str], make: bool) -> Iterator[tuple[Path, str]]:
    """Yield a file of a mounted tree."""
    with mount(list(command)) as server:
        if make:
            server.add([os.getpid()])
        yield server.file(os.getpid()), "8589934592"


@attrs.define
class Accessed:
    """One kind of file."""

    name: str
    place: Callable[[Path], Place]
    """Function that yields a file, given the directory of the programs in C."""
    calls: int = CALLS

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        with pinned(), self.place(programs()["baseline"]) as (file, value):
            yield {}, timed(programs()["client"], file, value, self.calls)


@functools.cache
def programs() -> Mapping[str, Path]:
    """Return client.c, baseline.c and processes.c, built once."""
    BUILD.mkdir(parents=True, exist_ok=True)
    return build(BUILD)


def named() -> Mapping[str, str]:
    """Return which file of a cgroup is used here."""
    try:
        with in_cgroup2() as (file, _):
            return {"cgroup2_file": file.name}
    except Unavailable:
        return {}


def make(seed: int, calls: int = CALLS) -> Scenario:
    """Return the scenario."""
    subjects = [
        Accessed(REFERENCE, lambda baseline: served_by([os.fspath(baseline)], False), calls),
        Accessed("cgroup2", lambda _: in_cgroup2(), calls),
        Accessed("ggroupfs", lambda _: served_by(GGROUPFS, True), calls),
    ]
    return Scenario("files", REFERENCE, subjects, named, {"calls": calls})
