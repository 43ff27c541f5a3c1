"""Medians and spreads of a few repetitions, and percentiles of many requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


def percentile(values: Sequence[float], part: float) -> float:
    """Return the nearest-rank percentile: the least value that at least `part` of them do not exceed. ValueError if
    empty."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


@attrs.frozen
class Spread:
    """Summary of repetitions."""

    median: float
    """Middle value, or the mean of the two in the middle."""
    least: float
    """Smallest value."""
    most: float
    """Largest value."""
    count: int
    """Number of values."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarize values. ValueError for none."""
        if not values:
            raise ValueError("no values")
        ordered, half = sorted(values), len(values) // 2
        middle = ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
        return cls(middle, ordered[0], ordered[-1], len(values))
