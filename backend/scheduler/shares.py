"""Who is to have which part of a GPU: strict priorities and weights, level by level of the tree.

Siblings are compared with each other, as in a hierarchy of cgroups: those of the best priority share what their parent
has, by weight. So a slice has its part however many processes are in it, and a process however many contexts it has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

import attrs

from backend.identity import Process


@attrs.frozen
class Level:
    """A group on the path to a process."""

    group: Hashable
    """Which."""
    priority: int
    """compute.priority: 0 comes first."""
    weight: int
    """compute.weight."""


@attrs.frozen
class Contender:
    """A process that has a context on the GPU."""

    process: Process
    """Who."""
    path: tuple[Level, ...]
    """From the slice below the root down to the process itself."""
    active: bool = True
    """Whether it has wanted the GPU of late."""


def strata(contenders: Sequence[Contender]) -> Iterator[Mapping[Process, float]]:
    """The best first: those whose work goes before that of everybody in the next, each with the part of the GPU that it
    has while nobody of a better one wants it. The parts of those that are active add up to 1."""
    rest = list(contenders)
    while rest:
        best = _split(rest, 0, 1.0)
        yield best
        rest = [one for one in rest if one.process not in best]


def _split(contenders: Sequence[Contender], depth: int, part: float) -> dict[Process, float]:
    """The best of those that have the same path up to `depth`, with their parts of `part`."""
    siblings: dict[Hashable, list[Contender]] = {}
    for one in contenders:
        siblings.setdefault(one.path[depth].group, []).append(one)
    levels = {group: members[0].path[depth] for group, members in siblings.items()}
    first = min(level.priority for level in levels.values())
    chosen = {group: level.weight for group, level in levels.items() if level.priority == first}
    active = {group for group in chosen if any(one.active for one in siblings[group])}
    total = sum(chosen[group] for group in active)
    parts: dict[Process, float] = {}
    for group, weight in chosen.items():
        # Who does not want it has the part that he would have if he did: it is there when he comes.
        mine = part * weight / (total if group in active else total + weight)
        leaves = [one for one in siblings[group] if len(one.path) == depth + 1]
        if leaves:
            parts.update((one.process, mine) for one in leaves)
        else:
            parts.update(_split(siblings[group], depth + 1, mine))
    return parts
