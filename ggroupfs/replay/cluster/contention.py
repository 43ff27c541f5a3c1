"""Contention: the speed of programs that share the time of one GPU.

A program computes for a fraction of its time, its `busy`, and needs no GPU in the rest. While it wants the GPU, it gets
the fraction of its weight among the programs that want it at that instant, as compute.weight gives it. If each other
program j wants the GPU with the probability P(j), the expected rate of program i is

    r(i) = E[w(i) / (w(i) + sum of w(j) over those that want it)] = integral from 0 to 1 of
           product over j of (1 - P(j) + P(j) * v ** (w(j) / w(i))) dv

and program i itself wants the GPU for R(i) = busy(i) / r(i) of each R(i) + 1 - busy(i). This is a fixed point, which is
approached in a few rounds. Programs that always compute get exactly their weights; for two programs the mean is exact
as well.

Sharing makes nothing compute faster: the engine runs one context at a time (benchmarks/README.md). The cost of sharing
itself is EFFICIENCY. Memory is never moved here: what is placed on a GPU fits there ("memory turns" are off), so no
figure of memory pressure enters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EFFICIENCY = 1162 / 1173
"""Total rate of programs that share a GPU, relative to one alone: batch of three by weight over batch alone, both in
benchmarks/README.md (shares by weight; decoding, exclusive)."""
ROUNDS = 5
"""Rounds towards the fixed point; another round changes no pace by a hundredth."""
NODES: Sequence[tuple[float, float]] = (
    (0.046910077, 0.118463443),
    (0.230765345, 0.239314335),
    (0.5, 0.284444444),
    (0.769234655, 0.239314335),
    (0.953089923, 0.118463443),
)
"""Points and weights of Gauss's quadrature with five points on 0 to 1."""


def paces(programs: Sequence[tuple[float, float]]) -> list[float]:
    """Return the pace of each program, 1 as if alone; programs are pairs of `busy` and weight."""
    contend = [number for number, (busy, _) in enumerate(programs) if busy > 0]
    found = [1.0] * len(programs)
    if len(contend) < 2:
        return found
    busy = [programs[number][0] for number in contend]
    weight = [programs[number][1] for number in contend]
    # By program i and point: the weight of the point, and its power for each other program.
    points = [[(part, [point ** (other / own) for other in weight]) for point, part in NODES] for own in weight]
    wants = list(busy)
    pace = [1.0] * len(contend)
    for _ in range(ROUNDS):
        for i, own in enumerate(busy):
            time = own / (_rate(i, wants, points[i]) * EFFICIENCY)
            pace[i] = min(1.0, 1 / (time + 1 - own))
            wants[i] = min(1.0, time * pace[i])
    used = math.fsum(b * p for b, p in zip(busy, pace, strict=True))
    for number, one in zip(contend, pace, strict=True):
        found[number] = one / max(1.0, used)  # removes the excess of the fixed point, which no engine can deliver
    return found


def _rate(i: int, wants: Sequence[float], points: Sequence[tuple[float, Sequence[float]]]) -> float:
    found = 0.0
    for part, powers in points:
        term = part
        for j, probability in enumerate(wants):
            if j != i:
                term *= 1 - probability * (1 - powers[j])
        found += term
    return found
