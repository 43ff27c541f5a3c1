"""Middles and spreads of a few repetitions, and percentiles of many requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


def percentile(values: Sequence[float], part: float) -> float:
    """The nearest-rank percentile: the least value that so large a part of them are not above. ValueError for none."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)]


@attrs.frozen
class Spread:
    """What repetitions came to."""

    median: float
    """The middle one, or the mean of the two in the middle."""
    least: float
    """The smallest."""
    most: float
    """The largest."""
    count: int
    """How many."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """ValueError for none."""
        if not values:
            raise ValueError("no values")
        ordered, half = sorted(values), len(values) // 2
        middle = ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2
        return cls(middle, ordered[0], ordered[-1], len(values))
