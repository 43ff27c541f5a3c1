"""Totals: what the members of a slice have done in it, the ended as well. As rstat has it (kernel/cgroup/rstat.c).

A GPU tells what a living process has done. What that grew by since the last time is **taken down** for the process and
every slice above it: when the process ends or moves to another slice, when its GPU is about to tell no more of it, and
every TAKE_S seconds, or less often where that takes long. A slice has what was taken down, and what grew since then of
the members that it has now. So its figures never fall, what a process did stays where it did it, and a read asks the
living alone.

What is taken down is kept for the next daemon at once: a daemon that is killed takes what grew since then along.
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
"""Seconds between two times that everything is taken down: the most that a killed daemon takes along."""
TAKE_PART = 0.003
"""Part of the daemon's time that this takes at most: where it would be more, everything is taken down more rarely."""
TURN_S = 0.0005
"""Seconds of taking down before others have a turn."""
REST = 10
"""Times as long as a turn took that others have, before the next one."""
LATE_S = 5.0
"""Seconds for which a GPU may still tell what a process did that has ended."""

OF_WORK = ("submitted", "finished", "gpu_usec", "gpu_usec_estimate", "busy_usec", "busy_sampled_usec")
"""Figures of :class:`Activity` that only grow, and are added up."""
OF_NOTHING = {"submitted": 0, "finished": 0, "gpu_usec": 0}
"""Figures of a slice in which nothing was ever done."""

Figures = Mapping[str, int | None]


