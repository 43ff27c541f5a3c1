"""Spaces: which of many sets is the first that something fits into, without a look at each. Pure.

Programs that use much of the room make a set each, and there may be a thousand of them. So what is left in the sets
stands in trees: each node has the most that is left in any set below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NONE = -1 << 62
"""What is left where nothing fits, not even what uses nothing there, bytes."""


class Spaces:
    """What is left in the sets, on each GPU."""

    def __init__(self, rooms: Mapping[int, int], part: int, count: int) -> None:
        """What uses a GPU with others has 1/`part` of its room with them, and alone all of it. There are `count` sets
        at most, and none yet."""
        self._rooms, self._part = rooms, part
        self._leaves = 1 << max(0, count - 1).bit_length()
        self._used: dict[tuple[int, int], list[int]] = {}  # by set and GPU, where that is used
        # For what uses a GPU, and for what does not; the children of a node are at twice its place.
        self._left = {gpu: ([NONE] * (2 * self._leaves), [NONE] * (2 * self._leaves)) for gpu in rooms}

    def put(self, at: int, used: Sequence[Mapping[int, int]]) -> None:
        """Put working sets into a set, whether they fit or not."""
        for gpu, room in self._rooms.items():
            there = self._used.setdefault((at, gpu), [])
            there += [one[gpu] for one in used if one.get(gpu)]
            total = sum(there)
            fits = total <= room and (len(there) < 2 or self._part * total <= room)
            for tree, left in zip(
                self._left[gpu],
                (room // self._part - total if there else room, 0 if fits else NONE),
                strict=True,
            ):
                _set(tree, self._leaves + at, left)

    def first(self, used: Mapping[int, int]) -> int | None:
        """Return the first set that a working set fits into; None where it fits into none."""
        wanted = [(self._left[gpu][0 if used.get(gpu) else 1], used.get(gpu, 0)) for gpu in self._rooms]
        nodes = [1]
        while nodes:
            node = nodes.pop()
            if all(tree[node] >= nbytes for tree, nbytes in wanted):
                if node >= self._leaves:
                    return node - self._leaves
                nodes += [2 * node + 1, 2 * node]
        return None


def _set(tree: list[int], node: int, left: int) -> None:
    """Set what is left at a leaf, and at all nodes above it."""
    tree[node] = left
    while node > 1:
        node //= 2
        most = max(tree[2 * node], tree[2 * node + 1])
        if tree[node] == most:
            return
        tree[node] = most
