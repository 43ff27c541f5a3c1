"""When NVML is asked for its samples, and for how long each stands. Pure.

A sample tells how busy a program was in the last sixth of a second, or in some such time, and the last one stands for
all since it was asked for. That is no matter to a program that does the same all the time. One that is had stand and
go on again and again, in step with the questions, would be seen at work each time, or never: with a quota of 0.3 and
cycles of 0.4 s it had 0.45 of an H200. So while there is such a program all samples are asked for, and each stands for
its own time.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import attrs

from backend.process.identity import Process

SAMPLE_S = 1.0
"""Seconds between two questions."""
CLOSELY_S = 2.0
"""Seconds after a program without the library was taken off the runlist, or put back, in which NVML is asked at each
look: 40 us each."""
SPACING_MOST_US = 1_000_000
"""Microseconds between two samples of the driver, at most."""
SPACING_LEAST_US = 50_000
"""Microseconds between two samples of the driver, at least."""
GAP = 1.5
"""Time without a sample, as a multiple of what is between two, from which on no program worked: then none is told."""


@attrs.define
class Sampling:
    """See the module. Of one GPU."""

    spacing_us: int = SPACING_MOST_US
    """How far samples are apart, microseconds; or less. It depends on the driver."""
    _asked: float = 0.0
    _standing: Collection[Process] = frozenset()  # programs without the library that are off the runlist
    _changed: float = -math.inf  # when these were others

    def begin(self, now: float) -> None:
        """Take note that what was before that time, in seconds, is of no matter."""
        self._asked = now

    def is_due(self, now: float, standing: Collection[Process]) -> bool:
        """Return whether it is to be asked. `standing`: the programs that are off the runlist, and do not count their
        kernels."""
        if standing != self._standing:
            self._standing, self._changed = standing, now
        return self._is_close(now) or now - self._asked >= SAMPLE_S

    def window_us(self, now: float, span_us: int | None) -> float:
        """Return the microseconds that the last sample stands for, as it is that much after the last one before; None
        where that is not known. It was asked for at `now`."""
        asked_us, self._asked = (now - self._asked) * 1e6, now
        if span_us is None or not self._is_close(now):
            return asked_us
        if span_us >= SPACING_LEAST_US:
            self.spacing_us = min(self.spacing_us, span_us)
        return span_us if span_us < GAP * self.spacing_us else min(span_us, max(self.spacing_us, asked_us))

    def _is_close(self, now: float) -> bool:
        return now - self._changed < CLOSELY_S
