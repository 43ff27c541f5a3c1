"""A PyTorch program, limited or plain, with the fate of its limits and its results."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import attrs

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT
from tests.t7_nvidia.programs import Program, current, program, run_in, write

STEPS = 200
STOP, MAY, HEAD, STEP = 8, 16, 24, 16
"""Offsets in the page of workload.py, and the bytes of each step in it."""


@contextlib.contextmanager
def torch(
    mount: Mounted | None, mode: str, steps: int = STEPS, *limits: str, may: int | None = None, on: Sequence[str] = ()
) -> Iterator[Program]:
    """Run a PyTorch program, managed or (None) plain. `may` are the steps that it does before it is told to go on, and
    `on` the words before all others."""
    words = [sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "workload.py"), mode, "PAGE"]
    with program(*on, *(run_in(mount, *limits) if mount else []), *words, size=HEAD + STEP * steps) as run:
        run.set(MAY, steps if may is None else may)
        yield run


def seconds_of(run: Program, first: int, last: int) -> list[float]:
    """Return the durations of its steps from `first` to before `last`."""
    return [struct.unpack_from("<dd", run.page, HEAD + STEP * step)[1] for step in range(first, last)]


def outcome(run: Program, seconds: float = 60) -> tuple[bytes, float]:
    """Return the result of each step, and the median step without the first tenth, in microseconds."""
    assert run.process.wait(seconds) == 0
    losses = b"".join(run.page[HEAD + STEP * step : HEAD + STEP * step + 8] for step in range(run.passes))
    return losses, statistics.median(seconds_of(run, run.passes // 10, run.passes)) * 1e6


@attrs.define
class Rewritten:
    """Fate of a limit that was rewritten all the time."""

    footprint: int
    written: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    """Failed writes by errno; the last one may fail when the program has just ended."""
    moved: int = 0
    """Bytes moved out."""

    def __str__(self) -> str:
        refused = f", refused {dict(self.refused)}" if self.refused else ""
        return (
            f"footprint {self.footprint >> 20} MiB, limit written {self.written} times{refused}, "
            f"{self.moved >> 20} MiB moved out"
        )


def rewrite(
    run: Program,
    group: Member,
    seed: int,
    until: Callable[[Rewritten], bool],
    part: tuple[float, float] = (0.4, 1.0),
) -> Rewritten:
    """Set gmem.limit.high at random to such a part of the footprint every 200 ms; in the end to none."""
    rng, result = random.Random(seed), Rewritten(current(group))
    while run.process.poll() is None and not until(result):
        try:
            write(group, "gmem.limit.high", int(result.footprint * rng.uniform(*part)))
            result.written += 1
            result.moved = group.flat("gmem.stat")["swapout_bytes"]
        except OSError as error:
            result.refused[errno.errorcode.get(error.errno or 0, str(error))] += 1
        time.sleep(0.2)
    with contextlib.suppress(OSError):  # the program may just have ended
        write(group, "gmem.limit.high", "max")
    return result
