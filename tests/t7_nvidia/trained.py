"""A PyTorch program under limits or plain, and what it computed."""

from __future__ import annotations

import contextlib
import os
import statistics
import struct
import sys
from collections.abc import Iterator, Sequence

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT
from tests.t7_nvidia.programs import Program, program, run_in

STEPS = 200
STOP, MAY, HEAD, STEP = 8, 16, 24, 16
"""Offsets in the page of workload.py, and the bytes of each step in it."""


@contextlib.contextmanager
def torch(
    mount: Mounted | None, mode: str, steps: int = STEPS, *limits: str, may: int | None = None, on: Sequence[str] = ()
) -> Iterator[Program]:
    """A PyTorch program, managed or (None) plain; `may` are the steps that it does before it is told to go on, and `on`
    the words before all others."""
    words = [sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "workload.py"), mode, "PAGE"]
    with program(*on, *(run_in(mount, *limits) if mount else []), *words, size=HEAD + STEP * steps) as run:
        run.set(MAY, steps if may is None else may)
        yield run


def seconds_of(run: Program, first: int, last: int) -> list[float]:
    """How long its steps from `first` to before `last` took."""
    return [struct.unpack_from("<dd", run.page, HEAD + STEP * step)[1] for step in range(first, last)]


def outcome(run: Program, seconds: float = 60) -> tuple[bytes, float]:
    """What it computed in each step that it did, and its median step in microseconds, but for the first tenth."""
    assert run.process.wait(seconds) == 0
    losses = b"".join(run.page[HEAD + STEP * step : HEAD + STEP * step + 8] for step in range(run.passes))
    return losses, statistics.median(seconds_of(run, run.passes // 10, run.passes)) * 1e6
