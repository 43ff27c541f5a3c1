"""Makes the hardware's compute state follow the books: timeslices and freezes of every process, path by path."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

import trio

from backend.common.errors import fail
from backend.core.background import Background
from backend.core.deadlines import Deadlines
from backend.core.entries import Resident
from backend.core.population import Population
from backend.core.protocols import Gpu, Inherited, Ledger
from backend.core.reasons import Off, Reason
from backend.core.records import NOWHERE, Channel, Place, Wanted
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn

log = logging.getLogger(__name__)

UNTOUCHED = Wanted()
"""How every process is before anybody asks for anything."""


class Follower:
    """What is applied to whom, and the way from there to what is wanted."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        tell: Callable[[Group, Channel], None],
        deadlines: Deadlines,
    ) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._tell = tell
        self._applied: dict[Member, Wanted] = {}
        self._locks: dict[Member, trio.Lock] = {}
        self._frozen: set[Group] = set()  # as compute.events last said
        self._since: dict[Group, float] = {}  # when what is frozen now began to be asked to
        self._frozen_s: dict[Group, float] = {}  # of the times before
        self._doubtful: set[Member] = set()  # detached at most in part: the lever has not returned, or failed
        self._places: dict[Member, Place] = {}  # what the scheduler adds to what is asked for
        self._held: set[Member] = set()  # nobody pulls a lever of theirs
        self._inherited: set[Member] = set()  # as another daemon left it, in the books: no lever was pulled here yet
        self.background = Background("compute", population, self.apply, deadlines)
        """For what changed without a writer."""
        self.watcher: Callable[[int], None] = lambda gpu: None
        """Who is told that somebody came to a GPU, left it or moved there, or that something is asked."""

    def take_over(self, inherited: Iterable[Inherited]) -> None:
        """Groups of an earlier daemon. What it applied holds, until they are followed for the first time: then each
        lever is pulled, wherever it is said to be. A Gpu that it holds on already has nothing to do."""
        for one in inherited:
            if isinstance(one.group, Member):
                self._inherited.add(one.group)
                applied = one.applied
                if applied.frozen and not self.wanted(one.group).frozen:  # that was the scheduler of that daemon
                    off = applied.off.without(Reason.FREEZE).with_(Reason.TURN)
                    applied = Wanted(off, applied.timeslice_us)
                self._remember(one.group, applied)
                if one.doubtful:
                    self._doubtful.add(one.group)
        for gpu in self._gpus:
            self.show(SliceOn(ROOT, gpu))  # what turns from now on is told

    def applied(self, group: Member) -> Wanted:
        """What holds for a process now."""
        return self._applied.get(group, UNTOUCHED)

    def is_untouched(self, group: Member) -> bool:
        """Whether no lever of a process has anything to give back."""
        return self.applied(group) == UNTOUCHED and group not in self._inherited

    def wanted(self, group: Member) -> Wanted:
        """What the path above a process adds up to: frozen by any level, the shortest of the timeslices, or, where none
        is asked for, the scheduler's.

        A slice's timeslice is shared by the processes below it that have a context, as a process's is by its TSGs.
        """
        frozen, shortest = False, 0
        for level in self._population.path(group):
            books = self._ledger.books(level)
            frozen = frozen or books.frozen
            if us := books.timeslice_us:
                if isinstance(level, SliceOn):
                    sharers = self._population.sharers(level)
                    us = max(self._gpus[group.gpu].info.timeslice_min_us, us // max(1, sharers))
                shortest = min(shortest or us, us)
        place, off = self._places.get(group, NOWHERE), Off()
        if frozen:
            off = off.with_(Reason.FREEZE)
        if place.off:
            off = off.with_(Reason.TURN, place.engines)
        return Wanted(off, shortest or place.timeslice_us)

    # What the scheduler has a say in

    def place(self, group: Member) -> Place:
        """What the scheduler has a process have."""
        return self._places.get(group, NOWHERE)

    def schedule(self, group: Member, place: Place) -> None:
        """From now on that is what it has it have: wanted, and not applied yet."""
        if place == NOWHERE:
            self._places.pop(group, None)
        else:
            self._places[group] = place

    def scheduled(self, gpu: int) -> Sequence[Process]:
        """Whom the scheduler of a GPU has a place for."""
        return [member.process for member in self._places if member.gpu == gpu]

    def fall_back(self, group: Member) -> None:
        """The scheduler's part does not hold: no more is wanted of it than what does, and that it runs."""
        applied = self.applied(group)
        self.schedule(group, Place(applied.timeslice_us))
        if applied.off.reasons & Reason.TURN:  # perhaps
            self.background.later(group)

    def is_frozen(self, group: Group) -> bool:
        """Whether a group is frozen, as cgroup.events has it (kernel/cgroup/freezer.c): that was asked for, at it or
        above it, and holds for every process at or below it. Without a process it does so at once."""
        asked = any(self._ledger.books(level).frozen for level in self._population.path(group))
        return asked and self._all_stand(group)

    def _all_stand(self, group: Group) -> bool:
        """Whether no process of a group runs: up to the first that does, as there may be thousands."""
        return all(self._stands(Member(resident.process, group.gpu)) for resident in self._population.below(group))

    def _stands(self, member: Member) -> bool:
        return self.applied(member).frozen and member not in self._doubtful

    def follows(self, group: Group) -> bool:
        """Whether what is wanted holds for every process at or below a group already, and no lever is being pulled:
        :meth:`apply` would have nothing to do but to tell."""
        for resident in self._population.below(group):
            member = Member(resident.process, group.gpu)
            if member in self._inherited or member in self._doubtful or self.is_busy(member):
                return False
            if self.wanted(member) != self.applied(member):
                return False
        return True

    async def apply(self, group: Group) -> None:
        """Returns once what is wanted holds for every process at or below a group; raises the first failure."""
        failures: list[Exception] = []

        async def one(resident: Resident) -> None:
            member = Member(resident.process, group.gpu)
            try:
                await self._apply_one(member)
            except Exception as error:
                if self._population.holds(member):
                    failures.append(error)
                elif member == group:
                    failures.append(fail(errno.ESRCH))
                # Of a slice, a process that died while we worked leaves nothing to freeze.

        residents = list(self._population.below(group))
        if len(residents) == 1:
            await one(residents[0])
        else:
            async with trio.open_nursery() as nursery:
                for resident in residents:
                    nursery.start_soon(one, resident)
        self.show(group)
        if failures:
            raise failures[0]

    async def _apply_one(self, group: Member) -> None:
        process, gpu = group.process, self._gpus[group.gpu]
        async with self._locks.setdefault(group, trio.Lock()):
            if not self._population.holds(group):
                raise fail(errno.ESRCH)
            wanted = self.wanted(group)  # asked inside the lock: the last write wins
            applied = self.applied(group)
            again = group in self._inherited
            if again and wanted.off:  # first of all: a Gpu that was not told so yet lets it run at another lever
                await self._detach(group, Wanted(wanted.off, applied.timeslice_us))
                applied = self.applied(group)
            if again or wanted.timeslice_us != applied.timeslice_us:
                await gpu.set_timeslice(process, wanted.timeslice_us)
                applied = Wanted(applied.off, wanted.timeslice_us)
                self._remember(group, applied)
            if wanted.off and (wanted.engines is not applied.engines or group in self._doubtful):
                await self._detach(group, wanted)
            elif not wanted.off and (again or applied.off):
                await gpu.attach(process)
                self._doubtful.discard(group)
                self._remember(group, wanted)
            elif wanted != applied:
                self._remember(group, wanted)  # it is off the runlist for other reasons
            self._inherited.discard(group)

    async def _detach(self, group: Member, wanted: Wanted) -> None:
        """Has the engines of its reasons off, and the others on. What holds meanwhile is what held and what will."""
        applied = self.applied(group)
        # Before the lever moves: one that is half frozen must be thawed too.
        self._remember(group, Wanted(applied.off | wanted.off, wanted.timeslice_us))
        if not applied.engines.covers(wanted.engines) or group in self._inherited:
            self._doubtful.add(group)
        await self._gpus[group.gpu].detach(group.process, wanted.engines)
        self._doubtful.discard(group)
        self._remember(group, wanted)

    def begin_again(self, gpu: int) -> None:
        """A GPU that was lost is back. Nobody knows what holds there: each lever is pulled, soon."""
        for resident in self._population.below(SliceOn(ROOT, gpu)):
            if gpu in resident.contexts:
                self._inherited.add(Member(resident.process, gpu))
        self.background.later(SliceOn(ROOT, gpu))

    @contextlib.asynccontextmanager
    async def released(self, here: Member, there: Member) -> AsyncIterator[None]:
        """A process runs with what its driver gives, and no lever of it is pulled, where it is and where it will be.

        Afterwards what is asked for it is to hold again, soon, wherever it is then.
        """
        lock, other = (self._locks.setdefault(group, trio.Lock()) for group in (here, there))
        async with lock, other:
            self._held |= {here, there}
            for group in (here, there):
                self._places.pop(group, None)
                self.watcher(group.gpu)
            try:
                if not await self._release_one(here):
                    raise fail(errno.EIO)
                self._applied.pop(here, None)
                self._doubtful.discard(here)
                self._inherited.discard(here)
                self._note_reasons(here, Off(Reason.MIGRATION))
                yield
            finally:
                self._note_reasons(here, Off())
                self._held -= {here, there}
                for group in (here, there):
                    self.watcher(group.gpu)
                    if self._population.holds(group):
                        self.background.later(group)

    def is_held(self, group: Member) -> bool:
        """Whether a process is let run, for the moment, without what is asked for it."""
        return group in self._held

    def is_busy(self, group: Member) -> bool:
        """Whether a lever of a process is being pulled. One that comes back from the host takes its time."""
        return group in self._locks and self._locks[group].locked()

    def _remember(self, group: Member, applied: Wanted) -> None:
        before = self.applied(group).off
        if applied == UNTOUCHED or not self._population.holds(group):
            self._applied.pop(group, None)
        else:
            self._applied[group] = applied
        if applied.off != before or group in self._inherited:
            self._note_reasons(group, applied.off)

    def _note_reasons(self, group: Member, off: Off) -> None:
        """Notes in the books why a process is off the runlist: before the hardware has more of it, and after it
        has less. A process that is gone has no books."""
        try:
            self._ledger.set_reasons(group, off.all.value, off.gr.value)
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def show(self, group: Group) -> None:
        """Tells compute.events of a group, and of every one above and below it, whose frozen state turned."""
        if not self._population.holds(group):
            self._frozen.discard(group)
            return
        above, asked = [], False
        for level in reversed(self._population.path(group)):
            asked = asked or self._ledger.books(level).frozen
            above.append((level, asked))
        above.pop()
        if isinstance(group, SliceOn):
            self._show_below(group, asked)
        else:
            self._count(group, asked)
            self._turn(group, asked and self._stands(group))
        for level, asked in reversed(above):
            self._turn(level, asked and self._all_stand(level))

    def _show_below(self, group: SliceOn, asked: bool) -> None:
        """The same of a slice, and of what is below it. `asked`: for it, or above it."""
        levels, stand = [(group.slice, asked)], dict[Slice, bool]()
        for slice_, asked in levels:  # those above first; it grows
            for child in self._population.children(slice_):
                levels.append((child, asked or self._ledger.books(SliceOn(child, group.gpu)).frozen))
        for slice_, asked in reversed(levels):
            still = all([stand[child] for child in self._population.children(slice_)])
            for process in self._population.members(slice_, group.gpu):
                member = Member(process, group.gpu)
                stands, frozen = self._stands(member), asked or self._ledger.books(member).frozen
                still = still and stands
                self._count(member, frozen)
                self._turn(member, stands and frozen)
            stand[slice_] = still
            self._count(SliceOn(slice_, group.gpu), asked)
            self._turn(SliceOn(slice_, group.gpu), asked and still)

    def _turn(self, level: Group, frozen: bool) -> None:
        if frozen != (level in self._frozen):
            (self._frozen.add if frozen else self._frozen.discard)(level)
            self._tell(level, Channel.COMPUTE)

    def _count(self, level: Group, asked: bool) -> None:
        """It is to be frozen from now on, or not any more."""
        if asked and level not in self._since:
            self._since[level] = trio.current_time()
        elif not asked and level in self._since:
            since = self._since.pop(level)
            self._frozen_s[level] = self._frozen_s.get(level, 0.0) + trio.current_time() - since

    def frozen_usec(self, group: Group) -> int:
        """How long the group was to be frozen, by itself or one above it, microseconds, since the mount. Whether it was
        by then does not count, as in cgroup.stat.local."""
        frozen = self._frozen_s.get(group, 0.0)
        if group in self._since:
            frozen += trio.current_time() - self._since[group]
        return round(frozen * 1e6)

    def born(self, group: Group) -> None:
        """There is a new slice: it is frozen from the start if one above it is, and nobody was told anything else."""
        if self.is_frozen(group):
            self._count(group, True)
            self._frozen.add(group)

    def sharers_changed(self, group: Group) -> None:
        """A process came to, or left, this path: the others' parts of a slice's timeslice change."""
        self.watcher(group.gpu)
        for level in self._population.path(group):
            if isinstance(level, SliceOn) and self._ledger.books(level).timeslice_us:
                self.background.later(level)

    async def release(self) -> bool:
        """Gives every process its TSGs and default timeslices back: nobody is left to do it later. Whether all have."""
        kept: list[Member] = []

        async def one(group: Member) -> None:
            if not await self._release_one(group):
                kept.append(group)

        async with trio.open_nursery() as nursery:
            for group in self._applied.keys() | self._inherited:
                nursery.start_soon(one, group)
        self._applied.clear()
        self._inherited.clear()
        self._places.clear()
        return not kept

    async def _release_one(self, group: Member) -> bool:
        process, gpu = group.process, self._gpus[group.gpu]
        applied, inherited = self.applied(group), group in self._inherited
        try:
            if inherited or applied.off:
                await gpu.attach(process)
                self._note_reasons(group, Off())
            if inherited or applied.timeslice_us:
                await gpu.set_timeslice(process, 0)
        except ProcessLookupError:
            pass
        except Exception as error:  # the others are to have theirs all the same
            if gpu.lost:
                return True  # nothing runs there, whatever it was given
            log.error("could not give process %d its GPU %d back: %s", process.pid, group.gpu, error)
            return False
        return True

    def forget(self, group: Group) -> None:
        """The group is gone."""
        if isinstance(group, Member):
            self._applied.pop(group, None)
            self._places.pop(group, None)
            self._locks.pop(group, None)
            self._doubtful.discard(group)
            self._inherited.discard(group)
        self._frozen.discard(group)
        self._since.pop(group, None)
        self._frozen_s.pop(group, None)
        self.background.forget(group)
