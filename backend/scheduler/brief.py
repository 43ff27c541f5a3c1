"""Which programs launch work that is brief, of those that are held in the busy periods of others.

What such a program has on the GPU as it is held goes on, and the others wait for it. Where that is brief it may as well
go on in one slice; where it is long, the shortest slices have it wait.

A launch is a kernel or a graph of kernels. How long one takes is what the program used by how often it launched, over
some seconds: use is told 0.2 s later than launches are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from backend.process.identity import Process

if TYPE_CHECKING:
    from backend.scheduler.use import Sample

BRIEF_US = 2_000
"""Microseconds that a launch takes at most, on the average, of a program that was not brief before. In slices of 1 ms
requests of 1.55 ms beside kernels of 3 ms have a better tail than in slices of 50 us; beside such of 20 ms a worse one,
at low loads from 5 ms on (reckoned)."""
LONG_US = 3_000
"""Microseconds beyond which it is not brief any more: each change is a call of the driver."""
KEPT = 0.95
"""Part of what was seen up to a window that counts after it: some 2 s of them."""
WINDOWS_LEAST = 5
"""Windows after which a program is judged first."""
LAUNCHES_LEAST = 20
"""Launches in what counts, less than which say nothing."""


@attrs.define
class _Seen:
    """What counts of one program."""

    windows: int = 0
    used_us: float = 0.0
    launches: float = 0.0
    is_brief: bool = False

    def add(self, used_us: int, launches: int) -> None:
        """A window has passed."""
        self.windows += 1
        self.used_us = KEPT * self.used_us + used_us
        self.launches = KEPT * self.launches + launches
        if self.windows >= WINDOWS_LEAST and self.launches >= LAUNCHES_LEAST:
            self.is_brief = self.used_us <= self.launches * (LONG_US if self.is_brief else BRIEF_US)


class Brief:
    """The programs of one GPU."""

    def __init__(self) -> None:
        self._seen: dict[Process, _Seen] = {}

    def observe(self, samples: Mapping[Process, Sample]) -> None:
        """A window has passed. A program that is not held, or not there, is forgotten; one that used nothing, as it was
        off the runlist or had no work, is what it was."""
        self._seen = {
            process: self._seen.get(process) or _Seen()
            for process, sample in samples.items()
            if sample.held_launches is not None
        }
        for process, seen in self._seen.items():
            sample = samples[process]
            if sample.used_us and sample.held_launches is not None:
                seen.add(sample.used_us, sample.held_launches)

    def has(self, process: Process) -> bool:
        """Whether a program is held, and what it launches is brief."""
        seen = self._seen.get(process)
        return seen is not None and seen.is_brief
