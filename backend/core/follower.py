"""The Follower: makes the hardware follow the books, by the freezes and levers of every process, path by path."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence

import attrs
import trio

from backend.common.errors import fail
from backend.core.background import Background
from backend.core.deadlines import Deadlines
from backend.core.entries import Resident
from backend.core.member import UNTOUCHED, Compute
from backend.core.population import Population
from backend.core.protocols import Gpu, Inherited, Ledger
from backend.core.reasons import ON, Engines, Off, Reason, counted, name_of
from backend.core.records import NOWHERE, Channel, Place, Wanted
from backend.core.settings import LEVERS, TIMESLICE
from backend.core.tally import Tally
from backend.core.turning import Turning
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn
from backend.space.space import Space

log = logging.getLogger(__name__)

BY_PROGRAMS = frozenset(lever.field for lever in LEVERS if lever.by_program)
"""Fields of the levers that programs make hold themselves."""


class Follower:
    """The state applied to each process, and the steps from there to the wanted one."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        tell: Callable[[Group, Channel], None],
        deadlines: Deadlines,
        tally: Tally,
    ) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._tell = tell
        self._tally = tally
        self._placed: dict[Member, None] = {}  # those with a place, as there may be thousands of records
        self.background = Background("compute", population, self._apply_all, deadlines, lambda record: record.compute)
        """Applies changes that have no writer."""
        self.space_of: Callable[[Member], Space | None] = lambda member: None
        """Returns the space in which a process runs beside others, with one timeslice for all of them."""
        self.has_spaces: Callable[[], bool] = lambda: False
        """Returns whether any process is in one: slices may have thousands."""
        self.turning = Turning(gpus, population, self.schedule)
        """The ends and beginnings of turns."""
        self.watcher: Callable[[int], None] = lambda gpu: None
        """Called with a GPU index when a process came to that GPU, left it or moved on it, or when a setting
        changed."""

    def take_over(self, inherited: Iterable[Inherited]) -> None:
        """Take over the groups of an earlier daemon.

        What it applied holds until a group is first followed: then each lever is pulled, whatever its state is said to
        be. A Gpu that holds that state already has nothing to do.
        """
        for one in inherited:
            if isinstance(one.group, Member):
                compute, applied = self._of(one.group), one.applied
                compute.inherited, compute.doubtful = True, one.doubtful
                if applied.frozen and not self.wanted(one.group).frozen:  # the former daemon's scheduler froze it
                    off = applied.off.without(Reason.FREEZE).with_(Reason.TURN)
                    applied = attrs.evolve(applied, off=off)
                self._remember(one.group, compute, applied)
        for gpu in self._gpus:
            self.show(SliceOn(ROOT, gpu))  # changes from now on are told

    def _of(self, group: Group) -> Compute:
        return self._population.record(group).compute

    def applied(self, group: Member) -> Wanted:
        """Return the state that is applied to a process now."""
        return self._of(group).applied

    def is_untouched(self, group: Member) -> bool:
        """Return whether a process has nothing that a lever would have to give back."""
        compute = self._of(group)
        is_known = not compute.inherited and not compute.unasked
        return compute.applied == UNTOUCHED and is_known and compute.turn_end is None

    def wanted(self, group: Member) -> Wanted:
        """Return what the whole path above a process adds up to: frozen if any level is, each lever combined as its row
        says, and, where no timeslice is asked for, the scheduler's.

        A slice's timeslice is shared by the processes below it that have a context, as a process's is by its TSGs.
        """
        frozen, held = False, dict[str, int]()
        for level in self._population.path(group):
            books = self._ledger.books(level)
            frozen = frozen or books.frozen
            for lever in LEVERS:
                if value := getattr(books, lever.field):
                    if lever.shared and isinstance(level, SliceOn):
                        sharers = self._sharers(level)
                        value = max(self._gpus[group.gpu].info.takes(lever).start, value // max(1, sharers))
                    held[lever.field] = lever.along(held.get(lever.field, value), value)
        place, off = self._of(group).place, Off()
        drains = place.drains
        if frozen:
            off = off.with_(Reason.FREEZE)
        if place.off and not drains:
            off = off.with_(Reason.TURN, place.engines)
        spent = self._of(group).spent
        if spent is not None:
            off = off.with_(Reason.QUOTA, spent)
        held.setdefault(TIMESLICE.field, (place.drain_us if drains else 0) or place.timeslice_us)
        return Wanted(off, drains=drains, spent=spent is not None, **held)

    def _sharers(self, level: SliceOn) -> int:
        """Return how many share a slice's timeslice: its processes with a context, those of a space as one."""
        sharers, spaces = self._population.sharers(level), dict[Space, int]()
        for resident in self._population.below(level) if self.has_spaces() else ():
            space = self.space_of(Member(resident.process, level.gpu)) if level.gpu in resident.contexts else None
            if space is not None:
                spaces[space] = spaces.get(space, -1) + 1
        return sharers - sum(spaces.values())

    # The scheduler's part

    def place(self, group: Member) -> Place:
        """Return the place that the scheduler gave a process."""
        return self._of(group).place

    def schedule(self, group: Member, place: Place) -> None:
        """Give a process a place: it is wanted from now on, and not applied yet."""
        self._of(group).place = place
        if place != NOWHERE and self._population.holds(group):
            self._placed[group] = None
        else:
            self._placed.pop(group, None)

    def scheduled(self, gpu: int) -> Sequence[Process]:
        """Return the processes that the scheduler of a GPU has a place for."""
        return [member.process for member in self._placed if member.gpu == gpu]

    def fall_back(self, group: Member) -> None:
        """Give up the scheduler's part of a process, as it could not be applied: want what holds now, and that the
        process runs."""
        applied, place = self.applied(group), self.place(group)
        self.schedule(group, Place(place.timeslice_us if place.drains else applied.timeslice_us))
        if applied.off.reasons & Reason.TURN or self._of(group).turn_end is not None:  # the levers may be off
            self.background.later(group)

    # The quota's part

    async def spend(self, group: Member, *, pulls: bool = True) -> None:
        """Stop a process for its used-up quota: at its gate where it has one, so that it launches nothing more, else by
        taking its GR engine off, if it `pulls` levers. Errors are those of the levers; the process runs on then."""
        try:
            await self.turning.spend(group, pulls=pulls)
            await self.apply(group)
        except BaseException:
            if self._population.holds(group):
                self._of(group).spent = None
                self.background.later(group)
            raise

    async def stop(self, group: Member) -> None:
        """Take the GR engine off for a process that was stopped for its quota and that its gate does not hold. Errors
        are those of the levers; the process stays at its gate then, as before."""
        compute = self._of(group)
        if compute.spent is not Engines.NONE:
            return
        compute.spent = Engines.GR
        try:
            await self.apply(group)
        except BaseException:
            if compute.spent is Engines.GR and self._population.holds(group):
                compute.spent = Engines.NONE
                self.background.later(group)
            raise

    async def restore(self, group: Member) -> None:
        """Let a process go on that was stopped for its quota. Errors are those of the levers; the process may stay
        stopped then, until this is called again or its levers are followed for another reason."""
        self._of(group).spent = None
        await self.apply(group)

    def forgive(self, group: Member) -> None:
        """Drop the quota's part of a process on a lost GPU: no lever moves there, and a GPU that is back is followed
        anew (:meth:`begin_again`)."""
        self._of(group).spent = None

    def spent(self, group: Member) -> Engines | None:
        """Return the engines that a process goes without for its used-up quota; None where its quota does not stop
        it."""
        return self._of(group).spent

    def runs(self, group: Member) -> bool:
        """Return whether the GR engine of a process is on the runlist."""
        return self._of(group).applied.engines is Engines.NONE

    def off(self, group: Group) -> Mapping[str, int]:
        """Return how many processes at or below a group are off the runlist for each reason, and how many with the GR
        engine alone (:func:`backend.core.reasons.counted`). A process that its quota holds at its gate counts for that
        reason too."""
        each = [resident.records[group.gpu].compute for resident in self._population.below(group)]
        found = dict(counted(compute.noted for compute in each))
        found[name_of(Reason.QUOTA)] += sum(_stands_at_its_gate(compute) for compute in each)
        return found

    def is_frozen(self, group: Group) -> bool:
        """Return whether a group is frozen, in the sense of cgroup.events (kernel/cgroup/freezer.c): that was asked
        for, at the group or above it, and holds for every process at or below it. A group without processes is frozen
        as soon as that is asked for."""
        asked = any(self._ledger.books(level).frozen for level in self._population.path(group))
        return asked and self._all_stand(group)

    def _all_stand(self, group: Group) -> bool:
        """Return whether no process of a group runs. Stops at the first that does, as there may be thousands."""
        return all(_stands(resident.records[group.gpu].compute) for resident in self._population.below(group))

    def follows(self, group: Group) -> bool:
        """Return whether the wanted state holds for every process at or below a group, and no lever is being pulled:
        then :meth:`apply` would have nothing to do but notify."""
        for resident in self._population.below(group):
            compute = resident.records[group.gpu].compute
            if compute.inherited or compute.unasked or compute.doubtful or compute.is_busy():
                return False
            wanted = self.wanted(Member(resident.process, group.gpu))
            if wanted != compute.applied or (compute.turn_end is not None and not _waits(wanted)):
                return False
        return True

    async def _apply_all(self, group: Group) -> None:
        await self.apply(group, BY_PROGRAMS)

    async def apply(self, group: Group, asked: Iterable[str] = ()) -> None:
        """Return once the wanted state holds for every process at or below a group; raise the first failure. What
        programs make hold themselves counts only where it is among the `asked` fields, else it follows soon: a program
        that refuses is frozen all the same.
        """
        failures: list[Exception] = []
        asked = frozenset(asked)

        async def one(resident: Resident) -> None:
            member = Member(resident.process, group.gpu)
            try:
                await self._apply_one(member, asked)
            except Exception as error:
                is_here = self._population.holds(member)
                if member == group:
                    failures.append(error if is_here else fail(errno.ESRCH))
                elif is_here and not isinstance(error, ProcessLookupError):
                    failures.append(error)
                # In a slice, a process that ends meanwhile leaves nothing to freeze, while it is in the books, too.

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

    async def _apply_one(self, group: Member, asked: Container[str]) -> None:
        process, gpu = group.process, self._gpus[group.gpu]
        compute = self._of(group)
        async with compute.lever():
            if self._of(group) is not compute:  # the process left, and may have come back with a new record
                raise fail(errno.ESRCH)
            wanted = self.wanted(group)  # read inside the lock: the last write wins
            applied = compute.applied
            again = compute.inherited
            if again and wanted.off:  # before all else: a Gpu that does not know yet would let it run at the next lever
                await self._detach(group, compute, attrs.evolve(applied, off=wanted.off))
                applied = compute.applied
            for lever in LEVERS:
                if not lever.by_program and (again or wanted.at(lever) != applied.at(lever)):
                    await gpu.set_lever(lever, process, wanted.at(lever))
                    applied = applied.with_(lever, wanted.at(lever))
                    self._remember(group, compute, applied)
            compute.unasked = compute.unasked or again
            there = _with_levers(wanted, applied)
            if wanted.off and (wanted.engines is not applied.engines or compute.doubtful):
                await self._detach(group, compute, there)
            elif not wanted.off and (again or applied.off):
                compute.doubtful = True  # it may already run when a failure is told
                compute.pulls += 1
                await gpu.attach(process)
                compute.doubtful = False
                self._remember(group, compute, there)
            elif there != applied:
                self._remember(group, compute, there)  # off the runlist for other reasons than before
            compute.inherited = False
            if not _waits(wanted):
                await self.turning.begin(group, compute)
            await self._ask_program(group, compute, wanted, asked)

    async def _ask_program(self, group: Member, compute: Compute, wanted: Wanted, asked: Container[str]) -> None:
        """Have a program make hold what is its own to do, where that is asked for; else soon."""
        for lever in LEVERS:
            if not lever.by_program or not (compute.unasked or wanted.at(lever) != compute.applied.at(lever)):
                continue
            if lever.field in asked:
                await self._gpus[group.gpu].set_lever(lever, group.process, wanted.at(lever))
                self._remember(group, compute, compute.applied.with_(lever, wanted.at(lever)))
            elif not compute.put_off_s:  # else it is tried again as it is
                self.background.later(group)
                return
        compute.unasked = False

    async def _detach(self, group: Member, compute: Compute, wanted: Wanted) -> None:
        """Take the engines of the wanted reasons off, and put the others on. Meanwhile the union of the old and new
        reasons is noted."""
        applied = compute.applied
        # Noted before the lever moves: a half-frozen process must be thawed too.
        self._remember(group, compute, attrs.evolve(wanted, off=applied.off | wanted.off))
        if not applied.engines.covers(wanted.engines) or compute.inherited:
            compute.doubtful = True
        compute.pulls += 1
        await self._gpus[group.gpu].detach(group.process, wanted.engines)
        compute.doubtful = False
        self._remember(group, compute, wanted)

    def begin_again(self, gpu: int) -> None:
        """Pull every lever on a GPU that was lost and is back, soon: what holds there is unknown."""
        for resident in self._population.below(SliceOn(ROOT, gpu)):
            if gpu in resident.contexts:
                resident.records[gpu].compute.inherited = True
        self.background.later(SliceOn(ROOT, gpu))

    def follow_anew(self, group: Member) -> None:
        """Pull every lever of a process again, soon: they reach it in another way from now on."""
        self._of(group).inherited = True
        self.background.later(group)

    @contextlib.asynccontextmanager
    async def released(self, here: Member, there: Member) -> AsyncIterator[None]:
        """Give a process back its driver's own state, and pull no lever of it on either GPU while the body runs.

        Afterwards its settings are applied again, soon, on whichever GPU it is then.
        """
        source, target = self._of(here), self._of(there)
        async with source.lever(), target.lever():
            source.held = target.held = True
            for group in (here, there):
                self.schedule(group, NOWHERE)
                self._of(group).spent = None
                self.watcher(group.gpu)
            is_released = False
            try:
                is_released = await self._release_one(here)
                if not is_released:
                    raise fail(errno.EIO)
                source.applied, source.doubtful, source.inherited, source.unasked = UNTOUCHED, False, False, False
                self._note_reasons(here, Off(Reason.MIGRATION))
                yield
            finally:
                if not is_released:  # some of its levers may have moved: pull each again
                    source.inherited = True
                self._note_reasons(here, source.applied.off)
                source.held = target.held = False
                for group in (here, there):
                    self.watcher(group.gpu)
                    if self._population.holds(group):
                        self.background.later(group)

    def is_held(self, group: Member) -> bool:
        """Return whether a process runs without its settings for the moment, as it is being migrated."""
        return self._of(group).held

    def is_busy(self, group: Member) -> bool:
        """Return whether a lever of a process is being pulled. Bringing a program back from the host takes seconds."""
        return self._of(group).is_busy()

    def _remember(self, group: Member, compute: Compute, applied: Wanted) -> None:
        """Record what is applied to a process, and note its reasons in the books where they changed."""
        before, compute.applied = compute.applied.off, applied
        if self._of(group) is compute and (applied.off != before or compute.inherited):  # it may have come back
            self._note_reasons(group, applied.off)

    def _note_reasons(self, group: Member, off: Off) -> None:
        """Note in the books, and at the GPU, why a process is off the runlist: before the hardware takes more of it
        off, and after it puts some back. A process that is gone has no books, and nothing is known of it any more. The
        GPU knows what is applied, also where the books fail."""
        gpu = self._gpus[group.gpu]
        try:
            self._ledger.set_reasons(group, off.all.value, off.gr.value)
        except OSError as error:
            if error.errno != errno.ENODEV:
                gpu.note_reasons(group.process, off)
                raise
        else:
            gpu.note_reasons(group.process, off)
        self._of(group).noted = off if off else ON

    def show(self, group: Group) -> None:
        """Notify compute.events of each group whose frozen state changed: this one, and those above and below it."""
        if not self._population.holds(group):
            return
        above, asked = [], False
        for level in reversed(self._population.path(group)):
            asked = asked or self._ledger.books(level).frozen
            above.append((level, asked))
        above.pop()
        if isinstance(group, SliceOn):
            self._show_below(group, asked)
        else:
            self._tally.ask(group, asked)
            self._turn(group, asked and _stands(self._of(group)))
        for level, asked in reversed(above):
            self._turn(level, asked and self._all_stand(level))

    def _show_below(self, group: SliceOn, asked: bool) -> None:
        """Do the same for a slice and everything below it. `asked`: whether a freeze was asked for, at it or above
        it."""
        levels, stand = [(group.slice, asked)], dict[Slice, bool]()
        for slice_, asked in levels:  # top down; the list grows
            for child in self._population.children(slice_):
                levels.append((child, asked or self._ledger.books(SliceOn(child, group.gpu)).frozen))
        for slice_, asked in reversed(levels):
            still = all([stand[child] for child in self._population.children(slice_)])
            for process in self._population.members(slice_, group.gpu):
                member = Member(process, group.gpu)
                stands, frozen = _stands(self._of(member)), asked or self._ledger.books(member).frozen
                still = still and stands
                self._tally.ask(member, frozen)
                self._turn(member, stands and frozen)
            stand[slice_] = still
            self._tally.ask(SliceOn(slice_, group.gpu), asked)
            self._turn(SliceOn(slice_, group.gpu), asked and still)

    def _turn(self, level: Group, frozen: bool) -> None:
        compute = self._of(level)
        if frozen != compute.shown:
            compute.shown = frozen
            self._tell(level, Channel.COMPUTE)

    def born(self, group: Group) -> None:
        """Note a new slice: where one above it is frozen, it is frozen from the start, which is no change to notify
        of."""
        if self.is_frozen(group):
            self._tally.ask(group, True)
            self._of(group).shown = True

    def left(self, group: Group) -> None:
        """Note that a group left the tree: the scheduler has no place for it."""
        if isinstance(group, Member):
            self._placed.pop(group, None)

    def sharers_changed(self, group: Group) -> None:
        """Note that a process came to a path or left it: its neighbours' parts of a slice's timeslice change."""
        self.watcher(group.gpu)
        for level in self._population.path(group):
            if isinstance(level, SliceOn):
                books = self._ledger.books(level)
                if any(getattr(books, lever.field) for lever in LEVERS if lever.shared):
                    self.background.later(level)

    async def release(self) -> bool:
        """Put every process's TSGs back on the runlist and restore default timeslices, since no daemon would do it
        later. Return whether all of that succeeded."""
        kept: list[Member] = []

        async def one(group: Member) -> None:
            if not await self._release_one(group):
                kept.append(group)

        async with trio.open_nursery() as nursery:
            for record in self._population.records():
                if isinstance(record.group, Member) and not self.is_untouched(record.group):
                    nursery.start_soon(one, record.group)
        for record in self._population.records():
            compute = record.compute
            compute.applied, compute.inherited, compute.place, compute.spent = UNTOUCHED, False, NOWHERE, None
            compute.unasked = False
        self._placed.clear()
        return not kept

    async def _release_one(self, group: Member) -> bool:
        process, gpu = group.process, self._gpus[group.gpu]
        applied, inherited, unasked = self._of(group).applied, self._of(group).inherited, self._of(group).unasked
        try:
            if inherited or applied.off:
                await gpu.attach(process)
                self._note_reasons(group, Off())
            await self.turning.begin(group, self._of(group))
            for lever in LEVERS:
                if inherited or applied.at(lever) or (unasked and lever.by_program):
                    await gpu.set_lever(lever, process, 0)
        except ProcessLookupError:
            pass
        except Exception as error:  # the rest is still to be released
            if gpu.lost:
                return True  # nothing runs there, whatever its levers were
            log.error("could not give process %d its GPU %d back: %s", process.pid, group.gpu, error)
            return False
        return True


def _with_levers(wanted: Wanted, applied: Wanted) -> Wanted:
    """Return a wanted state with what programs make hold as it is applied."""
    for lever in LEVERS:
        if lever.by_program:
            wanted = wanted.with_(lever, applied.at(lever))
    return wanted


def _waits(wanted: Wanted) -> bool:
    """Return whether a process is to wait for its turn, or for its quota."""
    return wanted.drains or wanted.spent or bool(wanted.off.reasons & Reason.TURN)


def _stands_at_its_gate(compute: Compute) -> bool:
    """Return whether a process waits at its gate for its quota while it is still on the runlist."""
    return compute.applied.spent and not compute.noted.reasons & Reason.QUOTA


def _stands(compute: Compute) -> bool:
    return compute.applied.frozen and not compute.doubtful
