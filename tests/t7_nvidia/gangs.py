"""Programs of two ranks, a process and a GPU each, that sum up by NCCL."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.programs import STOP, Program, program, run_in

MIB_EACH = 4096
"""Memory of each rank besides that of NCCL, MiB."""


@contextlib.contextmanager
def pair(mount: Mounted, meet: Path, within: str | None = None) -> Iterator[list[Program]]:
    """Run a program of two ranks, which meet through a file that is not there yet; in a cgroup, if one is named."""
    with contextlib.ExitStack() as stack:
        words = [*run_in(mount, within=within), sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "ranks.py")]
        runs = [
            stack.enter_context(program(*words, "PAGE", str(MIB_EACH), str(rank), os.fspath(meet))) for rank in (0, 1)
        ]
        wait_for(lambda: min(run.passes for run in runs) > 2, "both ranks work", seconds=120)
        yield runs


def finish(ranks: Sequence[Program]) -> None:
    """Tell the ranks to stop; every sum must have been right."""
    ranks[0].set(STOP, 1)
    for run in ranks:
        assert run.process.wait(120) == 0
        assert run.u64(16) == 0


class Watch:
    """How long programs are without a step."""

    def __init__(self, runs: Sequence[Program], now: float) -> None:
        self.runs = runs
        self.longest = 0.0
        """The longest time in which one made no step, seconds."""
        self.first = [run.passes for run in runs]
        """Steps of each at the begin."""
        self._last, self._since = list(self.first), [now] * len(runs)

    @property
    def done(self) -> list[int]:
        """Steps of each since the begin."""
        return [last - first for last, first in zip(self._last, self.first, strict=True)]

    def look(self, now: float) -> None:
        """Look at all of them."""
        for number, run in enumerate(self.runs):
            if run.passes != self._last[number]:
                self._last[number], self._since[number] = run.passes, now
            self.longest = max(self.longest, now - self._since[number])
