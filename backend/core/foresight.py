"""Foresight: looks at what processes do, and has the ledger know how soon each uses its memory again.

A program that waits for its turn is judged by the order of turns, all else by how long it ran nothing
(:mod:`backend.core.nextuse`). Nothing of it is kept for the next daemon: what was said holds for NEXT_USE_S, and that
one begins with what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import attrs
import trio

from backend.common.lasting import lasting
from backend.core.nextuse import NextUse, Order, Outlook, Sight
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.records import Activity
from backend.process.identity import ROOT, Member, Process, SliceOn

LOOK_S = 0.5
"""Seconds between two looks at the processes of a GPU: a turn takes as long."""
EACH_S = 0.01
"""Seconds between two looks for each process, at least, up to REST_MOST_S."""
PART_S, REST = 0.001, 99
"""Seconds of a look after which it rests, and how many times as long: on a slow machine, too, it has a hundredth of a
CPU. The end of a look rests as each part does: where one process takes PART_S there is no other to rest before."""
REST_MOST_S = 10.0
"""Seconds of rest after a look, or a part of one, at most: a daemon that was stopped meanwhile rested for minutes."""
AGAIN_S = 10.0
"""Seconds after which the ledger is told again what it was told last, where a look takes longer: it forgets after three
times as long."""


@attrs.define
class Told:
    """What the ledger of one GPU was told last."""

    ranks: Mapping[Process, int] = attrs.field(factory=dict)
    """The number of each process that was seen (:meth:`backend.core.nextuse.Outlook.rank`)."""
    at: float = 0.0
    """When, by trio's clock."""


class Foresight:
    """See the module."""

    def __init__(
        self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population, order: Callable[[int], Order]
    ) -> None:
        """`order` is what the scheduler of a GPU knows."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._order = order

    async def run(self) -> None:
        """Look, until cancelled."""
        async with trio.open_nursery() as nursery:
            for index in self._gpus:
                nursery.start_soon(lasting, f"the foresight of GPU {index}", partial(self._watch, index))

    async def _watch(self, index: int) -> None:
        outlook, told, busy = Outlook(), Told(), 0.0
        while True:
            each = min(REST_MOST_S, EACH_S * self._population.sharers(SliceOn(ROOT, index)))
            await trio.sleep(max(LOOK_S, each, min(REST_MOST_S, REST * busy)))
            busy, sights = 0.0, dict[Process, Sight]()
            if not self._gpus[index].lost:
                began = await self._see(index, sights, outlook, told)
                now = trio.current_time()  # a look takes its time: what was seen at its begin is taken for as late
                outlook.see(now, sights)
                order = self._order(index)
                classes = outlook.judge(now, order)
                self._tell(index, told, classes, outlook.rank(classes, order))
                busy = trio.current_time() - began
            else:
                self._tell(index, told, {}, {})

    async def _see(self, index: int, sights: dict[Process, Sight], outlook: Outlook, told: Told) -> float:
        """Note what is seen of the processes with a context on a GPU, and return when the last part of that began. What
        is at work again is told at each rest: the look may take many seconds, and what is far gives first."""
        began, woken = trio.current_time(), list[Process]()
        for resident in list(self._population.below(SliceOn(ROOT, index))):
            if trio.current_time() - began >= PART_S:
                self._tell_woken(index, told, woken)
                woken.clear()
                await trio.sleep(min(REST_MOST_S, REST * (trio.current_time() - began)))
                self._tell_again(index, told)
                began = trio.current_time()
            process, group = resident.process, Member(resident.process, index)
            if index not in resident.contexts or not self._population.holds(group):
                continue
            try:
                books = self._ledger.books(group)
            except OSError:
                continue  # the kernel has seen it die, and its exit is still to be told
            activity = self._gpus[index].activity(process)
            # What waits at the gate of turns to be launched is counted by none.
            has_work = activity.pending != 0 or self._population.record(group).compute.turn_end is not None
            can_give = self._gpus[index].footprint(process).movable > 0
            sights[process] = Sight(books.current + books.swap, _done(activity), has_work, can_give)
            if outlook.is_at_work(process, sights[process]):
                woken.append(process)
        return began

    def _tell(self, index: int, told: Told, classes: Mapping[Process, NextUse], ranks: Mapping[Process, int]) -> None:
        """Have the ledger know, all at once: what is far each time, as it holds for a while only, and what is near as
        it comes to be."""
        news = {process: rank for process, rank in ranks.items() if rank or told.ranks.get(process) != rank}
        self._set(index, news)
        for process in {*told.ranks, *classes}:
            group = Member(process, index)
            if self._population.holds(group):
                self._population.record(group).memory.next_use = classes.get(process)
        told.ranks, told.at = ranks, trio.current_time()

    def _tell_woken(self, index: int, told: Told, woken: Iterable[Process]) -> None:
        """Have the ledger know at once of processes that were far and are at work; but not of those that are as far as
        others that they are behind."""
        far = [one for one in woken if told.ranks.get(one)]
        if not far:  # as a rule; and the order of many takes longer than the part of the look
            return
        behind = {process for those, _ in self._order(index).behind for process in those}
        news = dict.fromkeys((one for one in far if one not in behind), int(NextUse.SOON))
        self._set(index, news)
        told.ranks = {**told.ranks, **news}

    def _tell_again(self, index: int, told: Told) -> None:
        """Have the ledger know what is far still, as far as is known before a long look has ended."""
        if trio.current_time() - told.at >= AGAIN_S:
            self._set(index, {process: rank for process, rank in told.ranks.items() if rank})
            told.at = trio.current_time()

    def _set(self, index: int, ranks: Mapping[Process, int]) -> None:
        groups = {Member(process, index): rank for process, rank in ranks.items()}
        if held := {group: rank for group, rank in groups.items() if self._population.holds(group)}:
            self._ledger.set_next_use(index, held)


def _done(activity: Activity) -> tuple[int | None, ...] | None:
    """Return what a program has done. Its own count of kernels has the shortest of them, and the engine's time the
    longest: that is looked at now and then, and sampled where the program does not count."""
    figures = activity.submitted, activity.finished, activity.busy_usec
    return figures if any(one is not None for one in figures) else None
