"""Processes that come, move to other cgroups and go: their charges go with them, and those that stay share anew."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping

import trio

from backend.common.errors import fail
from backend.core.descent import families_above
from backend.core.entries import Resident
from backend.core.families import Families, below, joined
from backend.core.follower import Follower
from backend.core.lives import Lives
from backend.core.lives import Memory as LivesMemory
from backend.core.population import Population
from backend.core.promises import Promises
from backend.core.protocols import Gpu, Ledger
from backend.core.reclaimer import Reclaimer
from backend.core.records import Channel
from backend.core.room import RoomNotices
from backend.core.totals import Totals
from backend.process.exits import ExitWatch
from backend.process.identity import Group, Member, Process, Slice, SliceOn, cgroup_of

log = logging.getLogger(__name__)

CGROUP_SWEEP_S = 0.25
"""How often some processes' cgroups are looked at: nothing announces that a process was moved."""

CGROUP_SWEEP_MOST = 16
"""Processes looked at each time, so that ten thousand of them cost less than 1 % of a CPU."""


class Membership:
    """The ways into the population, through it and out of it."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Mapping[int, Gpu],
        population: Population,
        follower: Follower,
        reclaimer: Reclaimer,
        notices: RoomNotices,
        totals: Totals,
        tell: Callable[[Group, Channel], None],
        memory: LivesMemory | None = None,
    ) -> None:
        self._ledger = ledger
        self._gpus = gpus
        self._population = population
        self._follower = follower
        self._reclaimer = reclaimer
        self._notices = notices
        self._totals = totals
        self._tell = tell
        self._promises = Promises(population)
        self.exits = ExitWatch(self._exited)
        """Sees them go."""
        self.lives = Lives(population, self._settle, memory)
        """Has slices go with their cgroups."""

    def take_over(self) -> None:
        """Goes on with what the books hold from before us. A process that ended meanwhile is dropped."""
        everybody = list(self._ledger.inherited())
        gone = self.exits.take_over({one.group.process for one in everybody if isinstance(one.group, Member)})
        inherited = []
        cgroups: dict[Process, Slice] = {}
        for one in everybody:
            if isinstance(one.group, Member) and one.group.process not in cgroups:
                process = one.group.process
                try:
                    if process in gone:
                        raise fail(errno.ESRCH)
                    cgroups[process] = cgroup_of(process.pid)
                except ProcessLookupError:
                    self.exits.unwatch(process)
                    self._ledger.remove(one.group)
                    continue
            inherited.append(one)
        self._population.take_over(inherited, cgroups)
        self.lives.take_over()
        self._totals.take_over()
        self._follower.take_over(inherited)

    async def welcome(self, process: Process, gpus: Iterable[int]) -> Resident:
        """A process is in the population, with these GPUs, and its exit will be noticed. ProcessLookupError; EBUSY
        where it does not let itself be looked at."""
        await self.exits.watch(process)
        return self.admit(process, gpus)

    def admit(self, process: Process, gpus: Iterable[int]) -> Resident:
        """As :meth:`welcome`, of one whose exit is watched for. ProcessLookupError for another."""
        resident = self._population.resident(process)
        if resident is not None and resident.gpus >= set(gpus):
            return resident
        if not self.exits.watches(process):  # it has ended meanwhile
            raise fail(errno.ESRCH)
        stale = self._population.by_pid(process.pid)
        if stale is not None and stale is not resident:  # the pid was recycled before its exit was noticed
            self.expel(stale.process)
        try:
            families = self._families(process) if resident is None else ()
            cgroup = cgroup_of(process.pid)
            self.lives.enters(cgroup)
            if not self.exits.watches(process):  # it was found to have ended, as its cgroup has gone
                raise fail(errno.ESRCH)
            resident = self._enter(process, cgroup, gpus, families)
            for gpu in gpus:  # one that runs has come to a slice that was frozen, perhaps
                self._follower.show(Member(process, gpu))
            return resident
        except OSError:  # it is gone, or we are short of something
            if resident is None:
                self._unwatch(process)
            raise

    def _enter(self, process: Process, cgroup: Slice, gpus: Iterable[int], families: Families) -> Resident:
        """A process that is welcome is in the population; it takes the places of its families that were kept for it."""
        promise = self._promises.end(process)
        try:
            return self._population.admit(process, cgroup, gpus, families)
        except OSError:
            if promise is not None:
                self._promises.renew(promise)
            raise

    def _unwatch(self, process: Process) -> None:
        """The exit of a process is not waited for any more, if it is neither in the tree nor promised anything."""
        if self._population.resident(process) is None and not self._promises.families(process):
            self.exits.unwatch(process)

    # Families

    async def ask(self, process: Process, families: Families) -> Resident | None:
        """Has a process be in the families that it names, each in the one before, below those that it is in already:
        at once where it is in the tree, else from when it comes. Return what it has in the tree, if it is there.

        ProcessLookupError for one that is gone; EBUSY where it does not let itself be looked at; EAGAIN for families of
        a user that are too many or too deep; E2BIG for more than a process can be in.
        """
        await self.exits.watch(process)
        if not self.exits.watches(process):  # it has ended meanwhile
            raise fail(errno.ESRCH)
        try:
            return self._ask(process, families)
        except OSError:
            self._unwatch(process)
            raise

    def _ask(self, process: Process, families: Families) -> Resident | None:
        """As :meth:`ask`, of one whose exit is watched for."""
        resident = self._population.resident(process)
        cgroup = cgroup_of(process.pid)
        if resident is not None:
            present = resident.families
        else:  # what was promised has those of its parents: they are not read for each message
            present = self._promises.families(process) or self._families(process)
        whole = joined(present, families)
        if not {family.id for family in families} <= {family.id for family in whole}:
            raise fail(errno.E2BIG)
        if resident is None and whole:
            self._promises.make(process, cgroup, whole)
        elif resident is None:
            self._unwatch(process)
        elif whole != resident.families or resident.slice != below(cgroup, whole):
            self._move_in(resident, cgroup, whole)
        return resident

    def _move_in(self, resident: Resident, cgroup: Slice, families: Families) -> None:
        """A process of the tree is in families, or EAGAIN and where it was."""
        before, promised = resident.families, self._population.promise(cgroup, families)
        try:
            self._relocate(resident, cgroup, families)
        finally:
            self._population.withdraw(promised)
        if resident.slice != resident.place:
            self._relocate(resident, cgroup, before)
            raise fail(errno.EAGAIN)

    def _families(self, process: Process) -> Families:
        """The families of a process that comes: those of its parents, and below them those that it named."""
        if not self._promises and not self._population.families:
            return ()
        return joined(families_above(process.pid, self._families_of), self._promises.families(process))

    def _families_of(self, pid: int) -> Families:
        """The families of the process that bears a number, if that lives and is in any."""
        for known in (self._population.by_pid(pid), self._promises.by_pid(pid)):
            if known is not None and known.families and self.exits.lives(known.process):
                return known.families
        return ()

    def place(self, process: Process) -> tuple[Slice, Families]:
        """The cgroup of a process, and the families that it is in below that: of one that is not in the tree those that
        it would be in. ProcessLookupError for one that is gone."""
        resident = self._population.resident(process)
        if resident is not None:
            return resident.cgroup, resident.families
        return cgroup_of(process.pid), self._families(process)

    # Processes that go

    def expel(self, process: Process) -> None:
        """A process is not in the population any more, whether or not it lives."""
        self.exits.unwatch(process)
        self._exited(process)

    def _settle(self, slice_: Slice) -> None:
        """Those below a slice that have ended are not in the population any more, and those that are in another cgroup
        are where that is."""
        below = {resident for gpu in self._gpus for resident in self._population.below(SliceOn(slice_, gpu))}
        for resident in below:
            if self.exits.lives(resident.process):
                self._follow_cgroup(resident)
            else:
                self.expel(resident.process)

    def _exited(self, process: Process) -> None:
        self._promises.end(process)
        resident = self._population.resident(process)
        if resident is None:
            return
        slice_ = resident.slice
        for gpu in resident.gpus:
            self._totals.ended(Member(process, gpu))
            self._gpus[gpu].forget(process)
        self._population.expel(process)
        for gpu in resident.gpus:
            self._left(SliceOn(slice_, gpu))
            self._notices.freed(gpu)

    def _left(self, group: Group) -> None:
        """A process is no longer below this slice, which may have gone with it, and some of those above."""
        for level in self._population.path(group):
            if self._population.holds(level):
                self._follower.sharers_changed(level)
                self._follower.show(level)
                for above in self._population.path(level):
                    self._tell(above, Channel.COMPUTE)
                return

    async def follow_cgroups(self) -> None:
        """Notices processes that were moved to another cgroup, a few at a time."""
        while True:
            await trio.sleep(CGROUP_SWEEP_S)
            for count, resident in enumerate(list(self._population.residents()), 1):
                if count % CGROUP_SWEEP_MOST == 0:
                    await trio.sleep(CGROUP_SWEEP_S)
                self._follow_cgroup(resident)

    def locate(self, process: Process) -> None:
        """Has a process that is in the tree be where its cgroup is now, without a wait for the next look."""
        if (resident := self._population.resident(process)) is not None:
            self._follow_cgroup(resident)

    def _follow_cgroup(self, resident: Resident) -> None:
        """A process is where its cgroup is; what goes wrong with one is no other's business."""
        process = resident.process
        try:
            cgroup = cgroup_of(process.pid)
            if self._population.resident(process) is resident and (
                cgroup != resident.cgroup or resident.slice != resident.place
            ):
                self._relocate(resident, cgroup)
        except OSError:
            pass  # it is gone; or descriptors are short: it is looked at again
        except Exception:
            if not resident.unfollowed:
                resident.unfollowed = True
                log.exception("process %d: its cgroup is not followed", process.pid)

    def _relocate(self, resident: Resident, cgroup: Slice, families: Families | None = None) -> None:
        """Moves a process in the books, and into other families where some are given; limits and policy of where it is
        now apply soon after. ProcessLookupError where it is found to have ended."""
        self.lives.enters(cgroup)
        if self._population.resident(resident.process) is not resident:
            raise fail(errno.ESRCH)
        former = resident.slice
        self._totals.take_down([Member(resident.process, gpu) for gpu in resident.gpus])  # that is of where it was
        if not self._population.relocate(resident, cgroup, families):
            return
        for gpu in resident.gpus:
            group = Member(resident.process, gpu)
            self._left(SliceOn(former, gpu))
            self._notices.freed(gpu)
            self._follower.sharers_changed(group)
            if resident.families:  # what was frozen goes on to be
                self._follower.show(SliceOn(below(cgroup, resident.families[:1]), gpu))
            self._follower.show(group)
            for level in self._population.path(group):
                self._tell(level, Channel.COMPUTE)
        self.follow(resident)

    def follow(self, resident: Resident) -> None:
        """Has the limits and the policy of where a process is hold for it, soon."""
        for gpu in resident.gpus:
            self.configured(Member(resident.process, gpu))

    def configured(self, group: Group) -> None:
        """What is asked of a group is to hold, soon: it is elsewhere now, or another wrote into the books, as the
        owner of a slice may in the kernel's."""
        if self._population.holds(group):
            self._follower.background.later(group)
            self._follower.watcher(group.gpu)
            self._reclaimer.background.later(group)
