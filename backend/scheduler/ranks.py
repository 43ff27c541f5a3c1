"""Which programs go behind which, for the busy periods of those that go before (:mod:`backend.cuda.managed`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from backend.process.identity import Process
from backend.scheduler.shares import Contender

RANKED_MOST = 64
"""Processes that one goes behind, at most: those of the best priority of a thousand are told of."""


def behind(contenders: Sequence[Contender]) -> Mapping[Process, Sequence[Process]]:
    """Return the processes that each process goes behind, by a better priority of theirs, or of a slice above them,
    than its own has at that level; processes that go behind none are left out."""
    found: dict[Process, Sequence[Process]] = {}
    _descend(contenders, 0, (), found)
    return found


def _descend(
    members: Sequence[Contender], depth: int, ahead: tuple[Process, ...], found: dict[Process, Sequence[Process]]
) -> None:
    """Find those of members of one parent, which all go behind those `ahead`."""
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
