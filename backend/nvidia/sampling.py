"""When NVML is asked for its samples, and how much time each sample stands for. Pure.

A sample tells how busy a program was during the last sixth of a second or so. Usually the latest one stands for all the
time since the last request. That is fine for a program that behaves evenly. A program that is stopped and resumed in
step with the requests would always be seen at work, or never: with a quota of 0.3 and cycles of 0.4 s, one was counted
at 0.45 of an H200.

So while there is such a program, all samples are asked for, and each stands for its own time: the time since the sample
before it, if none is missing between the two. The driver does not tell its sampling interval. It is taken to be the
shortest interval that occurs repeatedly. When an interval that occurred once was taken, samples counted 0.69 of what a
program did on an H200.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection

import attrs

from backend.process.identity import Process

SAMPLE_S = 1.0
"""Seconds between two requests."""
CLOSELY_S = 2.0
"""Seconds after a program without the library was taken off the runlist or put back during which NVML is asked at each
look; each takes 40 us.
"""
SPACING_MOST_US = 1_000_000
"""Longest interval between two samples of the driver, microseconds."""
SPACING_LEAST_US = 50_000
"""Shortest interval between two samples of the driver, microseconds."""
SPANS, SPARED = 32, 3
"""Number of sample intervals that are remembered, and how many of the shortest of them may be accidental."""
GAP = 1.5
"""Time without a sample, as a multiple of the sample interval, from which on no program worked: an idle engine has no
samples.
"""


@attrs.define
class Sampling:
    """The sampling of one GPU."""

    _spans: deque[int] = attrs.field(factory=lambda: deque(maxlen=SPANS))  # intervals between samples, microseconds
    _asked: float = 0.0
    _standing: Collection[Process] = frozenset()  # programs without the library that are off the runlist
    _changed: float = -math.inf  # time of the last change of these

    @property
    def spacing_us(self) -> int:
        """The interval between samples, microseconds, which depends on the driver; an overestimate until enough were
        seen.
        """
        spans = sorted(self._spans)
        return spans[min(SPARED, len(spans) // 4)] if spans else SPACING_MOST_US

    def begin(self, now: float) -> None:
        """Ignore the time before `now`, seconds."""
        self._asked = now

    def is_due(self, now: float, standing: Collection[Process]) -> bool:
        """Return whether samples are to be requested. `standing` are the programs that are off the runlist and do not
        count their kernels.
        """
        if standing != self._standing:
            self._standing, self._changed = standing, now
        return self._is_close(now) or now - self._asked >= SAMPLE_S

    def window_us(self, now: float, span_us: int | None) -> float:
        """Return the microseconds that the last sample, requested at `now`, stands for. `span_us` is its distance from
        the sample before; None if unknown.
        """
        asked_us, self._asked = (now - self._asked) * 1e6, now
        if span_us is None or not self._is_close(now):
            return asked_us
        if SPACING_LEAST_US <= span_us <= SPACING_MOST_US:
            self._spans.append(span_us)
        return span_us if span_us < GAP * self.spacing_us else min(span_us, max(self.spacing_us, asked_us))

    def _is_close(self, now: float) -> bool:
        return now - self._changed < CLOSELY_S
