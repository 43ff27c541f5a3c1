"""Long computations in parts, so that the daemon can do other work in between."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

import attrs
import trio

T = TypeVar("T")

Parts = Generator[None, None, T]
"""A computation that yields where it may be interrupted, and returns its result."""

PART_S = 0.001
"""Seconds of computation after which it pauses: no other task of the daemon waits longer."""
REST = 9
"""Length of a pause, as a multiple of the time computed before it: even on a slow machine a computation takes a
tenth of a CPU at most.
"""


@attrs.define
class Done(Generic[T]):
    """An iterator over the parts of a computation, which keeps the result."""

    parts: Parts[T]
    """The computation."""
    result: T = attrs.field(init=False)
    """What the computation returned; set when the iterator is exhausted."""

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self.parts


class Pace:
    """The pace of one computation: how long it ran since its last pause, and when it pauses again."""

    def __init__(self) -> None:
        self._began = trio.current_time()

    @property
    def busy(self) -> float:
        """Seconds since the last pause, all of them spent computing."""
        return trio.current_time() - self._began

    async def pause(self) -> None:
        """Pause here if the computation has run for PART_S; a point between two parts."""
        if (busy := self.busy) >= PART_S:
            await trio.sleep(REST * busy)
            self._began = trio.current_time()

    async def end(self, parts: Parts[T]) -> T:
        """Run a computation to its end, with pauses between its parts, and return its result."""
        done = Done(parts)
        for _ in done:
            await self.pause()
        return done.result
