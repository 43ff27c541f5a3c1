"""The order in which the programs of a GPU come to run: reclaim goes by it (:mod:`backend.core.nextuse`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from backend.core.nextuse import IDLE_S, NO_ORDER, Order
from backend.core.records import Place
from backend.core.settings import PRIORITY
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
        idle_s = {one.process: _idle_s(one.process, use) for one in contenders}
        return Order(there, leads(contenders), behind(contenders), idle_s)


def _idle_s(process: Process, use: Use) -> float:
    """Return the seconds after which reclaim takes a process for idle, as far as they have passed."""
    return next((seconds for seconds in IDLE_S.values() if not use.wants(process, round(seconds * 1e6))), 0.0)


def leads(contenders: Sequence[Contender]) -> frozenset[Process]:
    """Return the processes that go before another one, at any level, by a better priority than the default."""
    return _of(contenders, max, lambda own, worst: own < min(worst, PRIORITY.default))


def behind(contenders: Sequence[Contender]) -> frozenset[Process]:
    """Return the processes that another one goes before, at any level, by a worse priority than the default."""
    return _of(contenders, min, lambda own, best: own > max(best, PRIORITY.default))


def _of(
    contenders: Sequence[Contender], choose: Callable[[int, int], int], holds: Callable[[int, int], bool]
) -> frozenset[Process]:
    """Return the processes for which it `holds`, at any level, of the priority there and the one chosen of all of the
    same parent."""
    chosen: dict[tuple[Hashable, ...], int] = {}
    for one in contenders:
        for above, priority in _levels(one):
            chosen[above] = choose(chosen.get(above, priority), priority)
    return frozenset(
        one.process for one in contenders if any(holds(priority, chosen[above]) for above, priority in _levels(one))
    )


def _levels(one: Contender) -> Iterator[tuple[tuple[Hashable, ...], int]]:
    """Yield the path above each level, and the priority there."""
    above: tuple[Hashable, ...] = ()
    for level in one.path:
        yield above, level.priority
        above = (*above, level.group)
