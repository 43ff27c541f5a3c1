"""Memory growth: the trend of samples, and its standard error. Pure."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WARM_UP = 0.25
"""Fraction of the time at the start that is ignored, since caches fill."""
BLOCK = 10.0
"""Seconds of a block: neighbouring samples depend on each other mostly within one."""
BLOCKS = 12
"""Least number of blocks; for less than two minutes they are shorter."""


@dataclass(frozen=True)
class Trend:
    """A straight line through samples."""

    slope: float
    """Growth per second."""
    error: float
    """Standard error of the slope."""


def blocks(samples: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the median time and value of each `BLOCK`, after the warm-up."""
    samples = sorted(samples)
    first, last = samples[0][0], samples[-1][0]
    start = first + (last - first) * WARM_UP
    number = max(BLOCKS, round((last - start) / BLOCK))
    width = (last - start) / number or BLOCK
    groups: list[list[tuple[float, float]]] = [[] for _ in range(number)]
    for at, value in samples:
        if at >= start:
            groups[min(number - 1, int((at - start) / width))].append((at, value))
    if not all(groups):
        raise ValueError(f"{len(samples)} samples in {last - first:.1f} s say nothing about a trend")
    return [tuple(map(statistics.median, zip(*group, strict=True))) for group in groups]


def trend(samples: Iterable[tuple[float, float]]) -> Trend:
    """Return the trend of samples ``(second, value)``.

    The slope is that of Theil (1950) and Sen (1968), the median over all pairs, on which single jumps have no effect.
    Its error is that of least squares, from the residuals of the line, with the number of blocks reduced by the
    correlation of each with the one before it (Bayley and Hammersley 1946, to the first order).

    Raises ValueError if there are too few.
    """
    points = blocks(samples)
    slope = statistics.median(
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for index, earlier in enumerate(points)
        for later in points[index + 1 :]
    )
    level = statistics.median(value - slope * at for at, value in points)
    left = [value - level - slope * at for at, value in points]
    middle = statistics.fmean(at for at, _ in points)
    spread = sum((at - middle) ** 2 for at, _ in points)
    alike = min(max(likeness(left), 0.0), 0.9)
    variance = sum(value**2 for value in left) / (len(left) - 2)
    return Trend(slope, (variance / spread * (1 + alike) / (1 - alike)) ** 0.5)


def likeness(values: Sequence[float]) -> float:
    """Return the correlation of each value with the next; 0 if they are all the same."""
    middle = statistics.fmean(values)
    apart = [value - middle for value in values]
    whole = sum(value**2 for value in apart)
    return sum(one * other for one, other in itertools.pairwise(apart)) / whole if whole else 0.0
