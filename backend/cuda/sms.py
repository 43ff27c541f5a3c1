"""Which groups of a GPU's SMs each program runs on: what the daemon hands out, as all libraries split the SMs alike.

A program keeps its place: its groups are one run of the ring of all groups, from the same first one as long as it has
a limit. So another limit adds groups at the end or takes them off there, and the library needs one green context for
each limit that the program ever had. The place is the one where others use the fewest groups. So programs of equal
limits share no SM while there are enough of them.
"""

from __future__ import annotations

import attrs

from backend.process.identity import Process


@attrs.frozen
class Shape:
    """The split of one GPU's SMs."""

    groups: int
    """Number of groups."""
    each: int
    """SMs in each of them."""
    sms: int
    """SMs of the GPU."""

    def count(self, sms: int) -> int:
        """Return the groups for so many SMs: whole ones, and one at least; 0 where that is the whole GPU."""
        if not sms or sms >= self.sms:
            return 0
        return min(self.groups, max(1, sms // self.each))


@attrs.frozen
class Held:
    """The groups of one program."""

    first: int
    """Number of the first one."""
    count: int
    """How many, behind one another; behind the last one is the first."""


class Groups:
    """The groups that the programs of one GPU have."""

    def __init__(self) -> None:
        self._held: dict[Process, Held] = {}

    def take(self, process: Process, count: int, of: int) -> int:
        """Give a program so many of the `of` groups there are, or take all away for 0. Return them as a mask."""
        if not count:
            self._held.pop(process, None)
            return 0
        held = self._held.get(process)
        first = self._place(process, count, of) if held is None else held.first
        self._held[process] = Held(first, count)
        return sum(1 << number for number in _numbers(first, count, of))

    def forget(self, process: Process) -> None:
        """Give up the groups of a program that is gone."""
        self._held.pop(process, None)

    def _place(self, process: Process, count: int, of: int) -> int:
        """Return the first group of the run in which others use the fewest."""
        used = [0] * of
        for other, held in self._held.items():
            if other != process:
                for number in _numbers(held.first, min(held.count, of), of):
                    used[number] += 1
        return min(range(of), key=lambda first: (sum(used[number] for number in _numbers(first, count, of)), first))


def _numbers(first: int, count: int, of: int) -> list[int]:
    return [(first + at) % of for at in range(count)]
