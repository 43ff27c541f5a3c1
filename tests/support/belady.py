"""Belady's algorithm with the whole future known: the fewest chunks that have to move, of any that could.

What has to be on the GPU at each point of a timeline is a bundle of chunks. A chunk comes when a bundle has it, and the
one goes whose next bundle is the farthest. For chunks of one size nothing moves less (the exchange argument for pages
holds for bundles that fit).
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Sequence

import attrs

Chunk = Hashable


@attrs.frozen
class Moved:
    """Chunks that moved."""

    fetched: int
    """How many came to the GPU."""
    evicted: int
    """How many went to the host."""

    @property
    def both(self) -> int:
        """How many in all."""
        return self.fetched + self.evicted


def belady(room: int, resident: Collection[Chunk], bundles: Sequence[Collection[Chunk]]) -> Moved:
    """Return what moves where at most `room` chunks are on the GPU, these from the start, and each bundle in turn."""
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
