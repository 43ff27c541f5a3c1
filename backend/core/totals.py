"""Totals: what the members of a slice did in it, those that have ended included, as in kernel/cgroup/rstat.c.

A GPU reports what a living process has done. The growth since the last report is **taken down** for the process and
every slice above it: when the process ends or moves to another slice, when its GPU is about to stop reporting it, and
every TAKE_S seconds, or less often where that takes long. A slice's figure is what was taken down, plus the growth
since then of its current members. So figures never fall, work stays with the slice in which it was done, and a read
asks the living only.

What is taken down is kept for the next daemon at once; a daemon that is killed loses the growth since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import trio

from backend.common import clock
from backend.core.held import Held
from backend.core.member import OF_PROGRAMS, SAID_HELD, Record, Taken
from backend.core.population import Population
from backend.core.protocols import Gpu
from backend.core.records import MAX, Activity, Footprint, Throttled
from backend.core.tally import COUNTS, LOST, MIGRATED, PERIODS, UNDONE, Memory, Tally
from backend.process.identity import Group, Member, Node, Slice, SliceOn, group_on

TAKE_S = 1.0
"""Seconds between two rounds of taking everything down: the most that a killed daemon loses."""
TAKE_PART = 0.003
"""Largest part of the daemon's time that a round may take; where it would be more, rounds are rarer."""
TURN_S = 0.0005
"""Seconds of taking down before other tasks get a turn."""
REST = 10
"""Length of the pause for other tasks after a turn, in multiples of that turn."""
LATE_S = 5.0
"""Seconds for which a GPU may still report what an ended process did."""

OF_WORK = (
    *("submitted", "finished", "capped", "uncapped"),
    *("gpu_usec", "gpu_usec_estimate", "busy_usec", "busy_sampled_usec"),
)
"""Figures of :class:`Activity` that only grow, and are summed."""
OF_NOTHING = {"submitted": 0, "finished": 0, "gpu_usec": 0}
"""Figures of a slice in which nothing was ever done."""

Figures = Mapping[str, int | None]


class Forgetful:
    """A :class:`backend.core.tally.Memory` in which nothing outlives this daemon."""

    def kept(self) -> Mapping[tuple[int, Node], Mapping[str, int]]:
        return {}

    def keep(self, figures: Mapping[Group, Mapping[str, int]]) -> None:
        pass


