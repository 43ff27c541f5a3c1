"""Sees to it that what is wanted of the programs on one GPU goes on to hold: for TSGs that come later, and for programs
that undo it.

Nothing tells that a program undid its freeze or its timeslice: it is asked for, and each question is a call of the
driver that holds a lock of all programs' (0.2 ms for the state of one channel; there is no call that takes several). So
there are at most QUESTIONS of them in a tick of 50 ms, 200 in a second, spread evenly: 4 % of a CPU however many
programs there are. The one that waits longest is asked next, for another channel each time, in an order that it cannot
know. One of `n` frozen programs is asked something every max(0.5, n / 200) s, and for each of its channels once in a
round of max(1, c / 200) s, where c are the channels of all of them. One that had the engine (the trace of context
switches says so for nothing) is asked before the others.

While a machine is suspended no program undoes anything, but its driver may reset what was set. Right after it a program
that has a policy has all of it set again, by what the GPU itself says, and is not said to have undone it.

One thread is in the driver at a time, and it rests at least half as long as it was at work.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import attrs
import trio

from backend.core.reasons import Engines
from backend.nvidia.deadline import Deadline
from backend.nvidia.tenant import Tenant
from backend.process.identity import Process

log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two handfuls of questions, while there is anything to ask for."""
QUESTIONS = 10
"""In each handful, at most: as many for freezes, and as many programs for their timeslices (0.1 ms each)."""
KEEP = 0.5
"""Seconds in which every program that has a policy is asked, and looked at for new TSGs, if there are not too many."""
HELD = 0.1
"""Seconds between two questions to those that are not frozen, but the scheduler has off the runlist for a moment: with
its own calls that makes no more than 50 a second that were not asked for (``scheduler.py``)."""
ROUND = 1.0
"""Seconds in which a frozen program is asked for each of its channels, if there are not too many."""
SETTLE = 0.02
"""Seconds from a lever to the wide look that follows it: not in the way of another lever right behind."""
IDLE_LOOKS = 4
"""Processes without a policy are looked at this many times less often."""
FORCED_LOOKS = 20
"""Every so many looks are made although the host's totals stand still."""
LOOKS = 20
"""Programs that have their turn to be looked at, in a tick, at most."""
LOOK_REST = 9
"""A look is followed by so many times its length without another one: a tenth of one CPU, whatever a look costs (7 ms,
for each program and each time that a process on the host allocates anything)."""
WORK_REST = 0.5
"""Pause after all work, in lengths of that work."""
ASK_DEADLINE = 2.0
"""Seconds for a handful; the usual one takes 2 ms."""
ASLEEP_S = 0.1
"""Seconds that the machine was suspended by the difference of two clocks, at least, before that is believed."""


def asleep() -> float:
    """Seconds that this machine was suspended since it was booted: CLOCK_MONOTONIC stands still meanwhile, and
    CLOCK_BOOTTIME does not (clock_gettime(2)). A daemon that has to wait for a processor between the two has less,
    never more."""
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC) for _ in range(3))


