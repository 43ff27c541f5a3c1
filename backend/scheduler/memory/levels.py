"""The levels at which programs take memory turns: find each level that is short of memory, and run a switch for it.

A level is a slice, or the root, on one or several GPUs. While all that its programs use has room, it has no turns. A
slice under its own limit has none, even if a slice above it is short. If both are short, a program takes its turns in
the lower one, and what the lower one holds is not part of the room of the upper one.

GPUs that gangs tie together share their levels: a program with contexts on two GPUs has one turn on both, and so have
two programs that share memory. When the ties change, the switches of those GPUs end and others begin. So GPUs are tied
at once, and untied some time after nothing ties them any more.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import trio

from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.records import Books
from backend.process.identity import ROOT, Process, Slice, SliceOn
from backend.scheduler.memory.claims import Name
from backend.scheduler.memory.gangs import Ties, gangs
from backend.scheduler.memory.level import Level, Levers, Place, shared_by
from backend.scheduler.memory.planner import Plan
from backend.scheduler.memory.switch import Switch
from backend.scheduler.memory.telling import Beginnings
from backend.scheduler.shares import Contender

log = logging.getLogger(__name__)

LONELY_S = 5.0
"""Seconds for which a level must have room and no turns before its switch ends."""

TIES_S = 1.0
"""Seconds between two searches for gangs on several GPUs; each goes through all programs. A program that came to be on
several GPUs since the last search has no turns until the next.
"""

UNTIES_S, UNTIES_MOST_S = 30.0, 600.0
"""Seconds for which GPUs stay tied that no gang ties any more: what a program tells of itself may change again and
again, and each time all switches there end and begin. Twice as long each time that the GPUs are tied again within that
time of being untied, up to the second.
"""


@attrs.define(eq=False)
class Running:
    """A level and the switch that runs for it."""

    level: Level
    """The level."""
    switch: Switch
    """The switch."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Scope of the switch; cancelled to end it."""
    free_since: float | None = None
    """Time since which the level has had room and no turns, by trio's clock; None if it is short."""


@attrs.define
class Tie:
    """GPUs that a gang ties, or did so a little while ago."""

    until: float
    """Time up to which they are tied, by trio's clock."""
    wait: float = UNTIES_S
    """Seconds for which they stay tied without a gang that ties them."""
    is_over: bool = False
    """Whether they are untied."""


