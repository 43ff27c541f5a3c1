"""The order in which the programs of a GPU will run, from which reclaim picks its victims
(:mod:`backend.core.nextuse`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from backend.core.nextuse import NO_ORDER, Order
from backend.core.records import Place
from backend.core.settings import PRIORITY
from backend.process.identity import Process
from backend.scheduler.shares import Contender, Layer

Above = tuple[Hashable, ...]
"""The groups above a level, the highest first. Levels with the same groups above them are siblings."""


class Waiting:
    """The processes that are off the runlist until their turns."""

    def __init__(self) -> None:
        self._now = 0
        self._since: dict[Process, int] = {}  # when each was taken off, microseconds of our own clock
        self._layers: Mapping[Process, int] = {}

    def observe(self, window_us: int, layers: Sequence[Layer], places: Mapping[Process, Place]) -> None:
        """Record `places`, in force from now on. `window_us` is the time since the last call, in microseconds;
        `layers` are the layers of fillers, the best first.
        """
        self._now += window_us
        self._layers = {process: number for number, layer in enumerate(layers) for process in layer}
        self._since = {process: self._since.get(process, self._now) for process, place in places.items() if place.off}

    def order(self, contenders: Sequence[Contender]) -> Order:
        """Return the order for these contenders. Within a layer the process that has waited longest comes next.
        This is an estimate, since a process of more weight has turns more often. A single contender waits for no
        other: NO_ORDER.
        """
        if len(contenders) < 2:
            return NO_ORDER
        there = [one.process for one in contenders if one.process in self._since]
        there.sort(key=lambda process: (self._layers.get(process, 0), self._since[process]))
        return Order(there, leads(contenders), behind(contenders))


def leads(contenders: Sequence[Contender]) -> frozenset[Process]:
    """Return the processes that go before a sibling, at any level, by a priority better than the default."""
    worst = {above: max(found) for above, found in _siblings(contenders).items()}
    return frozenset(
        one.process
        for one in contenders
        if any(priority < min(worst[above], PRIORITY.default) for above, priority in _levels(one))
    )


def behind(contenders: Sequence[Contender]) -> list[tuple[Collection[Process], Collection[Process]]]:
    """Return pairs of processes behind and processes ahead, one for each level and priority: those behind have a
    priority worse than the default there, and those ahead a better one than they.
    """
    found: list[tuple[Collection[Process], Collection[Process]]] = []
    for siblings in _siblings(contenders).values():
        ahead: list[Process] = []
        for priority in sorted(siblings):
            if ahead and priority > PRIORITY.default:
                found.append((siblings[priority], list(ahead)))
            ahead += siblings[priority]
    return found


def _siblings(contenders: Sequence[Contender]) -> Mapping[Above, Mapping[int, list[Process]]]:
    """Return, for the groups of each parent, the processes at or below each of their priorities."""
    found: dict[Above, dict[int, list[Process]]] = {}
    for one in contenders:
        for above, priority in _levels(one):
            found.setdefault(above, {}).setdefault(priority, []).append(one.process)
    return found


def _levels(one: Contender) -> Iterator[tuple[Above, int]]:
    """Yield each level of a contender's path: the groups above it, and its priority."""
    above: Above = ()
    for level in one.path:
        yield above, level.priority
        above = (*above, level.group)
