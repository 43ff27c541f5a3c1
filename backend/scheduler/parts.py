"""Work that is done in parts, between which the daemon does what else there is to do."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

import attrs
import trio

T = TypeVar("T")

Parts = Generator[None, None, T]
"""Work that others may come between the parts of."""

PART_S = 0.001
"""Work that takes longer rests after each such part of it: who waits for the daemon waits no longer than that."""
REST = 9
"""... so many times as long as it took: on a slow machine, too, it has a tenth of a CPU at most."""


@attrs.define
class Done(Generic[T]):
    """Goes through the parts, and then has what came of them."""

    parts: Parts[T]
    """The work."""
    result: T = attrs.field(init=False)
    """What came of it, at the end."""

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self.parts


class Pace:
    """Whether a part may end."""

    def __init__(self) -> None:
        self._began = trio.current_time()

    @property
    def busy(self) -> float:
        """Seconds of a CPU that the part took so far."""
        return trio.current_time() - self._began

    async def pause(self) -> None:
        """The part may end here."""
        if (busy := self.busy) >= PART_S:
            await trio.sleep(REST * busy)
            self._began = trio.current_time()

    async def end(self, parts: Parts[T]) -> T:
        """What comes of it."""
        done = Done(parts)
        for _ in done:
            await self.pause()
        return done.result
