"""Membership: processes that come, move to other cgroups and go, with their charges."""

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
"""Seconds between two looks at some processes' cgroups: nothing announces that a process was moved."""

CGROUP_SWEEP_MOST = 16
"""Most processes looked at each time, so that ten thousand of them cost less than 1 % of a CPU."""


class Membership:
    """The ways of processes into the population, through it and out of it."""

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
        """Watches for exits."""
        self.lives = Lives(population, self._settle, memory)
        """Drops slices with their cgroups."""

    def take_over(self) -> None:
        """Take over what the books hold from the previous daemon. Processes that ended meanwhile are dropped."""
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
        """Have a process in the population, with these GPUs, and watch for its exit. ProcessLookupError; EBUSY where
        the process cannot be looked at."""
        await self.exits.watch(process)
        return self.admit(process, gpus)

    def admit(self, process: Process, gpus: Iterable[int]) -> Resident:
        """Do as :meth:`welcome`, for a process that is watched. ProcessLookupError for any other."""
        resident = self._population.resident(process)
        if resident is not None and resident.gpus >= set(gpus):
            return resident
        if not self.exits.watches(process):  # it ended meanwhile
            raise fail(errno.ESRCH)
        stale = self._population.by_pid(process.pid)
        if stale is not None and stale is not resident:  # the pid was recycled before the exit was noticed
            self.expel(stale.process)
        try:
            families = self._families(process) if resident is None else ()
            cgroup = cgroup_of(process.pid)
            self.lives.enters(cgroup)
            if not self.exits.watches(process):  # it was found to have ended, with its cgroup
                raise fail(errno.ESRCH)
            resident = self._enter(process, cgroup, gpus, families)
            for gpu in gpus:  # a running process may have come into a frozen slice
                self._follower.show(Member(process, gpu))
            return resident
        except OSError:  # the process is gone, or a resource is exhausted
            if resident is None:
                self._unwatch(process)
            raise

    def _enter(self, process: Process, cgroup: Slice, gpus: Iterable[int], families: Families) -> Resident:
        """Enter a process into the population, in the places that were kept for its families."""
        promise = self._promises.end(process)
        try:
            return self._population.admit(process, cgroup, gpus, families)
        except OSError:
            if promise is not None:
                self._promises.renew(promise)
            raise

    def _unwatch(self, process: Process) -> None:
        """Stop watching for the exit of a process that is neither in the tree nor promised anything."""
        if self._population.resident(process) is None and not self._promises.families(process):
            self.exits.unwatch(process)

    # Families

    async def ask(self, process: Process, families: Families) -> Resident | None:
        """Put a process into the families that it names, each in the one before, below those that it is in already: at
        once where it is in the tree, else from when it comes.

        Return its resident, or None if it is not in the tree. ProcessLookupError for a process that is gone; EBUSY
        where it cannot be looked at; EAGAIN for families that are too deep or too many for the user; E2BIG for more
        than a process can be in.
        """
        await self.exits.watch(process)
        if not self.exits.watches(process):  # it ended meanwhile
            raise fail(errno.ESRCH)
        try:
            return self._ask(process, families)
        except OSError:
            self._unwatch(process)
            raise

    def _ask(self, process: Process, families: Families) -> Resident | None:
        """Do as :meth:`ask`, for a process that is watched."""
        resident = self._population.resident(process)
        cgroup = cgroup_of(process.pid)
        if resident is not None:
            present = resident.families
        else:  # a promise includes the parents' families, so that not every message reads them
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
        """Move a process of the tree into families; on EAGAIN it is where it was."""
        before, promised = resident.families, self._population.promise(cgroup, families)
        try:
            self._relocate(resident, cgroup, families)
        finally:
            self._population.withdraw(promised)
        if resident.slice != resident.place:
            self._relocate(resident, cgroup, before)
            raise fail(errno.EAGAIN)

    def _families(self, process: Process) -> Families:
        """Return the families of a process that comes: those of its parents, and below them those that it named."""
        if not self._promises and not self._population.families:
            return ()
        return joined(families_above(process.pid, self._families_of), self._promises.families(process))

    def _families_of(self, pid: int) -> Families:
        """Return the families of the process that bears a pid, if it lives and is in any."""
        for known in (self._population.by_pid(pid), self._promises.by_pid(pid)):
            if known is not None and known.families and self.exits.lives(known.process):
                return known.families
        return ()

    def place(self, process: Process) -> tuple[Slice, Families]:
        """Return the cgroup of a process and the families that it is in below that; for a process outside the tree, the
        families that it would be in. ProcessLookupError for one that is gone."""
        resident = self._population.resident(process)
        if resident is not None:
            return resident.cgroup, resident.families
        return cgroup_of(process.pid), self._families(process)

    # Processes that go

    def expel(self, process: Process) -> None:
        """Drop a process from the population, whether or not it lives."""
        self.exits.unwatch(process)
        self._exited(process)

    def _settle(self, slice_: Slice) -> None:
        """Bring the population below a slice up to date: drop processes that have ended, move those that are in another
        cgroup."""
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
        """Notify a slice that a process left, if it is still there, else the lowest one above that is."""
        for level in self._population.path(group):
            if self._population.holds(level):
                self._follower.sharers_changed(level)
                self._follower.show(level)
                for above in self._population.path(level):
                    self._tell(above, Channel.COMPUTE)
                return

    async def follow_cgroups(self) -> None:
        """Notice processes that were moved to another cgroup, a few at a time."""
        while True:
            await trio.sleep(CGROUP_SWEEP_S)
            for count, resident in enumerate(list(self._population.residents()), 1):
                if count % CGROUP_SWEEP_MOST == 0:
                    await trio.sleep(CGROUP_SWEEP_S)
                self._follow_cgroup(resident)

    def locate(self, process: Process) -> None:
        """Follow a process of the tree to its current cgroup without waiting for the next look."""
        if (resident := self._population.resident(process)) is not None:
            self._follow_cgroup(resident)

    def _follow_cgroup(self, resident: Resident) -> None:
        """Follow a process to its current cgroup; a failure affects this process alone."""
        process = resident.process
        try:
            cgroup = cgroup_of(process.pid)
            if self._population.resident(process) is resident and (
                cgroup != resident.cgroup or resident.slice != resident.place
            ):
                self._relocate(resident, cgroup)
        except OSError:
            pass  # it is gone, or descriptors are short: it is looked at again
        except Exception:
            if not resident.unfollowed:
                resident.unfollowed = True
                log.exception("process %d: its cgroup is not followed", process.pid)

    def _relocate(self, resident: Resident, cgroup: Slice, families: Families | None = None) -> None:
        """Move a process in the books, and into other `families` if given. The limits and the policy there are applied
        soon after. ProcessLookupError where the process is found to have ended."""
        self.lives.enters(cgroup)
        if self._population.resident(resident.process) is not resident:
            raise fail(errno.ESRCH)
        former = resident.slice
        self._totals.take_down([Member(resident.process, gpu) for gpu in resident.gpus])  # charges of where it was
        if not self._population.relocate(resident, cgroup, families):
            return
        for gpu in resident.gpus:
            group = Member(resident.process, gpu)
            self._left(SliceOn(former, gpu))
            self._notices.freed(gpu)
            self._follower.sharers_changed(group)
            if resident.families:  # a freeze goes along
                self._follower.show(SliceOn(below(cgroup, resident.families[:1]), gpu))
            self._follower.show(group)
            for level in self._population.path(group):
                self._tell(level, Channel.COMPUTE)
        self.follow(resident)

    def follow(self, resident: Resident) -> None:
        """Apply the limits and the policy of a process's slice to it, soon."""
        for gpu in resident.gpus:
            self.configured(Member(resident.process, gpu))

    def configured(self, group: Group) -> None:
        """Apply a group's settings soon: it moved, or another program wrote into the books, as a slice's owner may in
        the kernel's."""
        if self._population.holds(group):
            self._follower.background.later(group)
            self._follower.watcher(group.gpu)
            self._reclaimer.background.later(group)
