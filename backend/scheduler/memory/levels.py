"""The levels of one GPU at which memory is scheduled with time: a switch for each that is short of memory.

Where all that programs use has room there is none. A slice below its limit is no level, whatever is above it; where
both are short, a program has its turns in the lower one, and what that one has is none of the room above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import trio

from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.process.identity import ROOT, Process, SliceOn
from backend.scheduler.memory.level import Level, Levers
from backend.scheduler.memory.planner import Plan
from backend.scheduler.memory.switch import Switch
from backend.scheduler.shares import Contender

LONELY_S = 5.0
"""Seconds for which a level has no turns, and room, before its switch ends."""


@attrs.define(eq=False)
class Running:
    """A level, and the switch at work there."""

    level: Level
    """The level."""
    switch: Switch
    """What switches."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """What ends it."""
    free_since: float | None = None
    """Since when there are no turns, by trio's clock."""


class Levels:
    """See the module."""

    def __init__(self, gpu: Gpu, ledger: Ledger, population: Population, levers: Levers, is_on: bool) -> None:
        """Not `is_on`, there are no turns for the sake of memory."""
        self._gpu = gpu
        self._index = gpu.info.index
        self._ledger = ledger
        self._population = population
        self._levers = levers
        self._is_on = is_on
        self._contenders: Sequence[Contender] = ()
        self._running: dict[SliceOn, Running] = {}
        self.nursery: trio.Nursery | None = None
        """What switches run in, while the scheduler runs."""

    def __len__(self) -> int:
        """Return how many switches are at work."""
        return len(self._running)

    def look(self, contenders: Sequence[Contender]) -> None:
        """Begins to switch at a level that has come to be short, and ends where it has room again; these contend."""
        self._contenders = contenders
        if not self._is_on or self.nursery is None:
            return
        for group in self._short():
            level = self._level(group)
            running = self._running[group] = Running(level, Switch(level, name=_name(group)))
            self.nursery.start_soon(self._run, running)
        for group, running in list(self._running.items()):
            running.level.poke()
            if running.switch.plan.has_turns or (not self._gpu.lost and self._is_short(group)):
                running.free_since = None
            elif running.free_since is None:
                running.free_since = trio.current_time()
            elif trio.current_time() - running.free_since >= LONELY_S:
                running.scope.cancel()

    def has(self, process: Process) -> bool:
        """Return whether a switch has a process, as it looked last: one that has left its slice none has."""
        return any(process in running.switch.programs for running in self._running.values())

    def next_use(self) -> Mapping[Process, int]:
        """Return when each process that waits has its turn, microseconds of some clock."""
        found: dict[Process, int] = {}
        for running in self._running.values():
            plan, now_us = running.switch.plan, round(trio.current_time() * 1e6)
            times = running.switch.planner.turns.next_use(now_us) if plan.has_turns else {}
            found |= {name: at for name, at in times.items() if isinstance(name, Process) and name in plan.waits}
        return found

    def bounds(self) -> Mapping[Process, int]:
        """Return how long each program that has turns waits at most, microseconds."""
        return {
            name: running.switch.planner.turns.bound_us(name)
            for running in self._running.values()
            for one in running.switch.plan.sets
            for name in one
            if isinstance(name, Process) and running.switch.plan.has_turns
        }

    async def _run(self, running: Running) -> None:
        try:
            with running.scope:
                await running.switch.run()
        finally:
            running.level.planned(Plan())
            self._running.pop(running.level.group, None)

    def _level(self, group: SliceOn) -> Level:
        return Level(self._gpu, self._ledger, self._population, group, lambda: list(self._below(group)), self._levers)

    def _below(self, group: SliceOn) -> Iterator[Contender]:
        """Yield those that contend below a slice, and have their turns at no level below it."""
        for one in self._contenders:
            levels = [level.group for level in one.path]
            depth = levels.index(group) + 1 if group in levels else 0
            is_below = depth or group == SliceOn(ROOT, self._index)
            if is_below and not any(level in self._running for level in levels[depth:]):
                yield one

    def _short(self) -> Iterator[SliceOn]:
        """Yield the levels that have come to be short, the lowest first."""
        if self._gpu.lost or len(self._contenders) < 2:
            return
        depths = {SliceOn(ROOT, self._index): 0}
        for one in self._contenders:
            groups = [level.group for level in one.path]
            depths |= {group: depth for depth, group in enumerate(groups, 1) if isinstance(group, SliceOn)}
        for group in sorted(depths, key=lambda group: -depths[group]):
            if group not in self._running and self._is_short(group):
                yield group

    def _is_short(self, group: SliceOn) -> bool:
        """Whether programs below a slice that can have turns use more together than they have room for, beside what
        none can give. That is reckoned only where something is in the host."""
        try:
            if not self._ledger.books(group).swap:
                return False
        except OSError:
            return False
        level = self._level(group)
        programs, rooms = level.programs(), level.rooms()
        working = [one for one in programs.values() if one.has_work]
        used = sum(one.claims[self._index].used for one in working)
        used += sum(one.claims[self._index].stays for one in programs.values())
        return sum(one.ties.is_known for one in working) > 1 and bool(rooms) and used > rooms[self._index]


def _name(group: SliceOn) -> str:
    """The name of a level in the log."""
    return f"GPU {group.gpu}, slice {group.slice.path}"
