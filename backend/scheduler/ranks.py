"""The processes that each process goes behind by priority, for the busy periods of those ahead
(:mod:`backend.cuda.periods`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from backend.process.identity import Process
from backend.scheduler.shares import Contender

RANKED_MOST = 64
"""Processes that one process goes behind, at most: of a thousand ahead, only those of the best priority
are passed on.
"""


def behind(contenders: Sequence[Contender]) -> Mapping[Process, Sequence[Process]]:
    """Return, for each process, the processes that it goes behind: those that have a better priority at some
    level, themselves or by a slice above them. A process that goes behind none is left out.
    """
    found: dict[Process, Sequence[Process]] = {}
    _descend(contenders, 0, (), found)
    return found


def _descend(
    members: Sequence[Contender], depth: int, ahead: tuple[Process, ...], found: dict[Process, Sequence[Process]]
) -> None:
    """Enter into `found` the members of one parent, all of which go behind the processes of `ahead`."""
    levels: dict[int, dict[Hashable, list[Contender]]] = {}
    for one in members:
        levels.setdefault(one.path[depth].priority, {}).setdefault(one.path[depth].group, []).append(one)
    for priority in sorted(levels):
        for group in levels[priority].values():
            if len(group[0].path) > depth + 1:
                _descend(group, depth + 1, ahead, found)
            elif ahead:
                found[group[0].process] = ahead
        if len(ahead) < RANKED_MOST:
            better = (one.process for group in levels[priority].values() for one in group)
            ahead = (*ahead, *better)[:RANKED_MOST]
