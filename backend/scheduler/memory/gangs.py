"""Gangs: programs that are on and off together, and have their turns together. Pure.

Programs that share GPU memory wait for each other's kernels, and so do the kernels of one program on several GPUs. A
collective with one half held at a gate spins for ever, and the work that one program drains waits for the other. So a
gang is all programs that are connected by shared memory, over all GPUs.

A program takes no turns until its library has told what it shares, and neither does its gang: until then each program
that shares memory may be in it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs

from backend.core.workingset import ANY
from backend.scheduler.memory.claims import Name


@attrs.frozen
class Ties:
    """What ties a program to other programs and to GPUs."""

    gpus: frozenset[int] = frozenset()
    """GPUs on which it has a context."""
    shared: frozenset[Hashable] = frozenset()
    """Names of the memory that it shares, the same in all programs that share it; ANY if its peers are unknown, so that
    each program that shares memory may be one.
    """
    is_known: bool = False
    """Whether these ties are complete: its library tells what it exports and imports."""


@attrs.frozen
class Gang:
    """Programs that are on and off together; usually a single one."""

    members: frozenset[Name]
    """The programs."""
    gpus: frozenset[int]
    """GPUs on which any of them has a context. They are on together on all of these."""
    takes_turns: bool
    """Whether the ties of all members are known."""

    @property
    def is_wide(self) -> bool:
        """Whether its kernels may wait for one another: it has several GPUs, or several programs."""
        return len(self.members) > 1 or len(self.gpus) > 1


def gangs(ties: Mapping[Name, Ties]) -> Sequence[Gang]:
    """Return the gangs of all programs, in the order of their first members."""
    leader: dict[Name, Name] = {name: name for name in ties}

    def find(name: Name) -> Name:
        while leader[name] != name:
            leader[name] = leader[leader[name]]
            name = leader[name]
        return name

    first: dict[Hashable, Name] = {}
    sharers = [name for name, tie in ties.items() if tie.shared]
    is_any = any(ANY in ties[name].shared for name in sharers)
    for name in sharers:
        for memory in (ANY,) if is_any else ties[name].shared:
            leader[find(name)] = find(first.setdefault(memory, name))
    found: dict[Name, list[Name]] = {}
    for name in ties:
        found.setdefault(find(name), []).append(name)
    return [
        Gang(
            frozenset(members),
            frozenset(gpu for name in members for gpu in ties[name].gpus),
            all(ties[name].is_known for name in members),
        )
        for members in found.values()
    ]
