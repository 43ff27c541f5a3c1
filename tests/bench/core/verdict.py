"""Whether a ratio changed, by its repetitions in two records: worse, better, the same, or too noisy to tell.

Repetitions are interleaved (core.runner, papers.cells): a ratio is of two systems in one round, so what drifts is in
both and divides out. The logarithms of such ratios are compared by Welch's interval at 99.9 %, as a run compares
hundreds of them. A change is told if it is larger than that interval and than LEAST. A ratio is too noisy to tell if a
change of FIND would be found with less than POWER: so of each that is called the same a change of FIND would have been
seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from enum import Enum

import attrs

FIND = 0.15
"""A change of a ratio that is found on a quiet machine."""
LEAST = 0.1
"""A smaller change is never told."""
POWER = 0.95
"""Probability with which it is found."""
ENOUGH = 4
"""Repetitions of each record, below which an interval says nothing."""
POWER_DEVIATIONS = 1.6449
"""Standard errors above a threshold from which on a change is above it with POWER."""

QUANTILES = (
    *(636.6, 31.60, 12.92, 8.610, 6.869, 5.959, 5.408, 5.041, 4.781, 4.587),
    *(4.437, 4.318, 4.221, 4.140, 4.073, 4.015, 3.965, 3.922, 3.883, 3.850),
)
"""Student's t at 0.9995, by degrees of freedom from 1 on."""
LAST_QUANTILE = 3.850
"""The same for more of them: a little wider than it need be (3.291 in the limit)."""


class Verdict(Enum):
    """What became of a ratio."""

    WORSE = "worse"
    BETTER = "better"
    SAME = "same"
    NOISY = "too noisy to tell"


@attrs.frozen
class Change:
    """A comparison of one ratio."""

    verdict: Verdict
    factor: float
    """Of its geometric means, the later by the earlier."""
    least_found: float
    """The smallest change that would be found with POWER, as a part of 1."""


def _quantile(freedom: float) -> float:
    number = math.floor(freedom)
    return QUANTILES[max(1, number) - 1] if number <= len(QUANTILES) else LAST_QUANTILE


def judged(before: Sequence[float], after: Sequence[float], lower: bool) -> Change:
    """Compare ratios, each above 0, of two records; `lower` where less is better. ValueError for fewer than ENOUGH."""
    if min(len(before), len(after)) < ENOUGH:
        raise ValueError(f"{len(before)} and {len(after)} repetitions are fewer than {ENOUGH}")
    old, new = [math.log(one) for one in before], [math.log(one) for one in after]
    change = statistics.fmean(new) - statistics.fmean(old)
    parts = [statistics.variance(one) / len(one) for one in (old, new)]
    error = math.sqrt(sum(parts))
    freedom = math.inf
    if error:
        freedom = error**4 / sum(part**2 / (len(one) - 1) for part, one in zip(parts, (old, new), strict=True))
    threshold = max(math.log1p(LEAST), _quantile(freedom) * error if error else 0.0)
    found = threshold + POWER_DEVIATIONS * error
    if abs(change) > threshold:
        verdict = Verdict.WORSE if (change > 0) == lower else Verdict.BETTER
    else:
        verdict = Verdict.SAME if found <= math.log1p(FIND) else Verdict.NOISY
    return Change(verdict, math.exp(change), math.expm1(found))
