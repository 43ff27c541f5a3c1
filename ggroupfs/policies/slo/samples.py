"""Turns the latencies that programs report into samples for the policy: one per group and interval."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

MOST = 10_000
"""Largest number of latencies kept per group and interval; later ones are dropped."""

PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")


class Statistic:
    """The statistic of an interval: ``mean``, or a percentile such as ``p99`` (``p100`` is the maximum)."""

    def __init__(self, name: str) -> None:
        """ValueError for any other name."""
        match = PERCENTILE.fullmatch(name)
        if match is None and name != "mean":
            raise ValueError("neither mean nor a percentile such as p99")
        self._part = float(match[1]) / 100 if match else None

    def of(self, latencies: Sequence[float]) -> float:
        """Return the statistic of at least one latency."""
        if self._part is None:
            return sum(latencies) / len(latencies)
        # The nearest rank: of a few latencies, a high percentile is the longest.
        return sorted(latencies)[max(0, math.ceil(self._part * len(latencies)) - 1)]


class Interval:
    """The latencies that one group reported in the current interval."""

    def __init__(self, statistic: Statistic) -> None:
        self._statistic = statistic
        self._latencies: list[float] = []

    def add(self, latencies: Iterable[float]) -> None:
        """Record latencies, in seconds."""
        self._latencies += list(latencies)[: max(0, MOST - len(self._latencies))]

    def take(self) -> float | None:
        """Begin another interval, and return the sample of the last one in seconds; None if nothing was reported."""
        latencies, self._latencies = self._latencies, []
        return self._statistic.of(latencies) if latencies else None
