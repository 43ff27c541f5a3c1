"""The Controller: where the books and the hardware meet. The filesystem talks to it and to nothing else.

A write asks for something; it returns once that holds, or with an error and everything as it was before.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import trio

from backend.common.errors import fail
from backend.common.lasting import lasting
from backend.common.turns import Turns
from backend.core import settings
from backend.core.bookkeeper import Bookkeeper
from backend.core.deadlines import Deadlines
from backend.core.follower import Follower
from backend.core.foresight import Foresight
from backend.core.frozen import FrozenSlices
from backend.core.lives import Memory as LivesMemory
from backend.core.member import Record, Turned
from backend.core.membership import Membership
from backend.core.migrator import Migrator
from backend.core.oom import OomKiller
from backend.core.over import Overs
from backend.core.past import Pasts
from backend.core.peaks import Mark, Peaks
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger, Moves
from backend.core.reclaimer import Reclaimer
from backend.core.records import OF_MEMORY, Activity, Books, Capability, Channel, Footprint, Peak, Throttled, Wanted
from backend.core.room import RoomNotices
from backend.core.settings import Lever, Setting
from backend.core.tally import LOST, PERIODS, SERVER_LOST, UNDONE, Memory
from backend.core.totals import Totals
from backend.core.turns import HOLD_US
from backend.core.walls import OuterWalls
from backend.core.workingset import WorkingSet
from backend.core.writers import Asked, Changes, Writers
from backend.process.delegated import delegate_of
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn
from backend.process.looks import identified
from backend.scheduler.memory.turns import WAIT_US
from backend.scheduler.schedulers import Schedulers
from backend.space.space import Space
from backend.space.spaces import Spaces

log = logging.getLogger(__name__)

DEADLINE_S = 5.0
"""Seconds after which a write that the hardware does not answer gives ETIMEDOUT; more where programs move as a whole
(:mod:`backend.core.deadlines`)."""
OF_ONE = ("compute.timeslice", "compute.freeze")
"""Controls that are pulled on each process for itself, where it runs by itself."""
LIMIT_AGAIN_S, LIMIT_LEFT_S = 0.25, 0.1
"""Seconds after which reclaim for a new limit is tried again that ended short, and that are left then of the time that
the write has: it is told that less was moved, and not that nothing answers."""


class Controller:
    """See the module. One a mount; everything on the trio thread but what a Gpu hands to threads of its own."""

    def __init__(
        self,
        ledger: Ledger,
        gpus: Iterable[Gpu],
        seconds: float = DEADLINE_S,
        scheduler: bool = True,
        moves: Moves | None = None,
        memory: Memory | None = None,
        lives: LivesMemory | None = None,
        hold_us: int | None = HOLD_US,
        turn_wait_us: int | None = WAIT_US,
        servers: tuple[Path, Path] | None = None,
    ) -> None:
        """`turn_wait_us` is how long a program waits at most for a turn of memory, microseconds; None: there are none.
        `moves`, `memory` and `lives` have what the daemon before us left, and leave it for the next. `servers` are the
        program of MPS's control daemon, and the directory of spaces; without them spaces have no servers."""
        self.ledger = ledger
        self.gpus: Mapping[int, Gpu] = {gpu.info.index: gpu for gpu in gpus}
        for gpu in self.gpus.values():
            ledger.add_gpu(gpu.info.index, gpu.info.capacity, gpu.info.granule)
        self.population = Population(ledger, self.gpus, delegate_of)
        self.population.watchers.append(self)
        self.listeners: list[Callable[[Group, Channel], None]] = []
        self.facts: dict[str, str] = {"ledger": ledger.name}
        """Shown in ``ggroup.backend``."""
        self.turns = Turns()
        """Of what is to be done for many that come at once."""
        self._deadlines = deadlines = Deadlines(seconds, lambda group: self.footprint(group).whole)
        self._reclaimer = Reclaimer(ledger, self.gpus, self.population, self.turns, deadlines)
        self._totals = Totals(
            self.gpus,
            self.population,
            lambda member: self._schedulers.throttled(member.gpu, self.population.below(member)),
            ledger.held,
            memory,
        )
        self.frozen = FrozenSlices(self.gpus)
        """In which programs that have no context yet wait, where there is an usher."""
        self.announce: Callable[[], Awaitable[None]] | None = None
        """What a writer of compute.freeze waits for once it holds for all that is there: that what comes waits, too."""
        self._totals.tally.turned.append(self.frozen.asked)
        self.population.dropped.append(self.frozen.left)
        self._follower = Follower(ledger, self.gpus, self.population, self._tell, deadlines, self._totals.tally)
        self._notices = RoomNotices(ledger, self.gpus, self.population)
        self._schedulers = Schedulers(
            *(ledger, self.gpus, self.population, self._follower),
            *(seconds, scheduler, self._totals.tally.periods),
            hold_us,
            turn_wait_us,
            self.space_on,
            self._notices.freed,
        )
        self.spaces = Spaces(ledger, self.gpus, self.population, self._server_lost, *(servers or (None, None)))
        """Programs that run beside each other, and their servers."""
        self.spaces.changed = self._spaces_changed
        self._follower.space_of, self._follower.has_spaces = self.space_on, self.spaces.any
        self._totals.ending = self._schedulers.ended
        self._writers = Writers(ledger, self.population, self._follower, self._schedulers, deadlines)
        self._foresight = Foresight(ledger, self.gpus, self.population, self._schedulers.order)
        self._peaks = Peaks(ledger)
        self.population.dropped.append(self._left)
        self._membership = Membership(
            *(ledger, self.gpus, self.population, self._follower, self._reclaimer, self._notices, self._totals),
            *(self._tell, lives),
        )
        self.lives = self._membership.lives
        """How long slices stay that were made. It is to be run once units are held."""
        self._killer = OomKiller(
            *(ledger, self.gpus, self.population, self._membership.exits.signal, self._membership.locate),
        )
        self._overs = Overs(ledger, self.population, self._killer, self._tell)
        self._reclaimer.left_over = self._overs.mark
        self._pasts = Pasts(self.gpus, self.population, self._tell)
        self.walls = OuterWalls(ledger, self.gpus, self.population, self.facts)
        """The hard limits of slices that the kernel keeps, too."""
        self._migrator = Migrator(
            ledger,
            self.gpus,
            self.population,
            self._follower,
            self._membership.admit,
            self._tell,
            self._totals.tally,
            moves,
        )
        self.bookkeeper = Bookkeeper(
            *(ledger, self.gpus, self.population, self._membership, self._follower, self._reclaimer),
            *(self._notices, self._schedulers, self._totals, self.turns, self.spaces),
            *(self._tell, seconds),
        )
        """What the GPUs talk to."""
        self.bookkeeper.presences.append(self.frozen.presence)
        self.released = False
        """Whether, at the end, every process was given its TSGs and default timeslices back."""
        self.handed_over = False
        """Whether they are to be left what they have."""
        self._membership.take_over()
        ledger.listen(self._tell, self._membership.configured)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs the GPUs and the watches until cancelled, then thaws whatever is frozen; started once they are."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lasting, "the watch for exits", self._membership.exits.run)
                nursery.start_soon(lasting, "compute", self._follower.background.run)
                nursery.start_soon(lasting, "reclaim", self._reclaimer.background.run)
                nursery.start_soon(lasting, "the watch for levels over their limit", self._overs.run)
                nursery.start_soon(lasting, "the watch for what is past the library", self._pasts.run)
                nursery.start_soon(lasting, "the watch for moves", self._membership.follow_cgroups)
                nursery.start_soon(lasting, "telling of room", self._notices.run)
                nursery.start_soon(lasting, "figures", self._totals.run)
                nursery.start_soon(lasting, "the tally", self._totals.tally.run)
                nursery.start_soon(self._schedulers.run)
                nursery.start_soon(self._foresight.run)
                nursery.start_soon(lasting, "the ledger", self.ledger.run)
                nursery.start_soon(lasting, "spaces", self.spaces.run)
                inherited = list(self.population.residents())
                for gpu in self.gpus.values():
                    await nursery.start(gpu.run, self.bookkeeper)
                for resident in inherited:
                    self._membership.follow(resident)
                nursery.start_soon(lasting, "the look for moves", self._migrator.run)
                self.walls.begin()
                nursery.start_soon(lasting, "limits of the kernel", self.walls.run)
                nursery.start_soon(lasting, "deadlines", self._deadlines.run)
                task_status.started()
        finally:
            try:
                self._totals.take_all_down()
            finally:  # whatever becomes of figures, nothing stays frozen
                if not self.handed_over:
                    self.walls.release()
                    with trio.move_on_after(self._deadlines.seconds, shield=True):
                        self.released = await self._follower.release()
                self._membership.exits.close()
                with trio.CancelScope(shield=True):
                    await self.spaces.close(handed_over=self.handed_over)

    def hand_over(self) -> None:
        """The end is near, and another daemon goes on from the books: what holds then is not given back."""
        self.handed_over = True
        self._totals.tally.hand_over()
        for gpu in self.gpus.values():
            gpu.hand_over()

    # Reading

    def books(self, group: Group) -> Books:
        """What the ledger knows. ENODEV when the group is gone."""
        return self.ledger.books(group)

    def activity(self, group: Group) -> Activity:
        """What a process has done, or every process that ever was in a slice. ENODEV when the group is gone."""
        if not self.population.holds(group):
            raise fail(errno.ENODEV)
        return self._totals.activity(group)

    def footprint(self, group: Group) -> Footprint:
        """What the GPU knows of the memory of a process, or summed over a slice. ENODEV when the group is gone."""
        if not self.population.holds(group):
            raise fail(errno.ENODEV)
        return self._totals.footprint(group)

    def gpu_current(self, gpu: int) -> int:
        """Bytes in use on a GPU, as far as its processes are in the books."""
        return self.books(SliceOn(ROOT, gpu)).current

    def applied_timeslice(self, group: Group) -> int:
        """The timeslice in force for a process, or asked for a slice, microseconds; 0 is the default."""
        if isinstance(group, SliceOn):
            return self.books(group).timeslice_us
        return self._follower.applied(group).timeslice_us

    def throttled(self, group: Group) -> Throttled:
        """How much a process, or those that ever were in a slice, were kept off the runlist by the scheduler."""
        return self._totals.throttled(group)

    def periods(self, group: Group) -> int:
        """How many periods of its quota have ended in which a group had something to do."""
        return self._totals.tally.counted(group, PERIODS)

    def turned(self, group: Group) -> Turned | None:
        """What memory that is scheduled with time made of a process, or of those in a slice now; None where none of
        them ever had a turn for its sake."""
        each = [one.records[group.gpu].scheduled.turned for one in self.population.below(group)]
        known = [one for one in each if one is not None]
        return sum(known[1:], known[0]) if known else None

    def working_set(self, group: Group) -> WorkingSet:
        """What a process used of its memory in its last turn, or those in a slice now did, of which that is known."""
        gpu = self.gpus[group.gpu]
        each = [gpu.working_set(one.process) for one in self.population.below(group)]
        return sum((one for one in each if one is not None), WorkingSet())

    def off(self, group: Group) -> Mapping[str, int]:
        """Return how many processes at or below a group are off the runlist, by the names of the reasons; and, as `gr`,
        how many of them with the GR engine alone."""
        return self._follower.off(group)

    def wanted(self, group: Member) -> Wanted:
        """What is to hold for a process."""
        return self._follower.wanted(group)

    def pending(self, group: Group) -> Mapping[str, bool]:
        """Whether something is still to be done for a group without a writer, by the part of its record."""
        return {"compute": group in self._follower.background, "memory": group in self._reclaimer.background}

    def is_frozen(self, group: Group) -> bool:
        """Whether the group is frozen: that was asked for, at it or above it, and nothing of it can run."""
        return self._follower.is_frozen(group)

    def frozen_usec(self, group: Group) -> int:
        """How long the group was to be frozen, by itself or by one above it, microseconds. Whether it was by then does
        not count, as in cgroup.stat.local."""
        return self._totals.tally.frozen_usec(group)

    def byte_seconds(self, group: Group) -> int:
        """Return the memory on the GPU times how long it was there, of what a group ever held, in byte-seconds."""
        return self._totals.byte_seconds(group)

    def began(self, group: Group) -> int | None:
        """Return since when a group is counted, in seconds of the Unix epoch; None where that is not known."""
        return self._totals.began(group)

    def moved(self, group: Group) -> int:
        """How often a process was moved to another GPU, or how often one came to this GPU in a slice."""
        return self._migrator.moved(group)

    def undone_count(self, group: Group) -> int:
        """How often the process, or one of the slice, undid by itself what was set, and it was set again."""
        return self._totals.tally.counted(group, UNDONE)

    def losses(self, group: Group) -> int:
        """How often the GPU was lost since a group is in the tree; of a process, the GPUs that it was on."""
        return self._totals.tally.counted(group, LOST)

    def servers_lost(self, group: Group) -> int | None:
        """How often the server of a space ended in which the process was, or of one in the slice; None where there was
        and is none."""
        count = self._totals.tally.counted(group, SERVER_LOST)
        is_spatial = count or self.books(group).spatial or any(map(self.space_on, self._members(group)))
        return count if is_spatial else None

    def space_on(self, member: Member) -> Space | None:
        """Return the space in which a process runs beside others on a GPU; None where it runs by itself."""
        space = self.spaces.of(member.process)
        if space is None or not self.gpus[member.gpu].activity(member.process).beside:
            return None
        return space

    def is_populated(self, group: Group) -> bool:
        """Whether a process of the group has a context on the GPU."""
        return self.population.sharers(group) > 0

    def capabilities(self) -> Mapping[str, Capability]:
        """What each control does on this machine: with several GPUs, the weakest counts."""
        return self._schedulers.weakest()

    # The directories

    async def make_process(self, pid: int) -> None:
        """mkdir of a live process, before it touches a GPU. ENOENT for none, EEXIST where it is, EBUSY for one that
        does not let itself be looked at."""
        try:
            process = await identified(pid)
            await self._membership.exits.watch(process)
            if self.population.resident(process) is not None:
                raise fail(errno.EEXIST)
            self._membership.admit(process, self.gpus)
            for group in [Member(process, gpu) for gpu in self.gpus]:
                if not self._follower.follows(group):
                    self._follower.background.later(group)
        except ProcessLookupError:
            raise fail(errno.ENOENT) from None

    def unmake_process(self, process: Process) -> None:
        """rmdir: EBUSY while the process has a context; what was set for it is forgotten."""
        resident = self.population.resident(process)
        if resident is None:
            raise fail(errno.ENOENT)
        if resident.contexts and self._membership.exits.lives(process):
            raise fail(errno.EBUSY)
        self._membership.expel(process)

    def unmake_slice(self, slice_: Slice) -> None:
        """rmdir: EBUSY while a process or a slice is below it. One that has just ended is none, as in cgroup.procs."""
        for gpu in self.gpus:
            for resident in list(self.population.below(SliceOn(slice_, gpu))):
                if self._membership.exits.lives(resident.process):
                    raise fail(errno.EBUSY)
                self._membership.expel(resident.process)
        if self.population.slice_entry(slice_) is not None:  # it may have been there for the last of them only
            self.population.unmake(slice_)

    # Writing

    async def set_high(self, group: Group, nbytes: int) -> None:
        """gmem.limit.high: returns once the group is under it. EBUSY where swap.max, or memory that cannot be moved,
        keeps it from getting there. EAGAIN where less was moved for another reason."""
        await self._set_limit(group, settings.HIGH, nbytes)

    async def set_max(self, group: Group, nbytes: int) -> None:
        """gmem.limit.max: one that raises it holds at once. A lower one returns once the group is under it, by reclaim;
        where that is not enough, by the end of members whose memory cannot be moved, as with memory.max. EBUSY, and
        none ends, where that would not be enough either. EAGAIN as for gmem.limit.high. Neither once one was killed for
        it: then the limit stays, as that of memory.max does."""
        await self._set_limit(group, settings.LIMIT_MAX, nbytes)
        if isinstance(group, SliceOn):
            self.walls.hold(group)

    async def _set_limit(self, group: Group, setting: Setting, nbytes: int) -> None:
        assert setting.control is not None
        changes, kills = {setting.field: nbytes}, setting is settings.LIMIT_MAX
        books = self.require(group, setting.control)
        before = self._writers.ask(group, books, changes, patient=kills)
        # Another writer may wait for members to end: none is killed for a limit that has been raised.
        raised = kills and nbytes > books.limit_max
        if before is None and raised:
            self._writers.overrule(group, changes)
            self._eased(group)
            return
        if before is not None and (raised or not self._short(group, setting)):
            self._writers.holds(group, changes)
            if nbytes > getattr(before, setting.field):
                self._eased(group)
            return
        async with self._writers.asked(group, changes, before, patient=kills) as asked:
            if not (short := self._short(group, setting)):
                self._eased(group)
                return
            with self._killer.held(group) if kills else contextlib.nullcontext():
                # The writer wants that, whichever member gives: no neighbour takes it.
                planned = self._planned(group, short)
                if planned < short and not (kills and await self._is_held_by_kills(group)):
                    raise fail(errno.EBUSY)
                promised, whole = self._promised(group), self._whole(group)
                await self._reclaimer.settle(group, short)
                promised -= self._kept(group, whole)
                if promised >= short:
                    await self._settled(group, setting, asked)
                ends = kills and self._killer.beyond(group) > 0 and await self._killer.is_enough(group)
            if ends:
                if isinstance(group, SliceOn) and self.population.holds(group):
                    self.population.keep(group.slice)  # the last of it may be among them
                asked.scope.deadline = math.inf  # the killer is bounded itself
                asked.leave()
                if await self._killed(group, changes):
                    return
            if self._short(group, setting):  # ENODEV for one that is gone
                raise fail(errno.EBUSY if promised < short else errno.EAGAIN)

    async def _settled(self, group: Group, setting: Setting, asked: Asked) -> None:
        """Returns once a group is under its limit, its programs give no more, or the write that asks for that has
        little time left. What runs may keep memory where it is for a while, as kernels that read over the bus do: a
        program lets go of them, and is asked again later."""
        gpu, until = self.gpus[group.gpu], asked.scope.deadline - LIMIT_LEFT_S
        with trio.move_on_at(until):
            while (short := self._short(group, setting)) and trio.current_time() + LIMIT_AGAIN_S < until:
                each = [gpu.footprint(resident.process) for resident in self.population.below(group)]
                if sum(max(0, one.movable - (one.unmovable or 0)) + one.later for one in each) < short:
                    return
                if not any(one.later for one in each):
                    return
                await trio.sleep(LIMIT_AGAIN_S)
                await self._reclaimer.settle(group, short)

    async def _killed(self, group: Group, changes: Changes) -> bool:
        """Wait until a new limit holds, or will not by a kill. Whether any was killed for it: that cannot be taken
        back, and so the limit is not, whatever becomes of the writer."""
        before, any_killed = self._killer.kills(group), False
        try:
            await self._overs.settled(group)
        finally:
            any_killed = self._killer.kills(group) != before
            if any_killed:
                self._writers.stand(group, changes)
        return any_killed

    def _short(self, group: Group, setting: Setting) -> int:
        """Bytes by which a group is over a limit, whatever another says. ENODEV when the group is gone."""
        books = self.ledger.books(group)
        return max(0, books.current - int(getattr(books, setting.field)))

    def _planned(self, group: Group, nbytes: int, but: Collection[Member] = ()) -> int:
        """Bytes of so many that members of a group can give, but for some, whichever members they are."""
        return sum(target.nbytes for target in self._reclaimer.plan(group, nbytes, but, owed=nbytes))

    async def _is_held_by_kills(self, group: Group) -> bool:
        """Whether a group can be brought under its gmem.limit.max by reclaim and by the end of all that may be
        killed."""
        doomed = await self._killer.doomed(group)
        left = self._killer.beyond(group) - self._killer.held_by(doomed)
        return left <= 0 or self._planned(group, left, doomed) >= left

    def _eased(self, group: Group) -> None:
        """A limit of a group has been raised, or holds."""
        self._notices.freed(group.gpu)
        self._overs.eased(group)
        if self.ledger.excess(group):
            self._reclaimer.background.later(group)

    def _promised(self, group: Group) -> int:
        """Bytes that the processes of a group could move by their own word. They are asked for more all the same: not
        all that they say stays on the GPU was charged."""
        gpu = self.gpus[group.gpu]
        each = [gpu.footprint(resident.process) for resident in self.population.below(group)]
        return sum(max(0, one.movable - (one.unmovable or 0)) for one in each)

    def _whole(self, group: Group) -> list[Process]:
        """Processes of a group that could go into the host as a whole, as far as is known before they are asked."""
        gpu = self.gpus[group.gpu]
        each = [resident.process for resident in self.population.below(group)]
        return [process for process in each if gpu.footprint(process).whole]

    def _kept(self, group: Group, processes: Collection[Process]) -> int:
        """Bytes of some processes that stay on the GPU, as is known once they were asked."""
        return sum(self.gpus[group.gpu].footprint(process).unmovable or 0 for process in processes)

    async def set_value(self, group: Group, setting: Setting, value: int) -> None:
        """Sets what holds as soon as it is in the books, or once a lever has followed: what is in the host already
        stays there, and the scheduler acts right after. EOPNOTSUPP where this machine cannot do what the setting is
        about; ERANGE for a value of a lever that the GPU does not take."""
        assert setting.control is not None
        books, changes = self.require(group, setting.control), {setting.field: value}
        if not isinstance(setting, Lever):
            await self._writers.note(group, books, changes)
        elif value and value not in self.gpus[group.gpu].info.takes(setting):
            raise fail(errno.ERANGE)
        else:
            await self._writers.pull(group, books, changes)

    async def set_spatial(self, group: Group, value: int) -> None:
        """compute.spatial: it is for programs that come from then on. EINVAL for a process, but for the 0 that it
        has."""
        books = self.require(group, "compute.spatial")
        if isinstance(group, SliceOn):
            await self._writers.note(group, books, {"spatial": value})
        elif value:
            raise fail(errno.EINVAL)

    async def set_sms(self, group: Group, value: int | Fraction) -> None:
        """compute.sm.max: SMs, 0 for all, or a part of those of the GPU. EOPNOTSUPP as for `set_value`, and for a
        program whose kernels cannot be placed."""
        count = value if isinstance(value, int) else int(value * self.gpus[group.gpu].info.sms) or 1
        await self.set_value(group, settings.SM_MAX, count)

    async def set_quota(self, group: Group, value: tuple[int, int | None]) -> None:
        """compute.max: the quota and the period, microseconds; without a period it stays what it was. Both are in the
        books at once, and the scheduler acts right after."""
        books, (quota_us, period_us) = self.require(group, "compute.max"), value
        changes = {"quota_us": quota_us}
        if period_us is not None:
            changes["period_us"] = period_us
        await self._writers.note(group, books, changes)

    def peak(self, group: Group, peak: Peak, mark: Mark | None = None) -> int:
        """The most that a group held: ever, or since `mark` was reset, bytes. ENODEV when the group is gone."""
        return self._peaks.ever(group, peak) if mark is None else self._peaks.highest(group, mark)

    def reset_peak(self, group: Group, mark: Mark) -> None:
        """gmem.peak starts again at gmem.current, or gmem.swap.peak at gmem.swap.current, for the holder of `mark`."""
        if self.gpus[group.gpu].lost:
            raise fail(errno.ENODEV)
        self._peaks.reset(group, mark)

    def leave_peak(self, group: Group, mark: Mark) -> None:
        """A mark is of no use any more."""
        self._peaks.leave(group, mark)

    async def reclaim(self, group: Group, nbytes: int) -> None:
        """gmem.reclaim: moves `nbytes` out now. EAGAIN if less could be moved."""
        self.require(group, "gmem.reclaim")
        with self._deadlines.deadline(group):
            if await self._reclaimer.reclaim(group, nbytes) < nbytes:
                raise fail(errno.EAGAIN)

    async def set_frozen(self, group: Group, frozen: bool) -> None:
        """compute.freeze: returns once no TSG of the group is running, or all that may run again do.

        Where that turns nothing, as a slice above is frozen, it is an event of the group all the same, as in cgroup2:
        there is nothing to wait for.
        """
        before, was = self.require(group, "compute.freeze"), self.is_frozen(group)
        await self._writers.pull(group, before, {"frozen": frozen})
        if frozen != before.frozen and was == self.is_frozen(group):
            self._tell(group, Channel.COMPUTE)
        if self.announce is not None:
            await self.announce()

    async def migrate(self, group: Group, gpu: str) -> None:
        """compute.migrate: returns once the process, or every process of a slice, runs on `gpu`, an index or a UUID.
        What is there is left alone. ENODEV for no such GPU; of a slice, those before one that failed have moved.
        """
        self.require(group, "compute.migrate")
        target = self._migrator.target(gpu)
        self.require(SliceOn(ROOT, target), "compute.migrate")
        if any(self.space_on(member) for member in self._members(group)):  # no client leaves its server
            raise fail(errno.EOPNOTSUPP)
        if target == group.gpu:
            return
        for resident in list(self.population.below(group)):
            if isinstance(group, Member) or group.gpu in resident.contexts:
                member = Member(resident.process, group.gpu)
                async with self._writers.turn_of(member):
                    await self._migrator.migrate(member, target)

    def require(self, group: Group, control: str) -> Books:
        """The books of a group. EOPNOTSUPP where this GPU cannot do what `control` says, of this program; ENODEV when
        the group is gone, and while the GPU is lost.

        What is set for a program before it has a context waits for it to come.
        """
        if isinstance(group, SliceOn):
            self.lives.look(group.slice)  # what is written now is for the cgroup that is there now
        books = self.ledger.books(group)
        gpu = self.gpus[group.gpu]
        if gpu.lost:
            raise fail(errno.ENODEV)
        if self._schedulers.capabilities(gpu).get(control, Capability.UNSUPPORTED) is Capability.UNSUPPORTED:
            raise fail(errno.EOPNOTSUPP)
        if control in OF_ONE and not self._acts_alone(group, control):
            raise fail(errno.EOPNOTSUPP)
        if control in OF_MEMORY and isinstance(group, Member) and not gpu.manages(group.process):
            resident = self.population.resident(group.process)
            if resident is None or group.gpu in resident.contexts:
                raise fail(errno.EOPNOTSUPP)
        return books

    def _members(self, group: Group) -> list[Member]:
        return [Member(resident.process, group.gpu) for resident in self.population.below(group)]

    def _acts_alone(self, group: Group, control: str) -> bool:
        """Whether a control acts on a group alone, of which processes may be in a space with others that are not in it:
        there a freeze is one of the library's gate, and a timeslice is that of all of them."""
        for member in self._members(group) if self.spaces.any() else ():
            space = self.space_on(member)
            if space is None or (isinstance(group, SliceOn) and group.slice.contains(space.slice)):
                continue
            if control != "compute.freeze" or not self.gpus[group.gpu].manages(member.process):
                return False
        return True

    def is_over(self, group: Group) -> bool:
        """Whether a group is over a limit, and reclaim has not changed that. ENODEV when the group is gone."""
        self.books(group)
        return self._overs.is_over(group)

    def is_past(self, group: Group) -> bool:
        """Return whether a program of a group holds much that its library did not see."""
        return self._pasts.is_past(group)

    def listens(self, group: Group, change: int) -> None:
        """A program whose memory it is opened (1) or closed (-1) a usermemfd."""
        self._reclaimer.listens(group, change)

    # Comings and goings

    def process_came(self, process: Process) -> None:
        """Watcher: nothing is kept for it yet."""

    def process_gone(self, process: Process) -> None:
        """Watcher: a move of it has no end any more, and its end is not waited for."""
        self._migrator.gone(process)
        self._killer.forget(process)
        self._pasts.forget(process)

    def process_moved(self, process: Process) -> None:
        """Watcher: nothing is kept for where it was."""

    def process_migrated(self, here: Member, there: Member) -> None:
        """Watcher: nothing is kept for where it was, and its record there has its heir."""

    def process_left(self, group: Member) -> None:
        """Watcher: nothing is kept for where it was to be."""

    def slice_made(self, slice_: Slice) -> None:
        """Watcher: it may be frozen from the start."""
        for gpu in self.gpus:
            self._follower.born(SliceOn(slice_, gpu))

    def slice_gone(self, slice_: Slice) -> None:
        """Watcher: nothing is kept for a slice but its records."""

    def slice_renewed(self, slice_: Slice) -> None:
        """Watcher: nothing that was set on it holds any more."""
        for gpu in self.gpus:
            self._membership.configured(SliceOn(slice_, gpu))

    def _left(self, record: Record, heir: Record | None) -> None:
        """A group has left the tree, and its record is dropped; its process may go on elsewhere, in `heir`."""
        self._follower.left(record.group)
        self._killer.left(record.group)
        self._reclaimer.wake(record)
        self._schedulers.poke(record.group.gpu)
        self._peaks.forget(record.group)
        self._totals.left(record, heir)

    def _spaces_changed(self) -> None:
        for gpu in self.gpus:
            self._schedulers.poke(gpu)

    def _server_lost(self, space: Space) -> None:
        """The server of a space ended, and its programs with it: they are told, and the slices above them."""
        for gpu in self.gpus:
            slice_ = SliceOn(space.slice, gpu)
            if not self.population.holds(slice_):
                continue
            groups = {level: None for level in self.population.path(slice_)}
            for member in self._members(slice_):
                if self.spaces.of(member.process) == space:
                    groups |= dict.fromkeys(self.population.path(member))
            self._totals.tally.server_lost(groups)
            for group in groups:
                self._tell(group, Channel.COMPUTE)

    def _tell(self, group: Group, channel: Channel) -> None:
        for listener in self.listeners:
            try:
                listener(group, channel)
            except Exception:  # what happened has happened; a listener must not undo it
                log.exception("a listener failed on %s of %s", channel.value, group)
