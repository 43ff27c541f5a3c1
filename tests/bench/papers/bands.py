"""Gangs on this machine's GPUs, and the ways to share those, for gangs.py."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.lab import GpuLab, last_line
from tests.bench.gpu.systems import SliceRoom, Turned
from tests.bench.papers.gangs import ALONE
from tests.bench.papers.lab import PROGRAMS, START_S, STOP_S, WRONG, ready, stopped
from tests.bench.papers.sharing import ANY, LINE, LINES, WAIT_S, serving, written
from tests.support.mounted import eventually
from tests.t7_nvidia.programs import STOP, Program, program

LONGEST = 40
"""Offset of gang.py."""


@attrs.define
class GpuGang:
    """A gang that runs."""

    ranks: Sequence[Program]

    @property
    def steps(self) -> int:
        """See Gang."""
        for run in self.ranks:
            if run.process.poll():
                raise Unavailable(f"a rank ended: {last_line(run.log)}")
        return min(run.passes for run in self.ranks)

    def longest_ms(self) -> float:
        """See Gang. A step that is not over counts with the next."""
        found = max(run.u64(LONGEST) for run in self.ranks) / 1e6
        for run in self.ranks:
            memoryview(run.page)[LONGEST : LONGEST + 8] = bytes(8)
        return found

    def finish(self) -> None:
        """See Gang."""
        self.ranks[0].set(STOP, 1)
        for run in self.ranks:
            if run.process.wait(STOP_S) or run.u64(WRONG):
                raise RuntimeError(f"what it computed is wrong: {last_line(run.log)}")


@attrs.define
class GpuBand:
    """Programs on all GPUs, by a way."""

    lab: GpuLab
    stack: contextlib.ExitStack
    gpus: int
    room: SliceRoom | None = None
    """The slice that they are in, if there is a tree."""

    @property
    def said(self) -> Sequence[str]:
        """See Band."""
        return [] if self.room is None else [line.strip()[:LINE] for line in self.room.mount.errors[:LINES]]

    def _words(self, *properties: str) -> list[str]:
        return [] if self.room is None else self.room.words(*properties)

    def gang(self) -> GpuGang:
        """See Band. The gang comes first."""
        meet = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-gang-"))) / "meet"
        words = [*self._words("compute.priority=0"), sys.executable, os.fspath(PROGRAMS / "gang.py"), "PAGE"]
        runs = [
            self.stack.enter_context(program(*words, str(rank), str(self.gpus), os.fspath(meet)))
            for rank in range(self.gpus)
        ]
        for run in reversed(runs):  # so that rank 0, which tells the others, is told first
            self.stack.enter_context(stopped(run))
        until = time.monotonic() + START_S
        for run in runs:
            ready(run, until)
        return GpuGang(runs)

    def fill(self) -> Callable[[], int]:
        """See Band."""
        words = self._words()
        every = [
            self.stack.enter_context(self.lab.products(["env", f"CUDA_VISIBLE_DEVICES={gpu}", *words]))
            for gpu in range(self.gpus)
        ]
        for one in every:
            one.work(True)
        return lambda: sum(one.done for one in every)

    def press(self, percent: int) -> None:
        """See Band."""
        if self.room is None:
            raise Unavailable("there is no slice whose memory could be limited")
        self.room.wait(WAIT_S)
        for gpu in range(self.gpus):
            files = self.room.mount / "slice" / self.room.within / str(gpu)
            eventually((files / "gmem.current").exists, f"{files} is in the tree")
            written(files / "gmem.limit.high", int((files / "gmem.current").read_text()) * percent // 100)


@attrs.frozen
class GpuWay:
    """Time slicing, or a tree with turns of memory or without."""

    lab: GpuLab
    name: str
    options: Sequence[str] | None = None
    """Of the mount; None for no tree."""

    @contextlib.contextmanager
    def enter(self, gpus: int) -> Iterator[GpuBand]:
        """See Way. Programs end before the tree does."""
        if self.options is None:
            with contextlib.ExitStack() as stack:
                yield GpuBand(self.lab, stack, gpus)
            return
        with Turned(self.name, self.options, expected=ANY).enter() as room, contextlib.ExitStack() as stack:
            yield GpuBand(self.lab, stack, gpus, room)
            serving(room.mount)


def ways(lab: GpuLab) -> list[GpuWay]:
    """Those that are compared: that of the gang alone first, and that of turns last."""
    return [
        GpuWay(lab, ALONE),
        GpuWay(lab, "time slicing"),
        GpuWay(lab, "ggroupfs", ["turns=off"]),
        GpuWay(lab, "ggroupfs, turns", ["turns=on"]),
    ]
