"""Brings groups back under their high: decides with the ledger, moves with the GPU, tells the programs first."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from backend.background import Background
from backend.identity import Group, Process, Slice
from backend.population import Population
from backend.protocols import Gpu, Ledger, Target


class Reclaimer:
    """Moves memory between a GPU and the host as the limits demand."""

    def __init__(self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population, seconds: float) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        # Two reclaims of one group at once would each take the whole excess.
        self._locks: dict[Group, trio.Lock] = {}
        self.background = Background("reclaim", population, self.settle_path, seconds)
        """For what changed without a writer."""

    async def settle_path(self, group: Group) -> None:
        """Brings a group and every one above it back under its high, the lowest first."""
        for level in self._population.path(group):
            if self._population.holds(level) and self._ledger.excess(level):
                await self.settle(level)

    async def settle(self, level: Group) -> None:
        """Moves memory of a group out until it is under its high, or nothing more can be moved."""
        async with self._locks.setdefault(level, trio.Lock()):
            if not self._population.holds(level) or not (excess := self._ledger.excess(level)):
                return
            self._ledger.note(level, "high")
            if isinstance(level.node, Slice):
                self._ledger.press(level, excess)
            while excess and await self.take(level, excess):
                excess = self._ledger.excess(level) if self._population.holds(level) else 0
            if excess and self._population.holds(level):
                self._ledger.note(level, "fail")

    async def take(self, top: Group, nbytes: int) -> int:
        """Moves `nbytes` from the processes at or below `top` to the host; returns how much was moved.

        Each is told through its usermemfd, and not waited for: a program cannot stall its neighbours (Ghost, 4.2).
        """
        moved = 0
        for target in self._ledger.plan(top, nbytes):
            if not self._population.holds(target.group):
                continue  # it died while others were moved, and took its memory along
            if target.below_low:
                self._ledger.note(target.group, "low")
            self._ledger.press(target.group, target.nbytes)
            moved += await self._take_from(target)
        return moved

    async def _take_from(self, target: Target) -> int:
        process = target.group.node
        assert isinstance(process, Process)
        try:
            taken = await self._gpus[target.group.gpu].reclaim(process, target.nbytes)
        except OSError:
            if self._population.holds(target.group):
                raise
            return 0
        if taken and self._population.holds(target.group):
            self._ledger.note(target.group, "reclaim")
        return taken

    def forget(self, group: Group) -> None:
        """The group is gone."""
        self._locks.pop(group, None)
