"""From the latencies that programs report to the samples that are decided on: one of each group an interval."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

MOST = 10_000
"""Latencies kept of one group in one interval; what comes after them is left out."""

PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?|100)")


class Statistic:
    """What an interval is summed up to: ``mean``, or a percentile such as ``p99`` (``p100`` is the longest)."""

    def __init__(self, name: str) -> None:
        """ValueError for what is neither."""
        match = PERCENTILE.fullmatch(name)
        if match is None and name != "mean":
            raise ValueError("neither mean nor a percentile such as p99")
        self._part = float(match[1]) / 100 if match else None

    def of(self, latencies: Sequence[float]) -> float:
        """Of latencies, at least one."""
        if self._part is None:
            return sum(latencies) / len(latencies)
        # The nearest rank: of few, a high percentile is the longest.
        return sorted(latencies)[max(0, math.ceil(self._part * len(latencies)) - 1)]


class Interval:
    """What one group reported since it was last asked."""

    def __init__(self, statistic: Statistic) -> None:
        self._statistic = statistic
        self._latencies: list[float] = []

    def add(self, latencies: Iterable[float]) -> None:
        """Latencies, seconds."""
        self._latencies += list(latencies)[: max(0, MOST - len(self._latencies))]

    def take(self) -> float | None:
        """The sample, seconds, and another interval begins; None where nothing was reported."""
        latencies, self._latencies = self._latencies, []
        return self._statistic.of(latencies) if latencies else None