class Totals:
    """See the module."""

    def __init__(
        self,
        gpus: Mapping[int, Gpu],
        population: Population,
        throttled: Callable[[Member], Throttled],
        held: Callable[[Group], Held],
        memory: Memory | None = None,
    ) -> None:
        """`throttled` returns how long the scheduler kept a process off the runlist. `held` returns a group's memory
        over time, from the books: OSError for a group that is not in them."""
        self._gpus = gpus
        self._population = population
        self._throttled = throttled
        self._held = held
        self._memory = Forgetful() if memory is None else memory
        self.tally = Tally(gpus, population, self._memory)
        """Figures that no GPU reports, kept in the same place."""
        self._late: dict[Member, tuple[Slice, float]] = {}  # ended processes: slice, and time
        self._clock: Callable[[], float] = trio.current_time
        self.ending: Callable[[Member], None] = lambda member: None
        """Called with a process that is about to be gone, while its GPU still reports it."""

    def take_over(self) -> None:
        """Take over what the former daemon left, for the groups in the tree."""
        gone: dict[Group, Mapping[str, int]] = {}
        known = {group_on(node, gpu): kept for (gpu, node), kept in self._memory.kept().items()}
        living: Counter[Group] = Counter()  # bytes of processes that still live, by level
        for group, kept in known.items():
            if isinstance(group, Member) and self._population.holds(group):
                for level in self._population.path(group):
                    living[level] += kept.get(SAID_HELD, 0)
        for group, kept in known.items():
            if not self._population.holds(group):
                gone[group] = {}
                continue
            taken = self._population.record(group).taken = Taken.of(kept)
            taken.hold_on(self._held(group), living[group])
            if isinstance(group, Member):
                now = _work(self._gpus[group.gpu].activity(group.process))
                for name in OF_PROGRAMS:
                    told = now[name]
                    taken.said[name] = taken.said.get(name, 0) if told is None else told
                resident = self._population.resident(group.process)
                assert resident is not None, "the tree holds it"
                resident.moves = max(resident.moves, taken.total.get(MIGRATED, 0))
        if gone:
            self._memory.keep(gone)

    async def run(self) -> None:
        """Take everything down every TAKE_S seconds, until cancelled."""
        spent = 0.0
        slices_spent, slices_at = 0.0, trio.current_time()
        while True:
            await trio.sleep(max(TAKE_S, spent / TAKE_PART))
            self._expire()
            self.tally.write()
            spent = await self._take_turns(self._members_there())
            if trio.current_time() >= slices_at:  # no news of work, and there may be many
                slices_spent = await self._take_turns(self._slices_that_hold())
                slices_at = trio.current_time() + slices_spent / TAKE_PART

    async def _take_turns(self, groups: Iterable[Group]) -> float:
        """Take groups down, with turns for other tasks in between. Return the seconds of work."""
        left, spent = deque(groups), 0.0
        while left:
            began = self._clock()
            self.take_down(self._turn(left, began + TURN_S))
            took = self._clock() - began
            spent += took
            await trio.sleep(REST * took)
        return spent

    # Figures

    def activity(self, group: Group) -> Activity:
        """Return the work of a process, or of all processes that ever were in a slice."""
        members = list(self._members(group))
        each = [(member, self._gpus[group.gpu].activity(member.process)) for member in members]
        now = sum((one for _, one in each[1:]), each[0][1]) if each else Activity(0, 0, 0, 0)
        figures = self._figures(group, OF_WORK, [(member, _work(one)) for member, one in each])
        if not each and all(value is None for value in figures.values()):
            figures = OF_NOTHING
        changes: dict[str, Any] = {name: figures.get(name) for name in OF_WORK}
        return attrs.evolve(now, **changes)

    def throttled(self, group: Group) -> Throttled:
        """Return how much the scheduler kept a process, or all that ever were in a slice, off the runlist."""
        each = [(member, self._throttles(member)) for member in self._members(group)]
        figures = self._figures(group, ("nr_throttled", "throttled_usec"), each)
        return Throttled(figures["nr_throttled"] or 0, figures["throttled_usec"] or 0)

    def footprint(self, group: Group) -> Footprint:
        """Return the memory of a process, or of those in a slice now; `exchanged` is of all that ever were in the
        slice."""
        gpu = self._gpus[group.gpu]
        each = [(member, gpu.footprint(member.process)) for member in self._members(group)]
        now = sum((one for _, one in each[1:]), each[0][1]) if each else Footprint()
        told: list[tuple[Member, Figures]] = [(member, {"exchanged": one.exchanged}) for member, one in each]
        return attrs.evolve(now, exchanged=self._figures(group, ("exchanged",), told)["exchanged"])

    def byte_seconds(self, group: Group) -> int:
        """Return the memory that a process, or all in a slice, had on the GPU, integrated over time, in byte-seconds.
        The next daemon never returns less: what it would not know is stored first."""
        if self._of(group).is_behind(self._held(group)):
            self.take_down([group])
        return self._of(group).byte_usec(self._held(group), clock.boot_usec()) // 1_000_000

    def began(self, group: Group) -> int | None:
        """Return the time since which a group is counted, in seconds of the Unix epoch; None where that is unknown."""
        return self._of(group).began

    def _figures(self, group: Group, names: Iterable[str], members: Iterable[tuple[Member, Figures]]) -> Figures:
        """Return what was taken down plus the growth since. None for a figure that a member never reported, or that a
        process itself does not report now."""
        total = self._of(group).total
        found: dict[str, int | None] = {name: total.get(name) for name in names}
        unknown = set()
        for member, now in members:
            taken = self._of(member)
            for name in found:
                grown = _growth(now[name], taken.said.get(name, 0))
                if grown is None and (member == group or name not in taken.total):
                    unknown.add(name)
                elif grown is not None:
                    found[name] = min(MAX, (found[name] or 0) + grown)
        return {name: None if name in unknown else value for name, value in found.items()}

    # Taking down

    def take_down(self, groups: Iterable[Group]) -> None:
        """Take down what processes did so far, for them and for the slices that they are in, whatever happens to them
        next; and what processes and slices held."""
        changed: dict[Group, Mapping[str, int]] = {}
        for group in groups:
            is_news = self._hold(group)
            grown = self._take_down(group) if isinstance(group, Member) else None
            if grown is None and not is_news:
                continue
            changed[group] = self._of(group).kept()
            if grown is not None and any(grown.values()):
                for level in self._population.path(group)[1:]:
                    changed[level] = self._add(level, grown)
        if changed:
            self._memory.keep(changed)

    def take_all_down(self) -> None:
        """Take down everything, as the daemon is about to end."""
        self.take_down(self._everything())
        self.tally.close()

    def ended(self, member: Member) -> None:
        """Take down the last work of a process that is about to be gone. What its GPU learns later is passed to
        :meth:`late`."""
        resident = self._population.resident(member.process)
        if resident is not None:
            self.ending(member)
            self.take_down([member])
            self._late[member] = resident.slice, self._clock()

    def late(self, member: Member, figures: Mapping[str, int]) -> None:
        """Add work of an ended process that became known late to the slices that it was in."""
        where = self._late.get(member)
        if where is None or not any(figures.values()):
            return
        path = self._population.path(SliceOn(where[0], member.gpu))
        self._memory.keep({level: self._add(level, figures) for level in path if self._population.holds(level)})

    def left(self, record: Record, heir: Record | None) -> None:
        """Note that a group left the tree. A process that goes on elsewhere, in `heir`, takes its own figures along;
        what it does there counts for the slices there. It was taken down before."""
        changed: dict[Group, Mapping[str, int]] = {record.group: {}} if record.taken else {}
        if isinstance(record.group, Member) and record.group in self._late:  # from now on its slices hold less
            path = self._population.path(SliceOn(self._late[record.group][0], record.group.gpu))
            levels = [level for level in path if self._population.holds(level)]
            changed |= {level: self._of(level).kept() for level in levels if self._hold(level)}
        if heir is not None and isinstance(record.group, Member) and isinstance(heir.group, Member):
            heir.taken = self._handed_on(record.taken, heir.taken, heir.group)
            changed[heir.group] = heir.taken.kept()
            resident = self._population.resident(heir.group.process)
            if resident is not None:
                self._late[record.group] = resident.slice, self._clock()
        if changed:
            self._memory.keep(changed)

    def _handed_on(self, known: Taken, before: Taken, there: Member) -> Taken:
        """Return the figures of a process in its new place on another GPU; `before` is what was counted there
        already."""
        is_frozen = any([one.end() for one in (known, before)])
        total = dict(known.total)
        for name in COUNTS:
            if name in before.total:
                counted, there_too = total.get(name, 0), before.total[name]
                total[name] = (
                    min(MAX, counted + there_too) if name in (UNDONE, LOST, PERIODS) else max(counted, there_too)
                )
        said = {name: value for name, value in self._told(there).items() if value is not None}
        for name in OF_PROGRAMS:  # the program counts on, and may not have reported there yet
            said[name] = max(said.get(name, 0), known.said.get(name, 0))
        held = before.held._replace(byte_usec=known.held.byte_usec + before.held.byte_usec)
        taken = Taken(total, said, began=known.began, held=held, booked=before.booked)
        if is_frozen:
            taken.begin()
        return taken

    # Helpers

    def _turn(self, groups: deque[Group], end: float) -> Iterator[Group]:
        """Take groups from `groups` for one turn, until the time `end`."""
        while groups:
            group = groups.popleft()
            if self._population.holds(group):
                yield group
            if self._clock() >= end:
                return

    def _members_there(self) -> list[Group]:
        """Return the processes of the tree, on each of their GPUs."""
        return [record.group for record in self._population.records() if isinstance(record.group, Member)]

    def _slices_that_hold(self) -> list[Group]:
        """Return the slices of the tree, on each GPU, that hold memory, may hold some, or have no figures stored yet.
        Of ten thousand that were made ahead, that is none."""
        occupied = {level for member in self._members_there() for level in self._population.path(member)[1:]}
        return [
            record.group
            for record in self._population.records()
            if isinstance(record.group, SliceOn)
            and (record.taken.stale or record.taken.held.nbytes or record.group in occupied)
        ]

    def _everything(self) -> list[Group]:
        """Return all groups to take down, processes first."""
        return [*self._members_there(), *self._slices_that_hold()]

    def _hold(self, group: Group) -> bool:
        """Take down what a group held. Return whether that is news to store."""
        try:
            return self._of(group).hold(self._held(group))
        except OSError:  # gone from the books, which another program may cause
            return False

    def _members(self, group: Group) -> Iterable[Member]:
        return (Member(resident.process, group.gpu) for resident in self._population.below(group))

    def _of(self, group: Group) -> Taken:
        return self._population.record(group).taken

    def _take_down(self, member: Member) -> Mapping[str, int] | None:
        """Return what a process did since the last time; None where no total changed."""
        taken = self._of(member)
        told = self._sources(member)
        if told == taken.told:
            return None
        taken.told = told
        grown: dict[str, int] = {}
        before = dict(taken.total)
        for name, now in _figures_of(*told).items():
            more = _growth(now, taken.said.get(name, 0))
            if more is None:
                continue
            grown[name] = more
            taken.total[name] = min(MAX, taken.total.get(name, 0) + more)
            if now:
                taken.said[name] = now
        return None if taken.total == before else grown

    def _add(self, level: Group, grown: Mapping[str, int]) -> Mapping[str, int]:
        taken = self._of(level)
        for name, more in grown.items():
            taken.total[name] = min(MAX, taken.total.get(name, 0) + more)
        return taken.kept()

    def _sources(self, member: Member) -> tuple[Activity, Throttled, int | None]:
        """Return all reports of a process, unprocessed."""
        try:
            exchanged = self._gpus[member.gpu].footprint(member.process).exchanged
        except OSError:  # it has ended, and cannot say what it could move
            exchanged = None
        return self._gpus[member.gpu].activity(member.process), self._throttled(member), exchanged

    def _told(self, member: Member) -> Figures:
        """Return all that is reported of a process, by the names of figures."""
        return _figures_of(*self._sources(member))

    def _throttles(self, member: Member) -> Figures:
        return _throttles(self._throttled(member))

    def _expire(self) -> None:
        for member, (_, ended) in list(self._late.items()):  # oldest first
            if self._clock() - ended < LATE_S:
                break
            del self._late[member]


def _work(activity: Activity) -> Figures:
    return {name: getattr(activity, name) for name in OF_WORK}


def _throttles(throttled: Throttled) -> Figures:
    return {"nr_throttled": throttled.times, "throttled_usec": throttled.usec}


def _figures_of(activity: Activity, throttled: Throttled, exchanged: int | None) -> Figures:
    return {**_work(activity), **_throttles(throttled), "exchanged": exchanged}


def _growth(now: int | None, before: int) -> int | None:
    """Return the growth of a figure. A figure below the previous one was started anew; None is one not reported yet."""
    if now is None:
        return None
    return now - before if now >= before else now
