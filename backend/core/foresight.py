"""Foresight: looks at what processes do, and has the ledger know how soon each uses its memory again.

A program that waits for its turn is judged by the order of turns, all else by how long it ran nothing
(:mod:`backend.core.nextuse`). Nothing of it is kept for the next daemon: what was said holds for NEXT_USE_S, and that
one begins with what it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

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
"""Seconds between two looks for each process, at least: a thousand of them are looked at every ten seconds, long before
what was said last is unknown."""
PART_S, REST = 0.001, 99
"""Seconds of a look after which it rests, and how many times as long: on a slow machine, too, it has a hundredth of a
CPU. The end of a look rests as each part does: where one process takes PART_S there is no other to rest before."""
REST_MOST_S = 10.0
"""Seconds of rest after a look at most: what was said last is unknown after three times as long."""


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
        outlook, busy = Outlook(), 0.0
        while True:
            each = EACH_S * self._population.sharers(SliceOn(ROOT, index))
            await trio.sleep(max(LOOK_S, each, min(REST_MOST_S, REST * busy)))
            busy = 0.0
            if self._population.sharers(SliceOn(ROOT, index)) and not self._gpus[index].lost:
                sights, began = await self._sights(index)
                now = trio.current_time()  # a look takes its time: what was seen at its begin is taken for as late
                outlook.see(now, sights)
                self._tell(index, outlook.judge(now, self._order(index)))
                busy = trio.current_time() - began

    async def _sights(self, index: int) -> tuple[Mapping[Process, Sight], float]:
        """Return what is seen of the processes with a context on a GPU, and when the last part of that began."""
        found: dict[Process, Sight] = {}
        began = trio.current_time()
        for resident in list(self._population.below(SliceOn(ROOT, index))):
            if (busy := trio.current_time() - began) >= PART_S:
                await trio.sleep(REST * busy)
                began = trio.current_time()
            process, group = resident.process, Member(resident.process, index)
            if index not in resident.contexts or not self._population.holds(group):
                continue
            try:
                books = self._ledger.books(group)
            except OSError:
                continue  # the kernel has seen it die, and its exit is still to be told
            activity = self._gpus[index].activity(process)
            found[process] = Sight(books.current + books.swap, _done(activity), activity.pending != 0)
        return found, began

    def _tell(self, index: int, classes: Mapping[Process, NextUse]) -> None:
        """Have the ledger know, all at once: what is far each time, as it holds for a while only, and what is near as
        it comes to be."""
        told: dict[Member, int] = {}
        for process, next_use in classes.items():
            group = Member(process, index)
            if not self._population.holds(group):
                continue
            memory = self._population.record(group).memory
            if next_use or memory.next_use is not next_use:
                told[group] = int(next_use)
            memory.next_use = next_use
        if told:
            self._ledger.set_next_use(index, told)


def _done(activity: Activity) -> tuple[int | None, ...] | None:
    """Return what a program has done. Its own count of kernels has the shortest of them, and the engine's time the
    longest: that is looked at now and then, and sampled where the program does not count."""
    figures = activity.submitted, activity.finished, activity.busy_usec
    return figures if any(one is not None for one in figures) else None
