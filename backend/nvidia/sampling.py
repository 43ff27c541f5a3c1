"""When NVML is asked for its samples, and for how long each stands. Pure.

A sample tells how busy a program was in the last sixth of a second, or in some such time, and the last one stands for
all since it was asked for. That is no matter to a program that does the same all the time. One that is had stand and
go on again and again, in step with the questions, would be seen at work each time, or never: with a quota of 0.3 and
cycles of 0.4 s it had 0.45 of an H200. So while there is such a program all samples are asked for, and each stands for
its own time: that since the one before, where no sample is missing between the two. How far they are apart the driver
does not say. It is the shortest time that comes again and again: one that came once was taken for it, and samples then
told 0.69 of what a program did on an H200.
"""

from __future__ import annotations

import math
from collections import deque
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
SPANS, SPARED = 32, 3
"""Times between two samples that are remembered, and the shortest of these that may have come by chance."""
GAP = 1.5
"""Time without a sample, as a multiple of what is between two, from which on no program worked: then none is told."""


@attrs.define
class Sampling:
    """See the module. Of one GPU."""

    _spans: deque[int] = attrs.field(factory=lambda: deque(maxlen=SPANS))  # between two samples, microseconds
    _asked: float = 0.0
    _standing: Collection[Process] = frozenset()  # programs without the library that are off the runlist
    _changed: float = -math.inf  # when these were others

    @property
    def spacing_us(self) -> int:
        """How far samples are apart, microseconds; or more, as long as few were seen. It depends on the driver."""
        spans = sorted(self._spans)
        return spans[min(SPARED, len(spans) // 4)] if spans else SPACING_MOST_US

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
        if SPACING_LEAST_US <= span_us <= SPACING_MOST_US:
            self._spans.append(span_us)
        return span_us if span_us < GAP * self.spacing_us else min(span_us, max(self.spacing_us, asked_us))

    def _is_close(self, now: float) -> bool:
        return now - self._changed < CLOSELY_S
