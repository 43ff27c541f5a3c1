"""Gangs: programs that are on and off together, and have their turns together. Pure.

Programs that share GPU memory wait for each other's kernels, and so do the kernels of one program on several GPUs: a
collective with one half held at a gate spins for ever, and what one of them drains waits for the other. So a gang is
what hangs together by memory, over all GPUs. Until it is known of a program whether it does, it takes no turns, and no
other of its gang: that is each that shares memory with a process of which is not known which.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import attrs

from backend.core.workingset import ANY
from backend.scheduler.memory.claims import Name


@attrs.frozen
class Ties:
    """What ties a program to others, and to GPUs."""

    gpus: frozenset[int] = frozenset()
    """GPUs that it has a context on."""
    shared: frozenset[Hashable] = frozenset()
    """Names of memory that it shares, the same in all that share it; ANY where that may be with each that does."""
    is_known: bool = False
    """Whether that is all: its library says what it exports and imports."""


@attrs.frozen
class Gang:
    """Programs that are on and off together: one by itself, as a rule."""

    members: frozenset[Name]
    """Which."""
    gpus: frozenset[int]
    """GPUs that any of them has a context on: on all of them they are on together."""
    takes_turns: bool
    """Whether all is known of all of them."""

    @property
    def is_wide(self) -> bool:
        """Whether its kernels may wait for one another: on several GPUs, or of several programs."""
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
