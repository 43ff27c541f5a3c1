"""Shares of a GPU: strict priorities and weights, level by level of the tree.

As in a hierarchy of cgroups, siblings compete only with each other: those of the best priority divide their parent's
share by weight. So a slice has its share however many processes are in it, and a process has its share however many
contexts it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import attrs

from backend.core.settings import WEIGHT
from backend.process.identity import Process


@attrs.frozen
class Level:
    """A group on the path from the root to a process."""

    group: Hashable
    """The slice, or the process itself."""
    priority: int
    """The group's `compute.priority`; 0 comes first."""
    weight: int
    """The group's `compute.weight`."""


@attrs.frozen
class Contender:
    """A process that has a context on the GPU and is not frozen."""

    process: Process
    """The process."""
    path: tuple[Level, ...]
    """The levels from the slice below the root down to the process itself."""
    explicit: bool = False
    """Whether compute.timeslice is set on the path, so that the timeslice is not the scheduler's."""
    active: bool = True
    """Whether the process has wanted the GPU recently."""
    present: bool = True
    """Whether the process has wanted the GPU within a longer time; while it has, worse priorities wait for it."""


Layer = Mapping[Process, float]
"""Shares of the processes of one layer, as fractions of the layer's time. Its work goes before that of
the next layer.
"""


def strata(contenders: Sequence[Contender]) -> Iterator[Layer]:
    """Yield the layers, the best priority first; the shares of the active members of a layer add up to 1.

    An inactive member keeps the share that it would have if it were active, so that it can start at once. Where no
    process of the best priority is present, the next priority of the same parent joins the layer.
    """
    rest = list(contenders)
    while rest:
        best = _leading(rest, 0)
        yield _parts(best, 0, 1.0)
        chosen = {one.process for one in best}
        rest = [one for one in rest if one.process not in chosen]


def _siblings(members: Sequence[Contender], depth: int) -> Mapping[Hashable, list[Contender]]:
    """Return the members of each group at a level."""
    groups: dict[Hashable, list[Contender]] = {}
    for one in members:
        groups.setdefault(one.path[depth].group, []).append(one)
    return groups


def _leading(members: Sequence[Contender], depth: int) -> list[Contender]:
    """Return those members of one parent that belong to the best layer: at each level, those of the best priority."""
    present = [one for one in members if one.present] or members
    first = min(one.path[depth].priority for one in present)
    leading: list[Contender] = []
    for group in _siblings([one for one in members if one.path[depth].priority <= first], depth).values():
        leading += group if len(group[0].path) == depth + 1 else _leading(group, depth + 1)
    return leading


def _parts(members: Sequence[Contender], depth: int, part: float) -> dict[Process, float]:
    """Divide `part` among the members of one parent by weight."""
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
    """Return the share of each member in all that the layer uses, where some members use no more than `most` says.
    Time that such a member leaves goes to its siblings first, and to others only if the siblings leave it, too.
    """
    return _due(members, 0, 1.0, most)


def tops(members: Sequence[Contender]) -> Collection[Sequence[Contender]]:
    """Return the members, grouped by the group directly below the root."""
    return _siblings(members, 0).values()


def measures(members: Sequence[Contender], parts: Layer) -> dict[Process, float]:
    """Return the shares of a layer in units of the share that a process of default weight directly below the root
    has in it, whatever else is in the layer.
    """
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
