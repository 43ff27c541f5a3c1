"""The scheduler of one GPU at work: looks at what was used, asks the core, and has the Follower make it hold.

It acts rarely. Each change is a call of the driver, or several, that takes 1 to 2 ms, in which no neighbour on the GPU
is disturbed, but the driver's locks are held: no more than RATE + BURST of them are made in any second.

A turn ends gate first (``ends.py``). All turns that end in one look are waited for at the same time, so that no program
waits for longer because of others; and the programs whose turns begin are on the runlist by then.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs
import trio

from backend.common.errors import fail
from backend.common.lasting import lasting
from backend.core.deadlines import deadline
from backend.core.entries import Resident
from backend.core.follower import Follower
from backend.core.member import Failure, Scheduled, Throttle
from backend.core.nextuse import Order
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.records import NOWHERE, Place, Throttled
from backend.core.turns import HOLD_US, TurnEnd
from backend.process.identity import ROOT, Group, Member, Process, SliceOn, is_borne
from backend.scheduler import holding
from backend.scheduler.beside import Beside
from backend.scheduler.bucket import Bucket
from backend.scheduler.core import Core
from backend.scheduler.ends import Ends
from backend.scheduler.failing import AGAIN_MOST_S, AGAIN_S, PASSING
from backend.scheduler.limiter import Limiter
from backend.scheduler.memory.level import Levers
from backend.scheduler.memory.levels import Levels
from backend.scheduler.memory.turns import WAIT_US
from backend.scheduler.parts import REST, Pace
from backend.scheduler.ranks import behind
from backend.scheduler.shares import Contender, Level
from backend.scheduler.use import Sample
from backend.space.space import Space

log = logging.getLogger(__name__)

TICK_S = 0.1
"""Seconds between two looks while things change: the trace of a real GPU is read as often."""
CALM_TICK_S = 0.25
"""Seconds between two looks after CALM of them that changed nothing."""
CALM = 10
"""Looks that changed nothing after which they are fewer."""
EACH_S = 0.001
"""Seconds between two looks for each contender at least, so that a thousand cost no more of a CPU than ten."""
SETTLE_S = 0.01
"""Seconds for which a look is put off, so that programs that come together are looked at together."""
RATE, BURST = 25, 15
"""Calls of the driver a second, and at once: no more than 40 in any second. With those by which a GPU looks whether
what was done still holds (``nvidia/keeper.py``) it is 50."""
LEVER = 0.2
"""Part of the time that a write may take (1 s by default) for one lever. It takes 2 ms as a rule; all others wait."""
MEMORY_LEVER = 1.0
"""The same of a turn of memory, for which nothing else waits. Each lever is some 30 calls, where new TSGs are looked
for, and each of these waits for one that makes 64 MiB of the host, say, which takes 20 ms. Without it the program would
have all of its memory beside the next one, which would read its own over the bus."""
END_CALLS, BEGIN_CALLS = 1, 2
"""Calls of the driver that a turn of memory takes for each context: one that has its GR engine off the runlist; one
that puts it back, and one that looks whether it is on."""
TURNS_USE = 0.8
"""Part of the calls that turns of memory count on: what they cannot do in time they would keep waiting for, and others
have the rest."""
SPARED = 6
"""Calls that are spared for the next turn of memory, while there are any: two programs change places."""
PAY_S, PAY_TIMES = 0.02, 50
"""Seconds after which is looked again whether a turn of memory may be ended, or begun, and how often: half a call comes
back in it."""


class Scheduler:
    """See the module. It leaves a GPU alone on which fewer than two processes could run."""

    def __init__(
        self,
        gpu: Gpu,
        ledger: Ledger,
        population: Population,
        follower: Follower,
        seconds: float,
        periods: Callable[[Group, int], None] = lambda group, count: None,
        hold_us: int | None = HOLD_US,
        levels: Levels | None = None,
        wait_us: int = WAIT_US,
        space_of: Callable[[Member], Space | None] = lambda member: None,
    ) -> None:
        """`seconds` is what a write may take; `periods` is told of the periods of quotas that have ended. For `hold_us`
        microseconds after its last request a program has those of worse priority held; None: it never has. Programs
        that use more memory than there is room for have turns of it, as `levels` of the machine say, and wait for
        `wait_us` microseconds at most; without those, there are none. `space_of` is the space in which a process runs
        beside others."""
        self._gpu = gpu
        self._index = gpu.info.index
        self._ledger = ledger
        self._population = population
        self._follower = follower
        self._seconds = seconds
        self._hold_us = hold_us
        self._behind: Mapping[Process, Sequence[Process]] = {}
        self._core = Core(gpu.info.timeslice_default_us)
        self._space_of = space_of
        self._beside = Beside(self._index)
        self._bucket = Bucket(RATE, BURST)
        self._ends = Ends(
            *(follower, self._member, self._of, self._pull),
            *(self._is_exact, self._is_moving, self._is_away, LEVER * seconds),
        )
        self._rests: set[Process] = set()  # those that wait for a turn of memory
        self._wait_us = wait_us
        self._levels = Levels({self._index: gpu}, ledger, population, is_on=False) if levels is None else levels
        self._levels.enter(
            self._index,
            Levers(
                *(self._rest, self._wake, self._rests.__contains__, self._is_drained, self._is_undrained),
                *(self._core.wants, self._wait_of, self._levers_us),
            ),
        )
        self._contenders: Sequence[Contender] = ()
        self._last: dict[
            Process, tuple[int | None, ...]
        ] = {}  # time used so far, its estimate, stays, launches, periods
        self._seen_contexts: dict[Process, int] = {}  # contexts of each, as of the last look
        self._looked = 0.0
        self._busy = 0.0  # seconds of a CPU that the last part of the last look took
        self._poked = trio.Event()
        self._limiter = Limiter(
            *(gpu, ledger, population, follower),
            *(self._bucket, LEVER * seconds, self._stood, periods),
            space_of,
        )

    def poke(self) -> None:
        """Has it look soon: a process came, went or moved, or what is asked of a group changed."""
        self._poked.set()
        self._limiter.poke()

    def ended(self, process: Process) -> None:
        """Takes note that a process is about to be gone: what it did last is charged to quotas."""
        self._limiter.ended(process)

    def late(self, process: Process, us: int) -> None:
        """Takes note that a process that has ended had the engine for so many microseconds more than was told."""
        self._limiter.late(process, us)

    def greet(self, process: Process) -> None:
        """Takes note that a program of a process speaks, as the first of it or anew: after an exec, say, it is another
        one. How its last turns ended says nothing of its next ones."""
        self._of(process).undrained = None

    def throttled(self, resident: Resident) -> Throttled:
        """How often, and for how long, a process was kept off the runlist by others that go before it."""
        throttle = resident.records[self._index].scheduled.throttle
        if throttle is None:
            return Throttled()
        now = 0.0 if throttle.since is None else trio.current_time() - throttle.since
        return Throttled(throttle.times, throttle.usec + int(now * 1e6))

    def order(self) -> Order:
        """Return what comes on this GPU, as it was decided last, and as far as that holds: a process that could not be
        taken off the runlist runs."""
        order = self._core.order(self._contenders)
        times = self._levels.next_use()
        order = attrs.evolve(order, waiting=[*order.waiting, *sorted(times, key=lambda process: times[process])])
        off = {process for process in self._follower.scheduled(self._index) if self._place(process).off}
        return attrs.evolve(order, waiting=[process for process in order.waiting if process in off])

    def _of(self, process: Process) -> Scheduled:
        return self._population.record(self._member(process)).scheduled

    def _member(self, process: Process) -> Member:
        return Member(process, self._index)

    async def run(self) -> None:
        """Schedules until cancelled. What it brought about the Follower takes back."""
        async with trio.open_nursery() as nursery:
            self._ends.nursery = nursery
            for process in self._follower.scheduled(self._index):
                self._ends.wait(process)
            self._ends.nursery.start_soon(lasting, f"the quotas of GPU {self._index}", self._limiter.run)
            await self._look()

    async def _look(self) -> None:
        calm = 0
        while True:
            pace = Pace()
            if self._poked.is_set():
                self._poked = trio.Event()
                self._contenders = await self._find(pace)
                self._rank()
                calm = 0
            # A bug here shall not end the mount: without it all programs run as the driver lets them.
            try:
                changed = await self._step(pace)
            except Exception:
                log.exception("GPU %d: the scheduler failed", self._index)
                changed = False
            calm = 0 if changed else calm + 1
            if len(self._contenders) < 2 and not changed and not self._levels.count(self._index):
                await self._poked.wait()
            else:
                tick = max(CALM_TICK_S if calm > CALM else TICK_S, EACH_S * len(self._contenders))
                with trio.move_on_after(tick):
                    await self._poked.wait()
            await trio.sleep(max(SETTLE_S, EACH_S * len(self._contenders) / 4, REST * self._busy))

    # The contenders

    async def _find(self, pace: Pace) -> Sequence[Contender]:
        """The processes that have a context, and are not frozen; those of a space as one. The books are not asked each
        time."""
        found: list[Contender] = []
        if self._gpu.lost:
            return found
        for resident in list(self._population.below(SliceOn(ROOT, self._index))):
            await pace.pause()
            group = self._member(resident.process)
            if not self._population.holds(group) or self._follower.is_held(group):
                continue
            if self._index in resident.contexts and not resident.records[self._index].scheduled.ending:
                levels = self._population.path(self._member(resident.process))[-2::-1]  # without the root
                try:
                    books = [self._ledger.books(level) for level in levels]
                except OSError:
                    continue  # the kernel has seen it die, and we have not yet
                if not any(one.frozen for one in books):
                    path = tuple(
                        Level(level, one.priority, one.weight) for level, one in zip(levels, books, strict=True)
                    )
                    found.append(Contender(resident.process, path, any(one.timeslice_us for one in books)))
        return self._beside.join(found, lambda process: self._space_of(self._member(process)))

    def _rank(self) -> None:
        """Says which programs go behind others in the busy periods of these."""
        found = {} if self._hold_us is None else self._beside.ranked(behind(self._contenders))
        if found != self._behind and self._hold_us is not None:
            self._behind = found
            self._gpu.rank(found, self._hold_us)

    async def _samples(self, pace: Pace) -> Mapping[Process, Sample]:
        samples = {}
        last, self._last = self._last, {}
        self._seen_contexts.clear()
        for process in self._beside.everybody(self._contenders):
            await pace.pause()
            if not self._population.holds(self._member(process)):
                continue
            activity = self._gpu.activity(process)
            figures = self._last[process] = (
                *(activity.gpu_usec, activity.gpu_usec_estimate, activity.stays),
                *(activity.held_launches, activity.busy_periods),
            )
            exact, estimate, stays, launches, periods = (
                None if now is None else max(0, now - (now if before is None else before))
                for now, before in zip(figures, last.get(process, (None,) * len(figures)), strict=True)
            )
            # An estimate grows about once a second: that it did not says nothing.
            used = exact if exact is not None else estimate or None
            pending = activity.pending
            self._seen_contexts[process] = activity.contexts
            samples[process] = Sample(
                used,
                None if pending is None else pending > 0,
                activity.contexts,
                stays,
                stands=self._limiter.stands(process),
                held_launches=launches,
                busy_periods=periods,
                stood=self._limiter.stood(process),
                quota_us=self._limiter.quota_us(process),
            )
        return samples

    def _is_exact(self, process: Process) -> bool:
        """Whether the machine tells exactly what a process uses."""
        return self._gpu.activity(process).gpu_usec is not None

    def _is_moving(self, process: Process) -> bool:
        """Whether memory of a process may be moving, so that its program does nothing else."""
        return self._gpu.is_leaving(process) or self._population.record(self._member(process)).memory.may_come()

    def _is_away(self, process: Process) -> bool:
        """Whether memory of a process is in the host."""
        try:
            return self._ledger.books(self._member(process)).swap > 0
        except OSError:
            return False

    # What is done about it

    async def _step(self, pace: Pace) -> bool:
        """One look and what follows from it; whether anything was, or is still to be, changed."""
        now = trio.current_time()
        window, self._looked = int((now - self._looked) * 1e6) if self._last else 0, now
        if len(self._contenders) < 2:
            self._last = {}
        samples = await self._samples(pace) if len(self._contenders) > 1 else {}
        samples = self._beside.together(window, self._ends.observe(samples))
        self._drop_strays()
        decided = await pace.end(self._core.decide(window, self._contenders, samples, self._rests))
        places = self._beside.spread(decided)
        # A turn of memory is one program's; those of a space run, and wait, together.
        self._levels.look(self._index, [one for one in self._contenders if one.process not in self._beside])
        for process in self._follower.scheduled(self._index):
            if process in self._rests and not self._gpu.lost:
                continue
            if self._gpu.lost:  # nothing is there that a lever could be pulled on
                self._drop(process)
            else:
                places.setdefault(process, NOWHERE)
        changes = [(p, place) for p, place in places.items() if place != self._place(p) and not self._is_stuck(p)]
        self._busy = pace.busy
        async with trio.open_nursery() as ends:
            for process, place in sorted(changes, key=self._urgency):
                group = self._member(process)
                if not self._population.holds(group) or self._follower.is_busy(group) or process in self._rests:
                    continue  # with the next look
                if not self._take(self._calls(process, place)):
                    break
                if place.off and not self._place(process).off:
                    ends.start_soon(self._change, process, place)
                else:
                    await self._change(process, place)
        return bool(changes)

    # Turns of memory

    def _wait_of(self, process: Process) -> int:
        """How long a process may wait for one, microseconds: the shortest that is asked for on its path."""
        levels = self._population.path(self._member(process))
        asked = [us for level in levels if (us := self._ledger.books(level).wait_max_us)]
        return min(asked, default=self._wait_us)

    def _levers_us(self, process: Process) -> int:
        """In how many microseconds the calls come back that a turn of memory of a process takes, where each level that
        has turns takes as many."""
        rate = (
            TURNS_USE * (RATE - (holding.RATE if self._limiter.pulls else 0)) / max(1, self._levels.count(self._index))
        )
        # As they were at the last look: this is asked for with each piece of memory that moves.
        contexts = self._seen_contexts.get(process) or self._contexts(process)
        return math.ceil((END_CALLS + BEGIN_CALLS) * contexts * 1e6 / rate)

    def _take(self, calls: int) -> bool:
        """Whether there are so many calls of the driver for what is no turn of memory; they are taken then."""
        spared = SPARED if self._levels.count(self._index) else 0
        return self._bucket.take(trio.current_time(), calls, spared=spared)

    async def _rest(self, process: Process, leaves: int) -> bool:
        """Has a process wait for a turn of memory, before which so many bytes of it go, and returns whether it is
        drained. EIO where it does not wait."""
        await self._paid(process, END_CALLS * self._contexts(process))
        self._set_resting(process, True)
        try:
            place = Place(self._place(process).timeslice_us, off=True, leaves=leaves)
            await self._change(process, place, MEMORY_LEVER)
        finally:
            if not self._population.holds(self._member(process)) or not self._place(process).off:
                self._set_resting(process, False)
        if process not in self._rests:
            raise fail(errno.EIO)
        return self._turn_end(process) is TurnEnd.DRAINED

    def _turn_end(self, process: Process) -> TurnEnd | None:
        """How the turn of a process ended; None while it has one."""
        return self._population.record(self._member(process)).compute.turn_end

    def _is_drained(self, process: Process) -> bool:
        """Whether a process waits for a turn of memory, and all that it launched has run."""
        is_there = self._population.holds(self._member(process))
        return process in self._rests and is_there and self._turn_end(process) is TurnEnd.DRAINED

    def _is_undrained(self, process: Process) -> bool:
        """Whether a process waits for a turn of memory that is off the runlist, and was not drained."""
        if process not in self._rests or not self._population.holds(self._member(process)):
            return False
        place = self._place(process)
        return place.off and not place.drains and self._turn_end(process) in (TurnEnd.LATE, TurnEnd.UNGATED)

    async def _wake(self, process: Process) -> None:
        """Has a process have its turn of memory. EIO where it does not."""
        await self._paid(process, BEGIN_CALLS * self._contexts(process))
        await self._change(process, Place(self._place(process).timeslice_us), MEMORY_LEVER)
        if self._population.holds(self._member(process)) and self._place(process).off:
            raise fail(errno.EIO)
        self._set_resting(process, False)

    def _set_resting(self, process: Process, rests: bool) -> None:
        """Notes whether a process waits for a turn of memory."""
        (self._rests.add if rests else self._rests.discard)(process)
        if self._population.holds(self._member(process)):
            self._of(process).rests = rests

    async def _paid(self, process: Process, calls: int) -> None:
        """Returns once so many calls of the driver may be made for a process. ESRCH for one that is gone."""
        for _ in range(PAY_TIMES):
            if not self._population.holds(self._member(process)):
                raise fail(errno.ESRCH)
            if self._bucket.take(trio.current_time(), calls):
                return
            await trio.sleep(PAY_S)
        raise fail(errno.EAGAIN)

    def _drop_strays(self) -> None:
        """Has those wait no more that have left the slice in which there are turns, or run for another reason."""
        for process in [*self._rests]:
            group = self._member(process)
            stands = self._population.holds(group) and (self._place(process).off or self._follower.is_busy(group))
            if not stands or not self._levels.has(process):
                self._set_resting(process, False)

    def _place(self, process: Process) -> Place:
        return self._follower.place(self._member(process))

    def _urgency(self, change: tuple[Process, Place]) -> tuple[int, int]:
        """First processes that are to run again, then the longest slices, and last those that are to stop."""
        process, place = change
        before = self._place(process)
        return (0 if before.off and not place.off else 2 if place.off else 1), -place.timeslice_us

    async def _change(self, process: Process, place: Place, part: float = LEVER) -> None:
        """Has a process have its place, within a part of the time that a write may take. Cancelled, it has what it had:
        the next look begins anew."""
        try:
            await self._pull(process, lambda: self._place_at(process, place, part))
        except BaseException:
            if self._population.holds(group := self._member(process)):
                self._follower.fall_back(group)
            raise
        self._ends.wait(process)

    async def _place_at(self, process: Process, place: Place, part: float) -> bool:
        group, before = self._member(process), self._place(process)
        with deadline(part * self._seconds):
            if place.off and not before.off:
                await self._ends.end(process, place)
                drains = self._place(process).drains
                if drains and self._take(2 * self._contexts(process)):
                    self._ends.lengthen(process)  # and back
            else:
                kept = attrs.evolve(place, engines=before.engines, drain_us=before.drain_us)
                self._follower.schedule(group, kept)
            await self._follower.apply(group)
        return True

    async def _pull(self, process: Process, pull: Callable[[], Awaitable[bool]]) -> None:
        """Calls what pulls levers of a process, and takes note of what came of it. It returns whether it pulled them:
        only then is known that they move."""
        try:
            is_pulled = await pull()
        except Exception as error:
            self._failed(self._member(process), error)
        else:
            if not is_pulled or not self._population.holds(self._member(process)):
                return
            self._of(process).failure = None
            self._count(process)

    def _calls(self, process: Process, place: Place) -> int:
        """How many calls it takes at most: one for each context, and one more to see that it is on the runlist."""
        before = self._place(process)
        times = int(before.timeslice_us != place.timeslice_us)
        if before.off != place.off:
            times += 1 if place.off or before.drains else 2
        return times * self._contexts(process)

    def _contexts(self, process: Process) -> int:
        return max(1, self._gpu.activity(process).contexts)

    def _drop(self, process: Process) -> None:
        """It has no place any more, and none is to be told of it."""
        self._follower.schedule(self._member(process), NOWHERE)
        self._count(process)

    def _failed(self, group: Member, error: Exception) -> None:
        """Nothing that others ask for shall fail for what was not to be: it has what it had, and is left alone.

        One that has just gone is nothing to tell of: a program lets go of its files, and of the levers by that, before
        it ends and that is heard of.
        """
        process = group.process
        if not self._population.holds(group):
            return
        if self._gpu.lost:
            self._drop(process)
            return
        try:
            ended = isinstance(error, ProcessLookupError) or not is_borne(process.pid)
        except OSError:  # descriptors are short, say: its exit would be told of
            ended = False
        if ended:
            self._of(process).ending = True
            self._drop(process)
            self.poke()  # the others share without it
            return
        failure = self._of(process).failure
        code = getattr(error, "errno", None)
        # With no TSG left there is nothing to schedule: a program destroys its contexts some time before it ends.
        nothing = code == errno.EOPNOTSUPP and not self._gpu.activity(process).tsgs
        told = failure is not None and failure.told
        if not told and not nothing and (failure is not None or code not in PASSING):
            log.error("GPU %d: pid %d cannot be scheduled: %s", self._index, process.pid, error)
            told = True
        wait = AGAIN_S if failure is None else min(AGAIN_MOST_S, 2 * failure.wait)
        self._of(process).failure = Failure(trio.current_time() + wait, wait, told)
        self._follower.fall_back(group)
        self._count(process)

    def _is_stuck(self, process: Process) -> bool:
        slot = self._of(process)
        return slot.ending or (slot.failure is not None and trio.current_time() < slot.failure.again)

    def _stood(self, process: Process, is_long: bool) -> None:
        """A process stands from now on as its quota is used up, or goes on. Others have its turn where it stands for
        long."""
        self._count(process)
        if is_long and any(self._place(other).off for other in self._follower.scheduled(self._index)):
            self._poked.set()

    def _count(self, process: Process) -> None:
        """Counts a process as kept from running, or not any more: for its turn, or for its quota."""
        now, place = trio.current_time(), self._place(process)
        off = (place.off and not place.drains) or self._follower.spent(self._member(process)) is not None
        slot = self._of(process)
        throttle = slot.throttle
        if throttle is None:
            if not off:
                return
            throttle = slot.throttle = Throttle()
        if off and throttle.since is None:
            throttle.times += 1
            throttle.since = now
        elif not off and throttle.since is not None:
            throttle.usec += int((now - throttle.since) * 1e6)
            throttle.since = None
