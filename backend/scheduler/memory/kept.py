"""What low keeps on the GPU of programs that have turns: of each process below a level, as reclaim there would.

What a program uses in its turns counts as what it has, also while it is in the host: its protection is not less for
what others took before.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from backend.core.population import Population
from backend.core.protection import effective_lows
from backend.core.protocols import Ledger
from backend.process.identity import Group, Member, Process, SliceOn


@attrs.define(eq=False)
class _Node:
    """A group below the level."""

    low: int = 0
    """Its low, bytes."""
    current: int = 0
    """Bytes that it has, or uses."""
    children: dict[Group, _Node] = attrs.field(factory=dict)
    """The groups in it that have a process."""

    @property
    def figures(self) -> _Node:
        """Its figures."""
        return self


def kept(level: SliceOn, used: Mapping[Process, int], ledger: Ledger, population: Population) -> Mapping[Process, int]:
    """Return the bytes that low protects of each process below a level; none at all where no group there has a low.
    `used` are the bytes that programs use in their turns. OSError where a group is gone."""
    nodes: dict[Group, _Node] = {level: _Node()}
    for resident in list(population.below(level)):
        member = Member(resident.process, level.gpu)
        nbytes = max(ledger.books(member).current, used.get(resident.process, 0))
        below: tuple[Group, _Node] | None = None
        for group in population.path(member):
            if group not in nodes:
                nodes[group] = _Node(ledger.books(group).low)
            node = nodes[group]
            node.current += nbytes
            if below is not None:
                node.children[below[0]] = below[1]
            if group == level:
                break
            below = group, node
    if not any(node.low for node in nodes.values()):
        return {}
    lows = effective_lows(nodes[level])
    return {group.process: lows.get(node, 0) for group, node in nodes.items() if isinstance(group, Member)}