class Levels:
    """All levels of a machine, and their switches."""

    def __init__(
        self,
        gpus: Mapping[int, Gpu],
        ledger: Ledger,
        population: Population,
        is_on: bool,
        freed: Callable[[int], None] = lambda gpu: None,
    ) -> None:
        """If `is_on` is false, there are no memory turns. `freed` is as of :class:`Level`."""
        self._gpus = gpus
        self._ledger = ledger
        self._population = population
        self._is_on = is_on
        self._freed = freed
        self._levers: dict[int, Levers] = {}
        self._contenders: dict[int, Sequence[Contender]] = {}
        self._running: dict[Place, Running] = {}
        self._beginnings = Beginnings()
        self._ties_of: dict[frozenset[int], Tie] = {}  # of the GPUs of each gang that is on several, or was
        self._looked = -math.inf  # time of the last search for these, by trio's clock
        self.nursery: trio.Nursery | None = None
        """The nursery of the switches, while the schedulers run."""

    def enter(self, gpu: int, levers: Levers) -> None:
        """Let the programs of a GPU take turns, with `levers`."""
        self._levers[gpu] = levers

    def count(self, gpu: int) -> int:
        """Return the number of switches on a GPU."""
        return sum(gpu in place.gpus for place in self._running)

    def look(self, gpu: int, contenders: Sequence[Contender]) -> None:
        """Note the `contenders` on a GPU from now on. Start a switch for each level that has come to be short, and end
        the switches of levels that have had room for LONELY_S.
        """
        self._contenders[gpu] = contenders
        if not self._is_on or self.nursery is None:
            return
        tied = self._tied(gpu)
        for place, running in self._running.items():
            if place.gpus != tied and place.gpus & tied:
                running.scope.cancel()  # other GPUs are tied now
        for place in self._short(tied):
            level = self._level(place)
            begun = self._running[place] = Running(
                level, Switch(level, begun=functools.partial(self._beginnings.tell, str(place)))
            )
            self.nursery.start_soon(self._run, begun)
        for place, running in list(self._running.items()):
            if gpu not in place.gpus:
                continue
            running.level.poke()
            if running.switch.plan.has_turns or self._is_short(place):
                running.free_since = None
            elif running.free_since is None:
                running.free_since = trio.current_time()
            elif trio.current_time() - running.free_since >= LONELY_S:
                running.scope.cancel()

    def has(self, process: Process) -> bool:
        """Return whether a switch knew the process at its last look. A process that has left its slice is in none."""
        return any(process in running.switch.programs for running in self._running.values())

    def next_use(self) -> Mapping[Process, int]:
        """Return the time of the next turn of each waiting process, in microseconds of trio's clock."""
        found: dict[Process, int] = {}
        for running in self._running.values():
            plan, now_us = running.switch.plan, round(trio.current_time() * 1e6)
            times = running.switch.planner.turns.next_use(now_us) if plan.has_turns else {}
            found |= {name: at for name, at in times.items() if isinstance(name, Process) and name in plan.waits}
        return found

    def bounds(self) -> Mapping[Process, int]:
        """Return the longest wait of each program that takes turns, in microseconds."""
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
        except Exception:  # as in the scheduler: all programs run as before, and the next look starts again
            log.exception("%s: turns of memory failed", running.level.place)
        finally:
            running.level.planned(Plan())
            self._running.pop(running.level.place, None)

    def _tied(self, gpu: int) -> frozenset[int]:
        """Return `gpu` and the GPUs that gangs tie to it, directly or not. Only gangs that take turns count, since the
        others are always on.
        """
        tied = frozenset({gpu})
        if len(self._levers) < 2:
            return tied
        if trio.current_time() >= self._looked + TIES_S:
            self._looked = trio.current_time()
            self._tie({gang.gpus for gang in gangs(self._ties()) if gang.takes_turns and len(gang.gpus) > 1})
        wide = [gpus for gpus, tie in self._ties_of.items() if not tie.is_over]
        while more := frozenset().union(*(gpus for gpus in wide if gpus & tied)) - tied:
            tied |= more
        return tied

    def _tie(self, wide: Collection[frozenset[int]]) -> None:
        """Note the GPUs of each gang that is on several. They are tied from now on, and for some time after the last
        of these gangs; each time longer.
        """
        now = trio.current_time()
        for gpus in wide:
            tie = self._ties_of.setdefault(gpus, Tie(now))
            if tie.is_over:
                tie.is_over, tie.wait = False, min(UNTIES_MOST_S, 2 * tie.wait)
            tie.until = now + tie.wait
        for gpus, tie in list(self._ties_of.items()):
            tie.is_over = now >= tie.until
            if now >= tie.until + tie.wait:
                del self._ties_of[gpus]

    def _ties(self) -> Mapping[Name, Ties]:
        """Return the ties of each contending process to other processes and to GPUs."""
        ties: dict[Name, Ties] = {}
        for contenders in self._contenders.values():
            for process in [one.process for one in contenders if one.process not in ties]:
                resident = self._population.resident(process)
                if resident is None or not resident.contexts:
                    continue
                contexts = frozenset(resident.contexts)
                there = [self._gpus[index] for index in contexts if index in self._levers]
                tells = [one.working_set(process) is not None and one.shares(process) is not None for one in there]
                is_known = len(there) == len(contexts) and all(tells)
                ties[process] = Ties(contexts, shared_by(process, there), is_known)
        return ties

    def _level(self, place: Place) -> Level:
        def contenders(gpu: int) -> Sequence[Contender]:
            return list(self._below(place.on(gpu)))

        return Level(place, self._gpus, self._ledger, self._population, contenders, self._levers, self._freed)

    def _below(self, group: SliceOn) -> Iterator[Contender]:
        """Yield the contenders below a slice that take their turns at no level below it."""
        taken = {place.on(group.gpu) for place in self._running if group.gpu in place.gpus}
        for one in self._contenders.get(group.gpu, ()):
            levels = [level.group for level in one.path]
            depth = levels.index(group) + 1 if group in levels else 0
            is_below = depth or group == SliceOn(ROOT, group.gpu)
            if is_below and taken.isdisjoint(levels[depth:]):
                yield one

    def _short(self, gpus: frozenset[int]) -> Iterator[Place]:
        """Yield the levels on `gpus` that have come to be short, the lowest first."""
        contenders = [one for gpu in gpus for one in self._contenders.get(gpu, ())]
        if len({one.process for one in contenders}) < 2:
            return
        depths: dict[Slice, int] = {ROOT: 0}
        for one in contenders:
            groups = [level.group for level in one.path]
            depths |= {group.slice: depth for depth, group in enumerate(groups, 1) if isinstance(group, SliceOn)}
        for slice_ in sorted(depths, key=lambda slice_: -depths[slice_]):
            place = Place(slice_, gpus)
            is_taken = any(other.slice == slice_ and other.gpus & gpus for other in self._running)
            if not is_taken and self._is_short(place):
                yield place

    def _is_short(self, place: Place) -> bool:
        """Return whether the programs with work below a slice use more of a GPU than they have room for, together with
        what no program there can give, and two or more of them can take turns. Computed only if part of the slice is in
        the host, or is to go there: programs drain soonest while all of their memory is on the GPU.
        """
        if any(self._gpus[gpu].lost for gpu in place.gpus):
            return False
        try:
            pressed = [gpu for gpu in place.gpus if _is_pressed(self._ledger.books(place.on(gpu)))]
        except OSError:
            return False
        if not pressed:
            return False
        level = self._level(place)
        programs, rooms = level.programs(), level.own_rooms()
        for gpu in pressed:
            there = [one for one in programs.values() if gpu in one.claims]
            working = [one for one in there if one.has_work]
            used = sum(one.claims[gpu].used for one in working) + sum(one.claims[gpu].stays for one in there)
            if sum(one.ties.is_known for one in working) > 1 and bool(rooms) and used > rooms[gpu]:
                return True
        return False


def _is_pressed(books: Books) -> bool:
    """Return whether a group has memory in the host, or more on the GPU than it may."""
    return books.swap > 0 or books.current > books.limit
