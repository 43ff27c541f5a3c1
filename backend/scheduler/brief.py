"""Which programs launch work that is brief, of those that are held in the busy periods of others.

What such a program has on the GPU as it is held goes on, and the others wait for it. Where that is brief it may as well
go on in one slice; where it is long, the shortest slices have it wait.

A program that is held comes onto the engine once in each time between two busy periods, and a few times more for what
it has left. One that comes far more often launches all the same: in long slices it would have those that go before it
wait for one in each gap between two requests, so it has short ones, for as long as that is remembered.

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
"""Microseconds that a launch takes at most, on the average, of a program that was not brief before. In slices of 2 ms
requests of 1.55 ms at a load of 35 % and more have a better tail beside kernels of 3 ms than in slices of 50 us (1.29
and 1.51 times that alone), and a worse one at 10 %: 1.62 and 1.36, beside kernels of 2 ms 1.42 and 1.36 (reckoned)."""
LONG_US = 3_000
"""Microseconds beyond which it is not brief any more: each change is a call of the driver."""
KEPT = 0.95
"""Part of what was seen up to a window that counts after it: some 2 s of them."""
WINDOWS_LEAST = 5
"""Windows after which a program is judged first."""
LAUNCHES_LEAST = 20
"""Launches in what counts, less than which say nothing."""

STAYS_MOST, STAYS_LEAST = 2.5, 20
"""Times that a program which is held comes onto the engine, at most, for each busy period of those before it, and
besides, in what counts. (Reckoned: 1.0 to 1.8, with launches of BRIEF_US; of one that launches all the same as often as
there are requests, 3.8 to 5000.)"""
DISTRUSTED_WINDOWS, DISTRUSTED_MOST = 300, 36_000
"""Windows for which that is remembered, the first time, and at most: each time it is twice as long."""


@attrs.define
class _Seen:
    """What counts of one program."""

    windows: int = 0
    used_us: float = 0.0
    launches: float = 0.0
    stays: float = 0.0
    periods: float = 0.0
    is_brief: bool = False
    distrusted: int = 0
    """Windows for which it is taken not to be held, from now on."""
    _next: int = DISTRUSTED_WINDOWS

    def come(self, stays: int, periods: int) -> None:
        """A window has passed, in which it came onto the engine so often, and those before it had so many periods."""
        self.stays = KEPT * self.stays + stays
        self.periods = KEPT * self.periods + periods
        self.distrusted = max(0, self.distrusted - 1)
        if not self.distrusted and self.is_brief and self.stays > STAYS_MOST * self.periods + STAYS_LEAST:
            self.distrusted, self._next = self._next, min(2 * self._next, DISTRUSTED_MOST)

    def again(self) -> _Seen:
        """Return what is known of it as it is not held."""
        return _Seen(distrusted=max(0, self.distrusted - 1), next=self._next)

    def add(self, used_us: int, launches: int) -> None:
        """A window has passed, in which it used so much, and launched so often."""
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
        """A window has passed. A program that is not there is forgotten, and of one that is not held all but whether it
        is trusted; one that used nothing, as it was off the runlist or had no work, is what it was."""
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
        """Whether a program is held, as far as it shows, and what it launches is brief."""
        seen = self._seen.get(process)
        return seen is not None and seen.is_brief and not seen.distrusted
