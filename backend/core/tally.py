"""The tally: what happened to groups and is counted here, and not by a GPU. Moves, what programs undid, losses of the
GPU, the time for which a group was to be frozen, and the periods of its quota.

It is written down with the totals (:mod:`backend.core.totals`), under names of its own, so it goes on over another
daemon, and with a process that goes to another GPU. What happens rarely is written at once; that a group is to be
frozen, and no longer, right after, some at a time, as a slice may have thousands of members.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import trio

from backend.core.member import FROZEN_USEC, Taken
from backend.core.population import Population
from backend.core.protocols import Gpu
from backend.core.records import MAX
from backend.process.identity import ROOT, Group, Node, SliceOn

MIGRATED, UNDONE, LOST = "migrated", "undone", "lost"
PERIODS = "nr_periods"
COUNTS = (MIGRATED, UNDONE, LOST, FROZEN_USEC, PERIODS)
"""Figures that are counted here. Of a process they go with it to another GPU."""


AT_ONCE = 64
"""Groups that are written down in one go: 2 ms, in which nothing else is done."""


class Memory(Protocol):
    """What a daemon leaves for the one after it."""

    def kept(self) -> Mapping[tuple[int, Node], Mapping[str, int]]:
        """Figures by GPU and node, as the daemon before us left them."""

    def keep(self, figures: Mapping[Group, Mapping[str, int]]) -> None:
        """From now on these are the figures of these groups; none, of one that is gone."""


class Tally:
    """See the module."""

    def __init__(self, gpus: Mapping[int, Gpu], population: Population, memory: Memory) -> None:
        self._gpus = gpus
        self._population = population
        self._memory = memory
        self._changed: dict[Group, None] = {}
        self._asked = trio.Event()
        self._handed_over = False
        self.turned: list[Callable[[Group, bool], None]] = []
        """Told of a group that is to be frozen from now on, or not any more."""

    def counted(self, group: Group, name: str) -> int:
        """Return how often something of COUNTS was counted of a group."""
        return self._of(group).total.get(name, 0)

    def frozen_usec(self, group: Group) -> int:
        """Return how long a group was to be frozen, by itself or by one above it, in microseconds."""
        return self._of(group).frozen_usec()

    def undone(self, path: Iterable[Group]) -> None:
        """Count that a process undid what was set; `path` has it and the slices above it."""
        self._count(path, UNDONE)

    def migrated(self, path: Iterable[Group], moves: int) -> None:
        """Count that a process came to another GPU, which is its move number `moves`; `path` is that of there."""
        member, *slices = path
        self._of(member).total[MIGRATED] = moves
        self._keep([member])
        self._count(slices, MIGRATED)

    def lost(self, gpu: int, groups: Iterable[Group]) -> None:
        """Count that a GPU was lost while groups were there: once, where the daemon before found that, too."""
        root = SliceOn(ROOT, gpu)
        if not self._of(root).absent:
            self._of(root).absent = True
            self._count({root: None, **dict.fromkeys(groups)}, LOST)

    def periods(self, group: Group, count: int) -> None:
        """Count periods of the quota of a group. They are written down with what else changes, as there are many."""
        total = self._of(group).total
        total[PERIODS] = min(MAX, total.get(PERIODS, 0) + count)
        self._changed[group] = None

    def back(self, gpu: int) -> None:
        """Note that a GPU is there."""
        root = SliceOn(ROOT, gpu)
        if self._of(root).absent:
            self._of(root).absent = False
            self._keep([root])

    def ask(self, group: Group, frozen: bool) -> None:
        """Note that a group is to be frozen from now on, or not any more; nothing where it was so before."""
        taken = self._of(group)
        if taken.begin() if frozen else taken.end():
            self._changed[group] = None
            self._asked.set()
            for listener in self.turned:
                listener(group, frozen)

    async def run(self) -> None:
        """Write down which groups are to be frozen from now on, or not any more, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            while self._changed:
                some = list(itertools.islice(self._changed, AT_ONCE))
                for group in some:
                    del self._changed[group]
                self._keep(some)
                await trio.lowlevel.checkpoint()

    def write(self) -> None:
        """Write down what changed since the last time, and which GPUs are there after all."""
        changed, self._changed = self._changed, {}
        self._keep(group for group in changed if self._population.holds(group))
        for index, gpu in self._gpus.items():
            if not gpu.lost:
                self.back(index)

    def hand_over(self) -> None:
        """Note that another daemon goes on at the end, and that what is to be frozen is so meanwhile."""
        self._handed_over = True

    def close(self) -> None:
        """Write down everything: the end is near."""
        for record in self._population.records():
            if record.taken.end():
                self._changed[record.group] = None
                if self._handed_over:
                    record.taken.begin()
        self.write()

    # The small parts

    def _of(self, group: Group) -> Taken:
        return self._population.record(group).taken

    def _count(self, groups: Iterable[Group], name: str) -> None:
        counted = list(groups)
        for group in counted:
            total = self._of(group).total
            total[name] = min(MAX, total.get(name, 0) + 1)
        self._keep(counted)

    def _keep(self, groups: Iterable[Group]) -> None:
        figures = {group: self._of(group).kept() for group in groups if self._population.holds(group)}
        if figures:
            self._memory.keep(figures)