class Forgetful:
    """See :class:`backend.core.tally.Memory`: nothing outlives this daemon."""

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
        """`throttled` tells of one process what the scheduler kept it off the runlist, `held` has the books of memory
        over time: OSError for a group that is not in them."""
        self._gpus = gpus
        self._population = population
        self._throttled = throttled
        self._held = held
        self._memory = Forgetful() if memory is None else memory
        self.tally = Tally(gpus, population, self._memory)
        """What is kept in the same place, and told by no GPU."""
        self._late: dict[Member, tuple[Slice, float]] = {}  # processes that ended: where, and when
        self._clock: Callable[[], float] = trio.current_time
        self.ending: Callable[[Member], None] = lambda member: None
        """What is told of a process that is about to be gone, while its GPU still tells of it."""

    def take_over(self) -> None:
        """Goes on from what the daemon before us left, of those that are in the tree."""
        gone: dict[Group, Mapping[str, int]] = {}
        known = {group_on(node, gpu): kept for (gpu, node), kept in self._memory.kept().items()}
        living: Counter[Group] = Counter()  # bytes of processes that are still there
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
        """Takes everything down every TAKE_S seconds, until cancelled."""
        spent = 0.0
        slices_spent, slices_at = 0.0, trio.current_time()
        while True:
            await trio.sleep(max(TAKE_S, spent / TAKE_PART))
            self._expire()
            self.tally.write()
            spent = await self._take_turns(self._members_there())
            if trio.current_time() >= slices_at:  # which is no news of what processes did, and may be much
                slices_spent = await self._take_turns(self._slices_that_hold())
                slices_at = trio.current_time() + slices_spent / TAKE_PART

    async def _take_turns(self, groups: Iterable[Group]) -> float:
        """Takes groups down, and lets others have turns meanwhile. Return the seconds of work."""
        left, spent = deque(groups), 0.0
        while left:
            began = self._clock()
            self.take_down(self._turn(left, began + TURN_S))
            took = self._clock() - began
            spent += took
            await trio.sleep(REST * took)
        return spent

    # What was done

    def activity(self, group: Group) -> Activity:
        """The work of a process, or of all processes that ever were in a slice."""
        members = list(self._members(group))
        each = [(member, self._gpus[group.gpu].activity(member.process)) for member in members]
        now = sum((one for _, one in each[1:]), each[0][1]) if each else Activity(0, 0, 0, 0)
        figures = self._figures(group, OF_WORK, [(member, _work(one)) for member, one in each])
        if not each and all(value is None for value in figures.values()):
            figures = OF_NOTHING
        changes: dict[str, Any] = {name: figures.get(name) for name in OF_WORK}
        return attrs.evolve(now, **changes)

    def throttled(self, group: Group) -> Throttled:
        """How much a process, or those that ever were in a slice, were kept off the runlist by the scheduler."""
        each = [(member, self._throttles(member)) for member in self._members(group)]
        figures = self._figures(group, ("nr_throttled", "throttled_usec"), each)
        return Throttled(figures["nr_throttled"] or 0, figures["throttled_usec"] or 0)

    def footprint(self, group: Group) -> Footprint:
        """The memory of a process, or of those in a slice now; `exchanged` of all that ever were in it."""
        gpu = self._gpus[group.gpu]
        each = [(member, gpu.footprint(member.process)) for member in self._members(group)]
        now = sum((one for _, one in each[1:]), each[0][1]) if each else Footprint()
        told: list[tuple[Member, Figures]] = [(member, {"exchanged": one.exchanged}) for member, one in each]
        return attrs.evolve(now, exchanged=self._figures(group, ("exchanged",), told)["exchanged"])

    def byte_seconds(self, group: Group) -> int:
        """Return the memory that a process, or all in a slice, had on the GPU, times the time for which it had it. The
        next daemon never says less: what it would not know is kept for it first."""
        if self._of(group).is_behind(self._held(group)):
            self.take_down([group])
        return self._of(group).byte_usec(self._held(group), clock.boot_usec()) // 1_000_000

    def began(self, group: Group) -> int | None:
        """Return since when a group is counted, in seconds of the Unix epoch; None where that is not known."""
        return self._of(group).began

    def _figures(self, group: Group, names: Iterable[str], members: Iterable[tuple[Member, Figures]]) -> Figures:
        """What was taken down, and what grew since. None: a member never told; a process does not tell now."""
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
        """Have what processes did so far be known of them and of where they are, whatever happens to them next; and
        what processes and slices held."""
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
        """The end is near: everything is taken down."""
        self.take_down(self._everything())
        self.tally.close()

    def ended(self, member: Member) -> None:
        """A process is about to be gone: last of all its work is taken down. What its GPU learns later comes late."""
        resident = self._population.resident(member.process)
        if resident is not None:
            self.ending(member)
            self.take_down([member])
            self._late[member] = resident.slice, self._clock()

    def late(self, member: Member, figures: Mapping[str, int]) -> None:
        """What a process did before it ended, and was not known then: that of the slices in which it was."""
        where = self._late.get(member)
        if where is None or not any(figures.values()):
            return
        path = self._population.path(SliceOn(where[0], member.gpu))
        self._memory.keep({level: self._add(level, figures) for level in path if self._population.holds(level)})

    def left(self, record: Record, heir: Record | None) -> None:
        """A group has left the tree. A process that goes on elsewhere, in `heir`, takes what is known of it along; the
        slices there have what it does there. It was taken down before."""
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
        """What is known of a process, in its place on another GPU; `before` is what was counted there without it."""
        is_frozen = any([one.end() for one in (known, before)])
        total = dict(known.total)
        for name in COUNTS:
            if name in before.total:
                counted, there_too = total.get(name, 0), before.total[name]
                total[name] = (
                    min(MAX, counted + there_too) if name in (UNDONE, LOST, PERIODS) else max(counted, there_too)
                )
        said = {name: value for name, value in self._told(there).items() if value is not None}
        for name in OF_PROGRAMS:  # the program counts on, and perhaps has not told there yet
            said[name] = max(said.get(name, 0), known.said.get(name, 0))
        held = before.held._replace(byte_usec=known.held.byte_usec + before.held.byte_usec)
        taken = Taken(total, said, began=known.began, held=held, booked=before.booked)
        if is_frozen:
            taken.begin()
        return taken

    # The small parts

    def _turn(self, groups: deque[Group], end: float) -> Iterator[Group]:
        """Take from the groups those of one turn."""
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
        """Return the slices of the tree, on each GPU, that hold memory or may, or of which nothing was kept yet: of ten
        thousand that were made ahead, none."""
        occupied = {level for member in self._members_there() for level in self._population.path(member)[1:]}
        return [
            record.group
            for record in self._population.records()
            if isinstance(record.group, SliceOn)
            and (record.taken.stale or record.taken.held.nbytes or record.group in occupied)
        ]

    def _everything(self) -> list[Group]:
        """Return what is to be taken down: processes first."""
        return [*self._members_there(), *self._slices_that_hold()]

    def _hold(self, group: Group) -> bool:
        """Take down what a group held. Return whether that is to be kept."""
        try:
            return self._of(group).hold(self._held(group))
        except OSError:  # it is gone from the books, which another program may do
            return False

    def _members(self, group: Group) -> Iterable[Member]:
        return (Member(resident.process, group.gpu) for resident in self._population.below(group))

    def _of(self, group: Group) -> Taken:
        return self._population.record(group).taken

    def _take_down(self, member: Member) -> Mapping[str, int] | None:
        """What a process did since the last time; None where that changes nothing."""
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
        """Everything that is told of a process now, as it is told."""
        try:
            exchanged = self._gpus[member.gpu].footprint(member.process).exchanged
        except OSError:  # it has ended, and is asked for what it could move
            exchanged = None
        return self._gpus[member.gpu].activity(member.process), self._throttled(member), exchanged

    def _told(self, member: Member) -> Figures:
        """Everything that is told of a process now, by the names of figures."""
        return _figures_of(*self._sources(member))

    def _throttles(self, member: Member) -> Figures:
        return _throttles(self._throttled(member))

    def _expire(self) -> None:
        for member, (_, ended) in list(self._late.items()):  # the oldest first
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
    """What a figure grew by. One that is less than before was begun anew; one that is nothing is not told yet."""
    if now is None:
        return None
    return now - before if now >= before else now
