"""Foresight: looks at what processes do, and tells the ledger how soon each will use its memory again.

A program that waits for its turn is judged by the order of turns, any other by how long it has run nothing
(:mod:`backend.core.nextuse`). Nothing is kept for the next daemon: the ledger forgets after NEXT_USE_S, and the next
daemon starts from what it sees.
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
"""Seconds between two looks at the processes of a GPU: about as long as a turn."""
EACH_S = 0.01
"""Seconds between two looks, for each process on the GPU, at least; REST_MOST_S in all at most."""
PART_S, REST = 0.001, 99
"""Seconds of work after which a look rests, and the length of that rest in multiples of the work: so a look takes at
most a hundredth of a CPU, on a slow machine too. The end of a look rests like each part: where one process takes PART_S
there is no other to rest before."""
REST_MOST_S = 10.0
"""Longest rest after a look or a part of one, in seconds: without a bound, a daemon that was stopped meanwhile would
rest for minutes."""
AGAIN_S = 10.0
"""Seconds after which the ledger is told again during a look that takes longer; it forgets after three times as
long."""


@attrs.define
class Told:
    """The state that the ledger of one GPU was last told."""

    ranks: Mapping[Process, int] = attrs.field(factory=dict)
    """The rank of each process that was seen (:meth:`backend.core.nextuse.Outlook.rank`)."""
    at: float = 0.0
    """Time when it was told, in seconds of trio's clock."""


class Foresight:
    """See the module."""

    def __init__(
        self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population, order: Callable[[int], Order]
    ) -> None:
        """`order` returns what the scheduler of a GPU knows of its turns."""
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._order = order

    async def run(self) -> None:
        """Look at all GPUs, until cancelled."""
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
                now = trio.current_time()  # a look takes time: a sighting at its start counts as made at its end
                outlook.see(now, sights)
                order = self._order(index)
                classes = outlook.judge(now, order)
                self._tell(index, told, classes, outlook.rank(classes, order))
                busy = trio.current_time() - began
            else:
                self._tell(index, told, {}, {})

    async def _see(self, index: int, sights: dict[Process, Sight], outlook: Outlook, told: Told) -> float:
        """Note what is seen of the processes with a context on a GPU, and return when the last part of that began.

        A process that is back at work is reported at each rest: the whole look may take many seconds, and reclaim takes
        from the farthest first.
        """
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
                continue  # the kernel has seen it die, and its exit is not reported yet
            activity = self._gpus[index].activity(process)
            # Launches that wait at the gate of turns appear in no count.
            has_work = activity.pending != 0 or self._population.record(group).compute.turn_end is not None
            can_give = self._gpus[index].footprint(process).movable > 0
            sights[process] = Sight(books.current + books.swap, _done(activity), has_work, can_give)
            if outlook.is_at_work(process, sights[process]):
                woken.append(process)
        return began

    def _tell(self, index: int, told: Told, classes: Mapping[Process, NextUse], ranks: Mapping[Process, int]) -> None:
        """Tell the ledger everything at once: far classes each time, since they expire, near ones when they change."""
        news = {process: rank for process, rank in ranks.items() if rank or told.ranks.get(process) != rank}
        self._set(index, news)
        for process in {*told.ranks, *classes}:
            group = Member(process, index)
            if self._population.holds(group):
                self._population.record(group).memory.next_use = classes.get(process)
        told.ranks, told.at = ranks, trio.current_time()

    def _tell_woken(self, index: int, told: Told, woken: Iterable[Process]) -> None:
        """Tell the ledger at once of far processes that are back at work, unless the order puts them behind other
        processes: then they stay as far as those."""
        far = [one for one in woken if told.ranks.get(one)]
        if not far:  # the common case; computing the order of many takes longer than a part of the look
            return
        behind = {process for those, _ in self._order(index).behind for process in those}
        news = dict.fromkeys((one for one in far if one not in behind), int(NextUse.SOON))
        self._set(index, news)
        told.ranks = {**told.ranks, **news}

    def _tell_again(self, index: int, told: Told) -> None:
        """Repeat to the ledger which processes are far, as last known, while a long look has not ended."""
        if trio.current_time() - told.at >= AGAIN_S:
            self._set(index, {process: rank for process, rank in told.ranks.items() if rank})
            told.at = trio.current_time()

    def _set(self, index: int, ranks: Mapping[Process, int]) -> None:
        groups = {Member(process, index): rank for process, rank in ranks.items()}
        if held := {group: rank for group, rank in groups.items() if self._population.holds(group)}:
            self._ledger.set_next_use(index, held)


def _done(activity: Activity) -> tuple[int | None, ...] | None:
    """Return what a program has done; None where nothing is known. Its own count of kernels shows the shortest of them,
    the engine's time the longest: that is polled, and sampled where the program does not count."""
    figures = activity.submitted, activity.finished, activity.busy_usec
    return figures if any(one is not None for one in figures) else None
