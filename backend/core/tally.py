"""The tally: counts of events that no GPU reports.

These are moves, undone settings, losses of the GPU, time spent frozen, and periods of quotas. They are written down
with the totals (:mod:`backend.core.totals`), under names of their own, so they outlive a daemon and go with a process
to another GPU. Rare events are written at once. Freezes and thaws are written right after, some at a time, as a slice
may have thousands of members.
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

MIGRATED, UNDONE, LOST, SERVER_LOST = "migrated", "undone", "lost", "server_lost"
PERIODS = "nr_periods"
COUNTS = (MIGRATED, UNDONE, LOST, SERVER_LOST, FROZEN_USEC, PERIODS)
"""Names of the figures counted here. A process's go with it to another GPU."""


AT_ONCE = 64
"""Groups written down in one go: 2 ms, in which nothing else runs."""


class Memory(Protocol):
    """The store that a daemon leaves for the next one."""

    def kept(self) -> Mapping[tuple[int, Node], Mapping[str, int]]:
        """Return the figures by GPU and node, as the former daemon left them."""

    def keep(self, figures: Mapping[Group, Mapping[str, int]]) -> None:
        """Store the figures of groups; an empty mapping for a group that is gone."""


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
        """Called with a group and whether it is to be frozen, when that changes."""

    def counted(self, group: Group, name: str) -> int:
        """Return how often an event, by its name in COUNTS, was counted for a group."""
        return self._of(group).total.get(name, 0)

    def frozen_usec(self, group: Group) -> int:
        """Return the microseconds for which a group was to be frozen, by itself or by one above it."""
        return self._of(group).frozen_usec()

    def undone(self, path: Iterable[Group]) -> None:
        """Count that a process undid a setting; `path` has it and the slices above it."""
        self._count(path, UNDONE)

    def migrated(self, path: Iterable[Group], moves: int) -> None:
        """Count that a process came to another GPU, by its move number `moves`; `path` is the one there."""
        member, *slices = path
        self._of(member).total[MIGRATED] = moves
        self._keep([member])
        self._count(slices, MIGRATED)

    def lost(self, gpu: int, groups: Iterable[Group]) -> None:
        """Count that a GPU was lost while groups were on it: once, even where the former daemon noticed that, too."""
        root = SliceOn(ROOT, gpu)
        if not self._of(root).absent:
            self._of(root).absent = True
            self._count({root: None, **dict.fromkeys(groups)}, LOST)

    def server_lost(self, groups: Iterable[Group]) -> None:
        """Count that the server of a space ended; `groups` has its programs and the slices above them."""
        self._count(groups, SERVER_LOST)

    def periods(self, group: Group, count: int) -> None:
        """Count periods of a group's quota. They are written with other changes, as there are many."""
        total = self._of(group).total
        total[PERIODS] = min(MAX, total.get(PERIODS, 0) + count)
        self._changed[group] = None

    def back(self, gpu: int) -> None:
        """Note that a GPU is there again."""
        root = SliceOn(ROOT, gpu)
        if self._of(root).absent:
            self._of(root).absent = False
            self._keep([root])

    def ask(self, group: Group, frozen: bool) -> None:
        """Note whether a group is to be frozen from now on. Nothing happens where that is no change."""
        taken = self._of(group)
        if taken.begin() if frozen else taken.end():
            self._changed[group] = None
            self._asked.set()
            for listener in self.turned:
                listener(group, frozen)

    async def run(self) -> None:
        """Write down which groups are to be frozen and which no longer, until cancelled."""
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
        """Write down what changed since the last time, and which GPUs turned out to be there."""
        changed, self._changed = self._changed, {}
        self._keep(group for group in changed if self._population.holds(group))
        for index, gpu in self._gpus.items():
            if not gpu.lost:
                self.back(index)

    def hand_over(self) -> None:
        """Note that another daemon takes over at the end, so what is to be frozen stays so meanwhile."""
        self._handed_over = True

    def close(self) -> None:
        """Write down everything, as the daemon is about to end."""
        for record in self._population.records():
            if record.taken.end():
                self._changed[record.group] = None
                if self._handed_over:
                    record.taken.begin()
        self.write()

    # Helpers

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
