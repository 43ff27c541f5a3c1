"""Gangs: programs with a process on each GPU of a host, which wait for each other in every step, beside fillers.

A rank that waits for its turn has all others wait. So what is told of a gang is its steps and the longest of them, and
of its neighbours what they have of the GPUs meanwhile. Two gangs in less memory than they hold have turns with their
memory, all ranks of one together, or none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tests.bench.core.record import Case
from tests.bench.papers.cells import SECOND, Cell, Measured

NAME, ALONE = "scale-gangs", "alone"
SETTLE_S, WINDOW_S = 5.0, 15.0
PERCENT = 70
"""Of the memory of two gangs, on each GPU."""
LEAST_GPUS = 2


class Gang(Protocol):
    """A gang that runs."""

    @property
    def steps(self) -> int:
        """Steps that all of its ranks did. Unavailable once one has failed."""
        ...

    def longest_ms(self) -> float:
        """Of its longest step since this was last asked."""
        ...

    def finish(self) -> None:
        """Have it stop. RuntimeError where what it computed is wrong."""
        ...


class Band(Protocol):
    """A way to share the GPUs of a host."""

    def gang(self) -> Gang:
        """Start one on all GPUs. Unavailable if a rank ends before it is ready."""
        ...

    def fill(self) -> Callable[[], int]:
        """Start a program on each GPU that would fill it; what is returned counts their products."""
        ...

    def press(self, percent: int) -> None:
        """Leave so much of what is held on each GPU. Unavailable where that cannot be."""
        ...

    @property
    def said(self) -> Sequence[str]:
        """What the daemon has logged."""
        ...


class Way(Protocol):
    """A way to share them that is not set up yet."""

    @property
    def name(self) -> str: ...

    def enter(self, gpus: int) -> contextlib.AbstractContextManager[Band]:
        """Set it up; what was started ends with it. Unavailable where that cannot be."""
        ...


class Clock(Protocol):
    """What passes the time."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


def measured(clock: Clock, way: Way, gpus: int, gangs: int, fillers: bool, percent: int) -> Callable[[int], Measured]:
    """What gangs do by a way."""

    def measure(number: int) -> Measured:
        with way.enter(gpus) as band:
            every = [band.gang() for _ in range(gangs)]
            filled = band.fill() if fillers else lambda: 0
            if percent < 100:
                band.press(percent)
            clock.sleep(SETTLE_S)
            for one in every:
                one.longest_ms()
            before, products, start = sum(one.steps for one in every), filled(), clock.now()
            clock.sleep(WINDOW_S)
            seconds = clock.now() - start
            found = {
                "steps_per_s": (sum(one.steps for one in every) - before) / seconds,
                "worst_ms": max(one.longest_ms() for one in every),
            }
            if fillers:
                found["batch_per_s"] = (filled() - products) / seconds
            for one in every:
                one.finish()
        return Measured(found, said=band.said)

    return measure


def cells(clock: Clock, ways: Sequence[Way], gpus: int) -> Iterator[Cell]:
    """All of them, on so many GPUs: the first way is that of the gang alone, the last that of turns."""
    count = max(LEAST_GPUS, gpus)
    first, *beside, turns = ways
    yield Cell(NAME, ALONE, {"gpus": count}, 60.0, measured(clock, first, count, 1, False, 100), count, SECOND)
    for way in beside:
        case: Case = {"gpus": count, "beside": "fillers"}
        yield Cell(NAME, way.name, case, 65.0, measured(clock, way, count, 1, True, 100), count, SECOND)
    two: Case = {"gpus": count, "gangs": 2, "memory": PERCENT}
    yield Cell(NAME, turns.name, two, 80.0, measured(clock, turns, count, 2, False, PERCENT), count, SECOND)
