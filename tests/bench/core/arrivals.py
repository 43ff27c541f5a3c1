"""Arrival times of requests: bursts, as BurstGPT (Wang et al.) describes those of language models, with gamma gaps.

A shape below 1 is burstier than a Poisson process, which has 1: the coefficient of variation of the gaps is
1 / sqrt(shape). The shape used here is ours, not one that was fitted to a trace.

The gaps are scaled so that the number of requests in the window is the load's, for any seed. Otherwise the load of a
short window would differ between seeds, which affects latencies at high load more than the compared systems do.
"""

from __future__ import annotations

import random
import zlib

SHAPE = 0.5
"""Shape of the gamma distribution; a coefficient of variation of 1.41."""


def arrivals(rate: float, seconds: float, seed: int, shape: float = SHAPE) -> list[float]:
    """Return the times of round(rate * seconds) requests, in seconds from the start, ascending and below `seconds`.

    ValueError if that is less than one request.
    """
    count = round(rate * seconds)
    if count < 1:
        raise ValueError(f"no request comes within {seconds} s at {rate} a second")
    chance = random.Random(seed)
    gaps = [chance.gammavariate(shape, 1.0) for _ in range(count + 1)]
    scale, at, found = seconds / sum(gaps), 0.0, []
    for gap in gaps[:-1]:
        at += gap * scale
        found.append(min(at, seconds))
    return found


def seed_of(base: int, *what: object) -> int:
    """Return a seed for one measurement: the same for every system and run, so that all serve the same requests."""
    return zlib.crc32(repr((base, *what)).encode())
