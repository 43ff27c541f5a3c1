"""Brings groups back under their high: decides with the ledger, moves with the GPU, tells the programs first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import trio

from backend.identity import Group, Process, Slice
from backend.population import Population
from backend.protocols import Gpu, Ledger


class Reclaimer:
    """Moves memory between a GPU and the host as the limits demand."""

    def __init__(self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        # Two reclaims of one group at once would each take the whole excess.
        self._locks: defaultdict[Group, trio.Lock] = defaultdict(trio.Lock)

    async def settle_path(self, group: Group) -> None:
        """Brings a group and every one above it back under its high, the lowest first."""
        for level in self._population.path(group):
            if self._ledger.excess(level):
                await self.settle(level)

    async def settle(self, level: Group) -> None:
        """Moves memory of a group out until it is under its high, or nothing more can be moved."""
        async with self._locks[level]:
            excess = self._ledger.excess(level)
            if not excess:
                return
            self._ledger.note(level, "high")
            if isinstance(level.node, Slice):
                self._ledger.press(level, excess)
            while excess and await self.take(level, excess):
                excess = self._ledger.excess(level)
            if excess:
                self._ledger.note(level, "fail")

    async def take(self, top: Group, nbytes: int) -> int:
        """Moves `nbytes` from the processes at or below `top` to the host; returns how much was moved.

        Each is told through its usermemfd, and not waited for: a program cannot stall its neighbours (Ghost, 4.2).
        """
        moved = 0
        for target in self._ledger.plan(top, nbytes):
            process = target.group.node
            assert isinstance(process, Process)
            if target.below_low:
                self._ledger.note(target.group, "low")
            self._ledger.press(target.group, target.nbytes)
            try:
                taken = await self._gpus[top.gpu].reclaim(process, target.nbytes)
                if taken:
                    self._ledger.note(target.group, "reclaim")
            except ProcessLookupError:
                continue  # it took its memory along
            moved += taken
        return moved

    def forget(self, group: Group) -> None:
        """The group is gone."""
        self._locks.pop(group, None)
