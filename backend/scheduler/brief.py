"""Tell which held programs launch brief work, so that they may have a longer slice.

A program is *held* when the library delays its launches during the busy periods of programs of better priority. What it
already has on the GPU at that moment runs on, and the better programs wait for it. If that work is brief, it may as
well finish in one slice. If it is long, the shortest slices interrupt it.

A held program comes onto the engine once between two busy periods, and a few times more for the work that it has left.
A program that comes far more often launches in spite of the hold. With long slices, the programs before it would wait
for one slice in each gap between two requests. So it gets short slices for as long as this is remembered.

A launch is a kernel or a graph of kernels. The mean duration of a launch is the engine time of the program divided by
its launches, over some seconds, because use is reported 0.2 s later than launches are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from backend.process.identity import Process

if TYPE_CHECKING:
    from backend.scheduler.use import Sample

BRIEF_US = 2_000
"""Mean duration of a launch up to which a program becomes brief, microseconds. Calculated, not measured, for the
tail latency of requests of 1.55 ms, as a multiple of their latency alone: at a load of 35 % and more, beside kernels of
3 ms, 1.29 with slices of 2 ms and 1.51 with slices of 50 us. At a load of 10 % long slices are worse: 1.62 and 1.36,
and beside kernels of 2 ms 1.42 and 1.36.
"""
LONG_US = 3_000
"""Mean duration of a launch above which a program ceases to be brief, microseconds. It is above BRIEF_US because each
change takes a driver call.
"""
KEPT = 0.95
"""Decay factor of the sums, per window: about 2 s of windows count."""
WINDOWS_LEAST = 5
"""Number of windows before the first judgement of a program."""
LAUNCHES_LEAST = 20
"""Number of launches in the sums below which a program is not judged."""

STAYS_MOST, STAYS_LEAST = 2.5, 20
"""Bound on the stays on the engine of a held program: so many for each busy period of the programs before it, plus a
constant, both over the windows that count. (Calculated: 1.0 to 1.8 stays with launches of BRIEF_US; 3.8 to 5000 for a
program that launches in spite of the hold as often as there are requests.)
"""
DISTRUSTED_WINDOWS, DISTRUSTED_MOST = 300, 36_000
"""Time for which a program that exceeded the bound is distrusted, in windows: the first time, which doubles with each
further time, and the longest.
"""


@attrs.define
class _Seen:
    """The decayed sums of one program."""

    windows: int = 0
    used_us: float = 0.0
    launches: float = 0.0
    stays: float = 0.0
    periods: float = 0.0
    is_brief: bool = False
    distrusted: int = 0
    """Windows, from now on, for which the program is taken not to be held."""
    _next: int = DISTRUSTED_WINDOWS

    def come(self, stays: int, periods: int) -> None:
        """Note a window with `stays` stays on the engine, and `periods` busy periods of the programs before it."""
        self.stays = KEPT * self.stays + stays
        self.periods = KEPT * self.periods + periods
        self.distrusted = max(0, self.distrusted - 1)
        if not self.distrusted and self.is_brief and self.stays > STAYS_MOST * self.periods + STAYS_LEAST:
            self.distrusted, self._next = self._next, min(2 * self._next, DISTRUSTED_MOST)

    def again(self) -> _Seen:
        """Return what is kept of a program that is not held: its distrust."""
        return _Seen(distrusted=max(0, self.distrusted - 1), next=self._next)

    def add(self, used_us: int, launches: int) -> None:
        """Note a window in which the program used the engine for `used_us` microseconds and launched `launches`
        times.
        """
        self.windows += 1
        self.used_us = KEPT * self.used_us + used_us
        self.launches = KEPT * self.launches + launches
        if self.windows >= WINDOWS_LEAST and self.launches >= LAUNCHES_LEAST:
            self.is_brief = self.used_us <= self.launches * (LONG_US if self.is_brief else BRIEF_US)


class Brief:
    """The held programs of one GPU."""

    def __init__(self) -> None:
        self._seen: dict[Process, _Seen] = {}

    def observe(self, samples: Mapping[Process, Sample]) -> None:
        """Note a window. Programs without a sample are forgotten; of a program that is not held only its distrust is
        kept. A program that used nothing, because it was off the runlist or had no work, keeps its last judgement.
        """
        periods = sum(sample.busy_periods or 0 for sample in samples.values())
        before, self._seen = self._seen, {}
        for process, sample in samples.items():
            seen = before.get(process)
            if sample.held_launches is None:
                if seen is not None:
                    self._seen[process] = seen.again()
                continue
            seen = self._seen[process] = seen or _Seen()
            seen.come(sample.stays or 0, periods)
            if sample.used_us:
                seen.add(sample.used_us, sample.held_launches)

    def has(self, process: Process) -> bool:
        """Return whether a program is held, as far as the samples show, and launches brief work."""
        seen = self._seen.get(process)
        return seen is not None and seen.is_brief and not seen.distrusted
