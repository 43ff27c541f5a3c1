"""Who is to have which part of a GPU: strict priorities and weights, level by level of the tree.

Siblings are compared with each other, as in a hierarchy of cgroups: those of the best priority share what their parent
has, by weight. So a slice has its part however many processes are in it, and a process however many contexts it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import attrs

from backend.core.settings import WEIGHT
from backend.process.identity import Process


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
    """A process that has a context on the GPU, and that nobody froze."""

    process: Process
    """Who."""
    path: tuple[Level, ...]
    """From the slice below the root down to the process itself."""
    explicit: bool = False
    """Whether compute.timeslice is set on its path: its timeslice is not the scheduler's."""
    active: bool = True
    """Whether it has wanted the GPU of late."""
    present: bool = True
    """Whether it has within a longer time: others of worse priority wait for it."""


Layer = Mapping[Process, float]
"""Those whose work goes before that of everybody in the next, each with its part of what they have together."""


def strata(contenders: Sequence[Contender]) -> Iterator[Layer]:
    """The layers, the best first. The parts of those in a layer that are active add up to 1. Who is not active has the
    part that he would have if he were: it is there when he comes. So does who is of a better priority and not present:
    in his stead the next priority of the same parent is in the layer."""
    rest = list(contenders)
    while rest:
        best = _leading(rest, 0)
        yield _parts(best, 0, 1.0)
        chosen = {one.process for one in best}
        rest = [one for one in rest if one.process not in chosen]


def _siblings(members: Sequence[Contender], depth: int) -> Mapping[Hashable, list[Contender]]:
    """The members of each group of a level."""
    groups: dict[Hashable, list[Contender]] = {}
    for one in members:
        groups.setdefault(one.path[depth].group, []).append(one)
    return groups


def _leading(members: Sequence[Contender], depth: int) -> list[Contender]:
    """Those of members of one parent that are in the best layer: of the best priority at each level."""
    present = [one for one in members if one.present] or members
    first = min(one.path[depth].priority for one in present)
    leading: list[Contender] = []
    for group in _siblings([one for one in members if one.path[depth].priority <= first], depth).values():
        leading += group if len(group[0].path) == depth + 1 else _leading(group, depth + 1)
    return leading


def _parts(members: Sequence[Contender], depth: int, part: float) -> dict[Process, float]:
    """The parts of `part` that the members of one parent have, by weight."""
    siblings = _siblings(members, depth)
    weights = {group: below[0].path[depth].weight for group, below in siblings.items()}
    active = {group for group, below in siblings.items() if any(one.active for one in below)}
    total = sum(weights[group] for group in active)
    parts: dict[Process, float] = {}
    for group, below in siblings.items():
        mine = part * weights[group] / (total if group in active else total + weights[group])
        if len(below[0].path) == depth + 1:
            parts[below[0].process] = mine
        else:
            parts.update(_parts(below, depth + 1, mine))
    return parts


def due(members: Sequence[Contender], most: Mapping[Process, float]) -> Mapping[Process, float]:
    """What each of a layer is to have of all that they use, where some use no more than `most`: what one of these
    leaves goes to its siblings, and to others only if they leave it as well."""
    return _due(members, 0, 1.0, most)


def tops(members: Sequence[Contender]) -> Collection[Sequence[Contender]]:
    """The members by who is below the same group in the root."""
    return _siblings(members, 0).values()


def measures(members: Sequence[Contender], parts: Layer) -> dict[Process, float]:
    """The parts of a layer by that which one of default weight below the root has of it, whoever else there is."""
    weights = sum(below[0].path[0].weight for below in tops(members))
    return {process: part * weights / WEIGHT.default for process, part in parts.items()}


def _due(members: Sequence[Contender], depth: int, part: float, most: Mapping[Process, float]) -> dict[Process, float]:
    siblings = _siblings(members, depth)
    wants = {group: sum(most.get(one.process, math.inf) for one in below) for group, below in siblings.items()}
    weights = {group: below[0].path[depth].weight for group, below in siblings.items()}
    given: dict[Hashable, float] = {}
    while weights:
        each = (part - sum(given.values())) / sum(weights.values())
        content = [group for group, weight in weights.items() if wants[group] <= each * weight]
        given |= {group: wants[group] for group in content} or {g: each * weight for g, weight in weights.items()}
        weights = {group: weight for group, weight in weights.items() if group not in given}
    parts: dict[Process, float] = {}
    for group, below in siblings.items():
        if len(below[0].path) == depth + 1:
            parts[below[0].process] = given[group]
        else:
            parts |= _due(below, depth + 1, given[group], most)
    return parts
