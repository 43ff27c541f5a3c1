"""Levers of quotas: stop programs whose quota is used up and let them go on, within a budget of driver calls.

With the library, a program stands at its gate, which takes no driver call. Without it, its GR engine goes off the
runlist, which takes two to three calls in each period. Calls that were reserved and not made, as where the program
stood already for another reason, are given back; calls made without a reservation are owed.

A lever that fails is pulled again after FAILED_S, and the delay doubles each time. So a program that could not be
stopped stops within the same period where that is possible, and one that could not be put back does not stand for
ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from backend.core.deadlines import deadline
from backend.core.follower import Follower
from backend.core.member import Compute
from backend.core.population import Population
from backend.core.protocols import Gpu
from backend.core.reasons import Engines
from backend.process.identity import Member, Process
from backend.scheduler.bucket import Bucket
from backend.scheduler.failing import AGAIN_MOST_S, AGAIN_S, PASSING
from backend.scheduler.limited import Act, Failing, Limited

log = logging.getLogger(__name__)

RATE, BURST = 12, 8
"""Driver calls for quotas: per second, and at once. They also count against the scheduler's own budget."""
CALLS_AGAIN_S = 0.02
"""Seconds after which driver calls that were refused are asked for again."""
FAILED_S = 0.005
"""Seconds until a failed lever is pulled again, the first time; the shortest period is twice as long."""


class Holding:
    """The levers of the quotas of one GPU."""

    def __init__(
        self,
        gpu: Gpu,
        population: Population,
        follower: Follower,
        calls: Bucket,
        lever_s: float,
        done: Callable[[Process, Limited, Act | None], None],
    ) -> None:
        """`calls` is the scheduler's budget of driver calls. `lever_s` is the time that the levers of one process
        may take, in seconds. `done` is called after each act on a process that still exists, with the act, or with
        None if it failed.
        """
        self._gpu = gpu
        self._index = gpu.info.index
        self._population = population
        self._follower = follower
        self._calls = calls
        self._own = Bucket(RATE, BURST)
        self._lever_s = lever_s
        self._done = done
        self._is_short = False  # whether calls were refused in this look
        self.nursery: trio.Nursery | None = None
        """The nursery in which levers are waited for."""

    def begin(self) -> None:
        """Begin a look. Within a look calls are granted in the order in which they are asked for. Once a request
        is refused, so are all later ones: otherwise processes that need few calls could take all of them for ever.
        """
        self._is_short = False

    def start(self, process: Process, one: Limited, act: Act) -> float | None:
        """Start an act on a process. If the act failed just now, or the budget has no driver calls for it, nothing
        is started, and the time to ask again is returned, by trio's clock.
        """
        assert self.nursery is not None
        now, member = trio.current_time(), Member(process, self._index)
        failing = one.failing.get(act)
        if failing is not None and now < failing.again:
            return min(failing.again, now + CALLS_AGAIN_S)
        calls = self._times(member, one, act) * one.contexts
        if calls and (self._is_short or not self._take(now, calls)):
            self._is_short = True
            return now + CALLS_AGAIN_S
        one.busy = True
        self.nursery.start_soon(self._try, process, one, act, calls, self._population.record(member).compute)
        return None

    def _times(self, member: Member, one: Limited, act: Act) -> int:
        """Return the most driver calls that the act takes per context."""
        match act:
            case Act.SPEND:
                return 0 if one.levers is False or one.is_gated else 1
            case Act.STOP:
                return 1
            case Act.RESTORE:
                is_off = self._follower.spent(member) is not Engines.NONE and not self._follower.runs(member)
                return 2 if is_off else 0

    def _take(self, now: float, calls: int) -> bool:
        """Take `calls` driver calls from both budgets if both have them, else from neither; return whether
        they were taken.
        """
        if not self._own.has(now, calls) or not self._calls.take(now, calls):
            return False
        return self._own.take(now, calls)

    async def _try(self, process: Process, one: Limited, act: Act, taken: int, compute: Compute) -> None:
        member, pulls, is_done = Member(process, self._index), compute.pulls, False
        try:
            with deadline(self._lever_s):
                await self._do(member, one, act)
            one.failing.pop(act, None)
            is_done = True
        except Exception as error:
            self._failed(member, one, act, error)
        finally:
            one.busy = False
            self._settle(one, act, taken, compute.pulls != pulls)
        if self._population.holds(member):
            self._done(process, one, act if is_done else None)

    async def _do(self, member: Member, one: Limited, act: Act) -> None:
        match act:
            case Act.SPEND:
                await self._follower.spend(member, pulls=not one.is_gated)
                one.levers = self._follower.spent(member) is Engines.GR
            case Act.STOP:
                one.levers, one.overran = one.is_bound and one.overran, one.is_bound
                await self._follower.stop(member)
            case Act.RESTORE:
                one.is_behind, one.holds = True, self._follower.spent(member) is Engines.NONE
                one.overran = one.overran and not one.holds
                await self._follower.restore(member)
                one.is_bound = True
        one.is_behind = False

    def _settle(self, one: Limited, act: Act, taken: int, is_pulled: bool) -> None:
        """Correct both budgets: give back calls that were reserved and not made, and owe those made without
        a reservation.
        """
        if taken and not is_pulled:
            for bucket in (self._own, self._calls):
                bucket.give_back(taken)
        elif is_pulled and not taken:
            for bucket in (self._own, self._calls):
                bucket.owe(trio.current_time(), (2 if act is Act.RESTORE else 1) * one.contexts)

    def _failed(self, member: Member, one: Limited, act: Act, error: Exception) -> None:
        """Record the failure of an act, which left the process as it was, and when to try again. A process that
        ends closes its files before its exit is known, so the log does not blame its lever.
        """
        if not self._population.holds(member) or self._gpu.lost:
            return
        now = trio.current_time()
        last = one.failing.get(act) or Failing(now)
        is_ending = isinstance(error, ProcessLookupError) or not self._gpu.activity(member.process).tsgs
        is_passing = getattr(error, "errno", None) in PASSING and now - last.since < AGAIN_S
        is_told = last.is_told or not (is_ending or is_passing)
        if is_told and not last.is_told:
            log.error("GPU %d: pid %d %s: %s (retried)", self._index, member.process.pid, act.value, error)
        wait_s = min(AGAIN_MOST_S, 2 * last.wait_s or FAILED_S)
        one.failing[act] = Failing(last.since, wait_s, now + wait_s, is_told)