class Keeper:
    """See the module."""

    def __init__(
        self,
        gpu: int,
        tenants: Mapping[Process, Tenant],
        totals: Callable[[], tuple[int, ...]],
        used: Callable[[Process], int | None],
        asked: Callable[[Process], bool],
        undone: Callable[[Process], None],
    ) -> None:
        """`totals` are what the host has made of clients and objects (a call of the driver), `used` is the time that a
        process had the engine, if that is known, `asked` whether it is frozen, and `undone` is told of each one
        that was brought back."""
        self._gpu = gpu
        self._tenants = tenants
        self._totals = totals
        self._used = used
        self._asked = asked
        self._undone = undone
        self._asking = Deadline(f"GPU {gpu}", ASK_DEADLINE)
        self._wake = trio.Event()
        self._woken: set[Process] = set()
        self._count = 0  # of questions and looks, to know which waits longest
        self._next_look = 0.0
        self._next_hints = 0.0
        self._next_held = 0.0
        self._asleep = asleep()

    def wake(self, process: Process) -> None:
        """A lever was pulled: what it did not see is to be looked for."""
        self._woken.add(process)
        self._wake.set()

    async def run(self) -> None:
        """Keeps, until cancelled."""
        while True:
            began = trio.current_time()
            busy = await self._tick()
            rest = (trio.current_time() - began) * WORK_REST
            due = max(began + (TICK if busy else KEEP), trio.current_time() + rest)
            with trio.move_on_at(due):
                while True:
                    await self._wake.wait()
                    await trio.sleep(max(SETTLE, rest))
                    await self._after_levers()
                    rest = 0.0

    async def _tick(self) -> bool:
        """Asks, and brings back what undid something; looks for what is new. Whether there is anything to ask for."""
        tenants = list(self._tenants.values())
        if self._has_slept():
            await self._begin_again(tenants)
        frozen = [tenant for tenant in tenants if tenant.applied.engines is not Engines.NONE and tenant.applied.off]
        sliced = [tenant for tenant in tenants if tenant.applied.timeslice_us and tenant.applied.slices]
        self._hint(frozen)
        asked = [tenant for tenant in frozen if tenant.watch.is_asked]
        held = [tenant for tenant in frozen if not tenant.watch.is_asked]
        asks_held = bool(held) and trio.current_time() >= self._next_held
        if asks_held:
            self._next_held = trio.current_time() + HELD
        handful = Handful(
            [
                *self._least(asked, _share(len(asked), sum(len(t.applied.off) for t in asked)), suspects=True),
                *self._least(held, int(asks_held), suspects=True),
            ],
            self._least(sliced, _share(len(sliced)), suspects=False),
            trio.current_time(),
        )
        totals: tuple[int, ...] | None = None
        try:
            totals = await self._asking.call(partial(handful.ask, self._totals))
        except OSError as error:
            log.debug("GPU %d: no program is asked: %s", self._gpu, error)
        for tenant in handful.undone:
            await self._bring_back(tenant)
        await self._look(tenants, totals)
        return bool(frozen or sliced)

    # Which process is asked

    def _hint(self, frozen: Iterable[Tenant]) -> None:
        """A process that had the engine although it was frozen is asked before the others. It may be what it did before
        the freeze: the trace is late."""
        now = trio.current_time()
        due = now >= self._next_hints
        for tenant in frozen:
            if due or tenant.watch.is_asked is None:
                tenant.watch.is_asked = self._asked(tenant.process)
            if due:
                used, before = self._used(tenant.process), tenant.watch.used
                if tenant.watch.is_asked and used is not None and before is not None and used > before:
                    tenant.questions.suspected()
                tenant.watch.used = used
        if due:
            self._next_hints = now + KEEP

    def _least(self, tenants: Collection[Tenant], count: int, *, suspects: bool) -> Sequence[Tenant]:
        """So many that have waited longest: suspects first, but for half of the places."""
        chosen: list[Tenant] = []
        if suspects and count and any(tenant.questions.suspect for tenant in tenants):
            suspected = [tenant for tenant in tenants if tenant.questions.suspect]
            first = heapq.nsmallest(QUESTIONS, suspected, key=lambda tenant: tenant.watch.asked)
            # Of a few, each is asked several things.
            chosen = [first[n % len(first)] for n in range(QUESTIONS // 2)]
            count = QUESTIONS - len(chosen)
        others = heapq.nsmallest(count, tenants, key=lambda one: one.watch.asked if suspects else one.watch.sliced)
        chosen += [others[n % len(others)] for n in range(count)] if others else []
        for tenant in chosen:
            self._count += 1
            if suspects:
                tenant.watch.asked = self._count
            else:
                tenant.watch.sliced = self._count
        return chosen

    def _has_slept(self) -> bool:
        """Whether the machine was suspended since everything was last set again."""
        return asleep() - self._asleep > ASLEEP_S

    async def _begin_again(self, tenants: Iterable[Tenant]) -> None:
        """It is not known what holds after a suspend: all is set again. What fails is done with the next look."""
        self._asleep = asleep()
        for tenant in tenants:
            if tenant.has_policy:
                await self._bring_on(tenant, anew=True)

    async def _bring_back(self, tenant: Tenant) -> None:
        try:
            undone = await tenant.enforce(again=True)
            if undone and not self._has_slept():
                tenant.blame(undone)
                self._undone(tenant.process)
        except ProcessLookupError:
            pass
        except OSError as error:
            log.debug("pid %d on GPU %d: %s", tenant.process.pid, self._gpu, error)

    # What is new

    async def _look(self, tenants: Sequence[Tenant], totals: tuple[int, ...] | None) -> None:
        """Looks at those whose turn it is for new TSGs, and applies to those what is wanted."""
        now = trio.current_time()
        due = [one for one in tenants if one.watch.looked_at + (KEEP if one.has_policy else KEEP * IDLE_LOOKS) <= now]
        for tenant in heapq.nsmallest(LOOKS, due, key=lambda tenant: tenant.watch.looked_at):
            force = (tenant.watch.looks_made + 1) % FORCED_LOOKS == 0
            if force or totals is None or tenant.watch.totals != totals or not tenant.applied.handles.fds():
                began = trio.current_time()
                if began < self._next_look:
                    continue  # its turn is still to come
                await self._look_at(tenant, force)
                self._next_look = trio.current_time() + LOOK_REST * (trio.current_time() - began)
                tenant.watch.totals = totals
                tenant.watch.kept_at = 0.0
            tenant.watch.looks_made += 1
            tenant.watch.looked_at = now
        due = [one for one in tenants if one.has_policy and one.watch.kept_at + KEEP <= now]
        for tenant in heapq.nsmallest(LOOKS, due, key=lambda tenant: tenant.watch.kept_at):
            tenant.watch.kept_at = now
            if tenant.applied.is_behind:
                await self._bring_on(tenant)

    async def _after_levers(self) -> None:
        self._wake = trio.Event()
        woken, self._woken = self._woken, set()
        for process in woken:
            tenant = self._tenants.get(process)
            if tenant is not None and tenant.has_policy:
                known = tenant.tsgs()
                await self._look_at(tenant, False)
                # Only what the lever did not see; a lever that follows shall not wait for this.
                if tenant.tsgs() != known and tenant.applied.is_behind:
                    await self._bring_on(tenant)

    async def _look_at(self, tenant: Tenant, force: bool) -> None:
        try:
            await tenant.look(force)
        except OSError as error:
            log.debug("pid %d on GPU %d: %s", tenant.process.pid, self._gpu, error)

    async def _bring_on(self, tenant: Tenant, *, anew: bool = False) -> None:
        try:
            await tenant.enforce(anew=anew)
        except OSError as error:
            log.debug("pid %d on GPU %d: %s", tenant.process.pid, self._gpu, error)


def _share(programs: int, channels: int = 0) -> int:
    """How many questions a tick has for so many programs, and channels of theirs."""
    return min(QUESTIONS, math.ceil(max(programs * TICK / KEEP, channels * TICK / ROUND)))


@attrs.define
class Handful:
    """What is asked in one go. Changes nothing: a process that seems to have undone something is asked again before it
    is brought back, with no other acting on it."""

    frozen: Sequence[Tenant]
    """The process that is asked for a channel that is to be off the runlist, once for each time it is in there."""
    sliced: Sequence[Tenant]
    """The process that is asked for its timeslices."""
    now: float = 0.0
    """When, in seconds."""
    undone: list[Tenant] = attrs.field(factory=list)
    """The processes that have undone something, it seems."""

    def ask(self, totals: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """In a thread; returns the totals. OSError."""
        before = totals()
        for tenant in self.frozen:
            if tenant not in self.undone and tenant.questions.is_thawed():
                self.undone.append(tenant)
        for tenant in self.sliced:
            if tenant not in self.undone and tenant.timeslices.is_stretched(self.now):
                self.undone.append(tenant)
        return before
