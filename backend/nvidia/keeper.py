"""The keeper of one GPU: makes settings continue to hold, for new TSGs and for programs that undo them.

Nothing reports that a program undid its freeze or its timeslice, so the keeper asks. Each question is a driver call
that holds a lock shared by all programs (0.2 ms for the state of one channel; no call takes several). So at most
QUESTIONS are asked in a tick of 50 ms, 200 a second, spread evenly: 4 % of a CPU however many programs there are. The
program that has waited longest is asked next, about another channel each time, in an order that the program cannot
know. Each of `n` frozen programs is asked something every max(0.5, n / 200) s, and about each of its channels once in
max(1, c / 200) s, where c is the number of channels of all of them. A program that had the engine, which the trace of
context switches tells for free, is asked before the others.

While a machine is suspended no program undoes anything, but its driver may reset what was set. After a suspend,
everything is set again for each program that has a policy, based on what the GPU reports, and no program is blamed.

One thread is in the driver at a time, and it rests at least half as long as it worked.
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
from backend.nvidia.enforce import TIMESLICE
from backend.nvidia.tenant import Tenant
from backend.process.identity import Process

log = logging.getLogger(__name__)

TICK = 0.05
"""Seconds between two batches of questions, while there is anything to ask about."""
QUESTIONS = 10
"""Questions in a batch, at most: as many about freezes, and as many programs about timeslices (0.1 ms each)."""
KEEP = 0.5
"""Seconds within which each program with a policy is asked, and looked at for new TSGs, unless there are too many."""
HELD = 0.1
"""Seconds between two questions to programs that are not frozen, but that the scheduler keeps off the runlist for
a moment. With the scheduler's own calls this makes at most 50 unrequested calls a second (``scheduler.py``).
"""
ROUND = 1.0
"""Seconds within which a frozen program is asked about each of its channels, unless there are too many."""
SETTLE = 0.02
"""Seconds from a lever to the wide look that follows it, so that the look does not delay another lever."""
IDLE_LOOKS = 4
"""Factor by which processes without a policy are looked at less often."""
FORCED_LOOKS = 20
"""Number of looks of which one is made even if the host's totals have not changed."""
LOOKS = 20
"""Programs that are looked at in one tick, at most."""
LOOK_REST = 9
"""Pause after a look, as a multiple of its length: a tenth of a CPU, whatever a look costs (7 ms, for each program
and each time that a process on the host allocates anything).
"""
WORK_REST = 0.5
"""Pause after any work, as a multiple of its length."""
ASK_DEADLINE = 2.0
"""Time limit of a batch, seconds; usually it takes 2 ms."""
ASLEEP_S = 0.1
"""Difference between two clocks from which on the machine counts as having been suspended, seconds."""


def asleep() -> float:
    """Return the seconds that this machine was suspended since boot: CLOCK_MONOTONIC stands still meanwhile, and
    CLOCK_BOOTTIME does not (clock_gettime(2)). If the daemon has to wait for a processor between the two reads,
    the result is smaller, never larger.
    """
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC) for _ in range(3))


class Keeper:
    """The keeper of one GPU."""

    def __init__(
        self,
        gpu: int,
        tenants: Mapping[Process, Tenant],
        totals: Callable[[], tuple[int, ...]],
        used: Callable[[Process], int | None],
        asked: Callable[[Process], bool],
        undone: Callable[[Process], None],
        shares: Callable[[Process], bool] = lambda process: False,
    ) -> None:
        """`totals` returns the host's counts of clients and objects (one driver call). `used` returns the time
        that a process had the engine, None where unknown. `asked` returns whether a process is frozen. `undone` is
        called with each process that had undone a setting, once that is restored. `shares` returns whether what is
        set for other processes acts on the timeslices of one, as on clients of one MPS server: it is not blamed then.
        """
        self._gpu = gpu
        self._tenants = tenants
        self._totals = totals
        self._used = used
        self._asked = asked
        self._undone = undone
        self._shares = shares
        self._asking = Deadline(f"GPU {gpu}", ASK_DEADLINE)
        self._wake = trio.Event()
        self._woken: set[Process] = set()
        self._count = 0  # of questions and looks, to know which program waits longest
        self._next_look = 0.0
        self._next_hints = 0.0
        self._next_held = 0.0
        self._asleep = asleep()

    def wake(self, process: Process) -> None:
        """Ask for a wide look at a process soon after one of its levers was pulled, at what the lever did not see."""
        self._woken.add(process)
        self._wake.set()

    async def run(self) -> None:
        """Keep settings until cancelled."""
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
        """Ask a batch, restore what was undone, and look for new TSGs; return whether there is
        anything to ask about.
        """
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
        """Mark processes that had the engine although they were frozen, so that they are asked first. The trace is
        late, so the use may be from before the freeze.
        """
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
        """Choose the `count` programs that have waited longest; suspects take up to half of QUESTIONS before that."""
        chosen: list[Tenant] = []
        if suspects and count and any(tenant.questions.suspect for tenant in tenants):
            suspected = [tenant for tenant in tenants if tenant.questions.suspect]
            first = heapq.nsmallest(QUESTIONS, suspected, key=lambda tenant: tenant.watch.asked)
            # A few suspects are asked several questions each.
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
        """Return whether the machine was suspended since everything was last set again."""
        return asleep() - self._asleep > ASLEEP_S

    async def _begin_again(self, tenants: Iterable[Tenant]) -> None:
        """Set everything again after a suspend, when it is unknown what still holds. Failures are retried at
        the next look.
        """
        self._asleep = asleep()
        for tenant in tenants:
            if tenant.has_policy:
                await self._bring_on(tenant, anew=True)

    async def _bring_back(self, tenant: Tenant) -> None:
        try:
            undone = await tenant.enforce(again=True)
            is_own = undone != TIMESLICE or not self._shares(tenant.process)
            if undone and is_own and not self._has_slept():
                tenant.blame(undone)
                self._undone(tenant.process)
        except ProcessLookupError:
            pass
        except OSError as error:
            log.debug("pid %d on GPU %d: %s", tenant.process.pid, self._gpu, error)

    # What is new

    async def _look(self, tenants: Sequence[Tenant], totals: tuple[int, ...] | None) -> None:
        """Look for new TSGs of the programs that are due, and apply to these what is wanted."""
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
                # Only what the lever did not see; a lever that follows does not have to wait for this.
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
    """Return the number of questions that a tick has for this many programs and their channels."""
    return min(QUESTIONS, math.ceil(max(programs * TICK / KEEP, channels * TICK / ROUND)))


@attrs.define
class Handful:
    """A batch of questions. It changes nothing: a process that seems to have undone a setting is asked again, with
    no other thread acting on it, before the setting is restored.
    """

    frozen: Sequence[Tenant]
    """Processes asked about a channel that is to be off the runlist; each is asked once per occurrence."""
    sliced: Sequence[Tenant]
    """Processes asked about their timeslices."""
    now: float = 0.0
    """Time of the batch, in seconds."""
    undone: list[Tenant] = attrs.field(factory=list)
    """Processes that seem to have undone a setting."""

    def ask(self, totals: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Ask all questions, in a thread; return the host's totals from before. Raises OSError."""
        before = totals()
        for tenant in self.frozen:
            if tenant not in self.undone and tenant.questions.is_thawed():
                self.undone.append(tenant)
        for tenant in self.sliced:
            if tenant not in self.undone and tenant.timeslices.is_stretched(self.now):
                self.undone.append(tenant)
        return before
