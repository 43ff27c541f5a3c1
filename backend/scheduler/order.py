"""The order in which the programs of a GPU come to run: reclaim goes by it (:mod:`backend.core.nextuse`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from backend.core.nextuse import IDLE_S, NO_ORDER, Order
from backend.core.records import Place
from backend.process.identity import Process
from backend.scheduler.shares import Contender, Layer
from backend.scheduler.use import Use


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

    def order(self, contenders: Sequence[Contender], use: Use) -> Order:
        """Return what comes for these contenders. Of one layer the process that has waited longest is next; about,
        since one of more weight has its turns more often. Of one alone nothing is known: its use is not looked at."""
        if len(contenders) < 2:
            return NO_ORDER
        there = [one.process for one in contenders if one.process in self._since]
        there.sort(key=lambda process: (self._layers.get(process, 0), self._since[process]))
        return Order(there, leads(contenders), {one.process: _idle_s(one.process, use) for one in contenders})


def _idle_s(process: Process, use: Use) -> float:
    """Return the seconds after which reclaim takes a process for idle, as far as they have passed."""
    return next((seconds for seconds in IDLE_S.values() if not use.wants(process, round(seconds * 1e6))), 0.0)


def leads(contenders: Sequence[Contender]) -> frozenset[Process]:
    """Return the processes that go before another one by priority, at any level, whenever they have work."""
    worst: dict[tuple[Hashable, ...], int] = {}
    for one in contenders:
        above: tuple[Hashable, ...] = ()
        for level in one.path:
            worst[above] = max(worst.get(above, level.priority), level.priority)
            above = (*above, level.group)
    return frozenset(one.process for one in contenders if _is_leading(one, worst))


def _is_leading(one: Contender, worst: Mapping[tuple[Hashable, ...], int]) -> bool:
    above: tuple[Hashable, ...] = ()
    for level in one.path:
        if level.priority < worst[above]:
            return True
        above = (*above, level.group)
    return False
