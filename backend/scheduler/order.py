"""The order in which the programs of a GPU come to run: reclaim goes by it (:mod:`backend.core.nextuse`)."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

from backend.core.nextuse import NO_ORDER, Order
from backend.core.records import Place
from backend.core.settings import PRIORITY
from backend.process.identity import Process
from backend.scheduler.shares import Contender, Layer

Above = tuple[Hashable, ...]
"""Groups above a level, the highest first: those with the same are siblings there."""


class Waiting:
    """The processes that are off the runlist until their turns."""

    def __init__(self) -> None:
        self._now = 0
        self._since: dict[Process, int] = {}  # when each was taken off, microseconds of our own clock
        self._layers: Mapping[Process, int] = {}

    def observe(self, window_us: int, layers: Sequence[Layer], places: Mapping[Process, Place]) -> None:
        """Note the places from now on, so many microseconds after the last ones, and the layers of those that fill what
        is left, the best first."""
        self._now += window_us
        self._layers = {process: number for number, layer in enumerate(layers) for process in layer}
        self._since = {process: self._since.get(process, self._now) for process, place in places.items() if place.off}

    def order(self, contenders: Sequence[Contender]) -> Order:
        """Return what comes for these contenders. Of one layer the process that has waited longest is next; about,
        since one of more weight has its turns more often. One alone waits for no other."""
        if len(contenders) < 2:
            return NO_ORDER
        there = [one.process for one in contenders if one.process in self._since]
        there.sort(key=lambda process: (self._layers.get(process, 0), self._since[process]))
        return Order(there, leads(contenders), behind(contenders))


def leads(contenders: Sequence[Contender]) -> frozenset[Process]:
    """Return the processes that go before another one, at any level, by a better priority than the default."""
    worst = {above: max(found) for above, found in _siblings(contenders).items()}
    return frozenset(
        one.process
        for one in contenders
        if any(priority < min(worst[above], PRIORITY.default) for above, priority in _levels(one))
    )


def behind(contenders: Sequence[Contender]) -> list[tuple[Collection[Process], Collection[Process]]]:
    """Return processes that others go before by a worse priority than the default, and those others; for each level and
    priority at which that is so."""
    found: list[tuple[Collection[Process], Collection[Process]]] = []
    for siblings in _siblings(contenders).values():
        ahead: list[Process] = []
        for priority in sorted(siblings):
            if ahead and priority > PRIORITY.default:
                found.append((siblings[priority], list(ahead)))
            ahead += siblings[priority]
    return found


def _siblings(contenders: Sequence[Contender]) -> Mapping[Above, Mapping[int, list[Process]]]:
    """Return the processes at or below each priority that there is, for the groups with the same parent."""
    found: dict[Above, dict[int, list[Process]]] = {}
    for one in contenders:
        for above, priority in _levels(one):
            found.setdefault(above, {}).setdefault(priority, []).append(one.process)
    return found


def _levels(one: Contender) -> Iterator[tuple[Above, int]]:
    """Yield the path above each level, and the priority there."""
    above: Above = ()
    for level in one.path:
        yield above, level.priority
        above = (*above, level.group)
