"""Belady's algorithm, with the whole future known: the least number of chunks that any algorithm has to move.

The chunks that have to be on the GPU at each point of a timeline are a bundle. A chunk is fetched when a bundle has it,
and replaces the one whose next bundle is the farthest. For chunks of one size nothing moves less (the exchange argument
for pages also holds for bundles that fit).
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Sequence

import attrs

Chunk = Hashable


@attrs.frozen
class Moved:
    """Numbers of chunks that moved."""

    fetched: int
    """Chunks moved to the GPU."""
    evicted: int
    """Chunks moved to the host."""

    @property
    def both(self) -> int:
        """Chunks moved in either direction."""
        return self.fetched + self.evicted


def belady(room: int, resident: Collection[Chunk], bundles: Sequence[Collection[Chunk]]) -> Moved:
    """Return the moves with at most `room` chunks on the GPU, starting with `resident`, for the bundles in turn."""
    uses: dict[Chunk, list[int]] = {}
    for time, bundle in enumerate(bundles):
        assert len(bundle) <= room
        for chunk in bundle:
            uses.setdefault(chunk, []).append(time)

    def next_use(chunk: Chunk, time: int) -> int:
        times = uses.get(chunk, [])
        at = bisect.bisect_right(times, time)
        return times[at] if at < len(times) else len(bundles)

    there = set(resident)
    fetched = evicted = 0
    for time, bundle in enumerate(bundles):
        lacks = set(bundle) - there
        over = len(there) + len(lacks) - room
        if over > 0:
            others = sorted(there - set(bundle), key=lambda chunk: -next_use(chunk, time))
            there -= set(others[:over])
            evicted += over
        there |= lacks
        fetched += len(lacks)
    return Moved(fetched, evicted)
