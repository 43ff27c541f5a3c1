"""Brings groups back under their high: decides with the ledger, moves with the GPU, tells the programs first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

import trio

from backend.common.turns import Turns
from backend.core.background import Background
from backend.core.deadlines import Deadlines
from backend.core.member import Record
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger, Target
from backend.process.identity import Group, Member, SliceOn

USERMEM_S = 0.05
"""Seconds that a program which listens to its usermemfd has to give memory back by itself, before it is taken."""

IGNORED_S = 10.0
"""A program that let those seconds pass for nothing is not waited for in this time: it costs its neighbours 0.5 %."""


class Reclaimer:
    """Moves memory between a GPU and the host as the limits demand."""

    def __init__(
        self, ledger: Ledger, gpus: Mapping[int, Gpu], population: Population, turns: Turns, deadlines: Deadlines
    ) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._turns = turns
        self._listeners: Counter[Group] = Counter()  # who has the usermemfd of a group open
        self.background = Background("reclaim", population, self.settle_path, deadlines, lambda record: record.memory)
        """For what changed without a writer."""

    async def settle_path(self, group: Group) -> None:
        """Brings a group and every one above it back under its high, the lowest first."""
        for level in self._population.path(group):
            if self._population.holds(level) and self._ledger.excess(level):
                await self.settle(level)

    async def settle(self, level: Group) -> None:
        """Moves memory of a group out until it is under its high, or nothing more can be moved."""
        # Two reclaims of one group at once would each take the whole excess.
        async with self._population.record(level).memory.settling():
            if not self._population.holds(level) or not (excess := self._ledger.excess(level)):
                return
            self._ledger.note(level, "high")
            if isinstance(level, SliceOn):
                self._ledger.press(level, excess)
            spent: set[Member] = set()
            while excess:
                _, asked = await self.take(level, excess, spent)
                excess = self._ledger.excess(level) if self._population.holds(level) else 0
                if not asked:
                    break
            if excess and self._population.holds(level):
                self._ledger.note(level, "fail")

    async def reclaim(self, top: Group, nbytes: int) -> int:
        """Moves `nbytes` of a group out, or what can be; returns how much less its processes hold."""
        spent: set[Member] = set()
        moved = 0
        while moved < nbytes:
            given, asked = await self.take(top, nbytes - moved, spent)
            moved += given
            if not asked or not self._population.holds(top):
                break
        return moved

    def plan(self, top: Group, nbytes: int, spent: Collection[Member] = ()) -> list[Target]:
        """The ledger's plan, of what the GPU can move: what some cannot give, others are asked for. Not those `spent`.

        The books know no more than what is on the GPU. So the ledger is asked to plan for more than is needed, as
        little more as it takes, and those parts are dropped that cannot be moved.
        """
        targets, planned = self._movable(top, nbytes, spent)
        if planned < nbytes or _total(targets) == planned:
            return targets
        short, enough = nbytes, nbytes
        while _total(targets) < nbytes and planned >= enough:
            short, enough = enough, 2 * enough
            targets, planned = self._movable(top, enough, spent)
        while enough - short > self._gpus[top.gpu].info.granule and _total(targets) >= nbytes:
            middle = (short + enough) // 2
            fewer, _ = self._movable(top, middle, spent)
            if _total(fewer) >= nbytes:
                enough, targets = middle, fewer
            else:
                short = middle
        return targets

    def _movable(self, top: Group, nbytes: int, spent: Collection[Member]) -> tuple[list[Target], int]:
        """What can be moved of a plan of the ledger, and how much that planned in all."""
        gpu = self._gpus[top.gpu]
        left: dict[Member, int] = {}
        targets, planned = [], 0
        for target in self._ledger.plan(top, nbytes):
            planned += target.nbytes
            if target.group in spent:
                continue
            most = left.setdefault(target.group, gpu.footprint(target.group.process).movable)
            if take := min(target.nbytes, most):
                left[target.group] -= take
                targets.append(Target(target.group, take, target.below_low))
        return targets, planned

    async def take(self, top: Group, nbytes: int, spent: set[Member]) -> tuple[int, bool]:
        """Takes `nbytes` from the processes at or below `top`, once: returns how much less they hold, and whether any
        was asked. Who gave less than he was asked for is `spent` from then on.

        All of them at the same time: one that is slow keeps only those waiting who wait for it. Each is told through
        its usermemfd; one that listens there may give back by itself what it needs least, but not for long.
        """
        given: list[int] = []
        failed: list[Exception] = []

        async def take_one(target: Target) -> None:
            try:
                given.append(await self._take_from(target))
            except Exception as error:  # of one of them; what the others have begun goes on
                failed.append(error)
            else:
                if given[-1] < target.nbytes:
                    spent.add(target.group)

        await self._turns.turn()
        if not self._population.holds(top):
            return 0, False
        targets = _merged(self.plan(top, nbytes, spent))
        async with trio.open_nursery() as nursery:
            for target in targets:
                if target.below_low:
                    self._ledger.note(target.group, "low")
                nursery.start_soon(take_one, target)
        if failed:
            raise failed[0]
        return sum(given), bool(targets)

    async def _take_from(self, target: Target) -> int:
        group = target.group
        if not self._population.holds(group):
            return target.nbytes
        given = await self._let(group, target.nbytes)
        if given >= target.nbytes or not self._population.holds(group):
            return given  # it died meanwhile, and took its memory along
        try:
            taken = await self._gpus[group.gpu].reclaim(group.process, target.nbytes - given)
        except OSError:
            if self._population.holds(group):
                raise
            return given
        if taken and self._population.holds(group):
            self._ledger.note(group, "reclaim")
        return given + taken

    # The program's own turn

    def listens(self, group: Group, change: int) -> None:
        """Somebody opened (1) or closed (-1) the usermemfd of a group whose memory it is."""
        self._listeners[group] += change
        if not self._listeners[group]:
            del self._listeners[group]

    def fell(self, group: Group) -> None:
        """A process holds less than before."""
        self.wake(self._population.record(group))

    def wake(self, record: Record) -> None:
        """Has those look again that wait for a group to hold less."""
        if record.memory.waiting is not None:
            record.memory.waiting.unpark_all()

    async def _let(self, group: Group, nbytes: int) -> int:
        """Tells a program to give back `nbytes`, and lets one that listens do so by itself, for USERMEM_S; returns how
        much it did."""
        before = self._ledger.books(group).current  # one that is told may give at once
        self._ledger.press(group, nbytes)
        memory = self._population.record(group).memory
        if not self._listeners[group] or memory.ignored_until > trio.current_time():
            return 0
        given = self._given(group, before)
        if memory.waiting is None:  # an empty lot is false
            memory.waiting = trio.lowlevel.ParkingLot()
        lot = memory.waiting
        try:
            with trio.move_on_after(USERMEM_S):
                while self._population.holds(group) and given < nbytes:
                    await lot.park()
                    given = self._given(group, before)
        finally:
            if not lot and memory.waiting is lot:
                memory.waiting = None
        given = self._given(group, before)
        if not given and self._population.holds(group):
            memory.ignored_until = trio.current_time() + IGNORED_S
        return given

    def _given(self, group: Group, before: int) -> int:
        return max(0, before - self._ledger.books(group).current) if self._population.holds(group) else before


def _merged(targets: list[Target]) -> list[Target]:
    """One target a process: a plan takes what is not protected first, and may come back for more."""
    merged: dict[Member, Target] = {}
    for target in targets:
        if target.group in merged:
            first = merged[target.group]
            target = Target(target.group, first.nbytes + target.nbytes, first.below_low or target.below_low)
        merged[target.group] = target
    return list(merged.values())


def _total(targets: list[Target]) -> int:
    return sum(target.nbytes for target in targets)
