"""When requests come: bursts, as BurstGPT (Wang et al.) describes those of language models, by gamma-distributed gaps.

A shape below 1 is burstier than a Poisson process, which has 1: the coefficient of variation of the gaps is
1 / sqrt(shape). The shape used here is ours, not one that was fitted to a trace.

The gaps are scaled so that as many requests as the load wants come in the window, whatever the seed: the load of a
short window would else be another for each seed, and latencies at high load go by it more than by what is compared.
"""

from __future__ import annotations

import random
import zlib

SHAPE = 0.5
"""Of the gamma distribution; a coefficient of variation of 1.41."""


def arrivals(rate: float, seconds: float, seed: int, shape: float = SHAPE) -> list[float]:
    """Times of round(rate * seconds) requests, seconds from the begin, ascending and below `seconds`.

    ValueError where that is not one request.
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
    """A seed for one measurement: the same for every system, so all serve the same requests, and for every run."""
    return zlib.crc32(repr((base, *what)).encode())
