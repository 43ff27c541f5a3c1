"""Protection: what ``gmem.limit.low`` keeps on the GPU, of each group below one whose memory is short. Pure.

The rules are those of the memory cgroup: a group's own low does not protect it against its own limit; below the group
that is short, low protects as ``effective_protection()`` in mm/memcontrol.c computes it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol, TypeVar


class Amounts(Protocol):
    """What a group holds, and what its low is, bytes."""

    @property
    def current(self) -> int: ...

    @property
    def low(self) -> int: ...


class Node(Hashable, Protocol):
    """A group in its tree."""

    @property
    def figures(self) -> Amounts: ...

    @property
    def children(self) -> Mapping[Any, Any]: ...


N = TypeVar("N", bound=Node)


def effective_lows(top: N) -> dict[N, int]:
    """Return the part of each group's memory, in bytes, that what is done below `top` must leave alone while others
    there can give. Groups with no such part may be left out.

    mm/page_counter.c, effective_protection() with memory_recursiveprot (systemd mounts cgroup2 with it): children share
    what their parent has protected, in proportion when they ask for more; what none of them asks for goes to all, in
    proportion to their other memory. So a low on a slice protects the processes in it.
    """
    lows: dict[N, int] = {}
    pending = [top]
    while pending:
        parent = pending.pop()
        children = parent.children.values()
        pending.extend(children)
        asked = sum([min(child.figures.current, low) for child in children if (low := child.figures.low)])
        ceiling = lows.get(parent, 0)
        if not asked and not ceiling:
            continue  # the common case
        for child in children:
            held = child.figures.current
            protected = min(held, child.figures.low)
            if parent is not top:  # children of the one being reclaimed have their low in full
                if asked > ceiling:
                    protected = protected * ceiling // asked
                elif held > protected and parent.figures.current > asked:
                    protected += (ceiling - asked) * (held - protected) // (parent.figures.current - asked)
            lows[child] = protected
    return lows
