"""The quotas of one GPU at work: which programs work by compute.max, and which stand until the next period.

Each group with a quota has an account (``quota.py``), each process below one a meter (``meter.py``), and what that says
is charged to all accounts above the process. A process stands while one of them is spent. With the library it stands at
its gate, which takes no call of the driver; without, its GR engine is off the runlist, which takes two to three in each
period. There are RATE of those a second for all processes of a GPU: where they do not do for every period, several are
strung together, and the work of all of them is done at their beginning. Where all that is on the GPU are programs below
the same quotas that always have work, one of them works in each (``rota.py``).

A program whose gate does not hold what it does is off the runlist as well, once it has done GATE_US of work there: one
with long kernels, or a library that lies. One that stands for the first time is so at once: nothing bounded before how
far it launched ahead. One whose memory is moving is left on it for longer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import attrs
import trio

from backend.core.deadlines import deadline
from backend.core.follower import Follower
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.reasons import Engines, Reason
from backend.core.records import Books
from backend.core.turns import AHEAD_US
from backend.process.identity import ROOT, Group, Member, Process, SliceOn
from backend.scheduler.bucket import Bucket
from backend.scheduler.failing import AGAIN_MOST_S, AGAIN_S, PASSING
from backend.scheduler.limited import Gone, Limited
from backend.scheduler.meter import Look, Meters
from backend.scheduler.parts import Pace
from backend.scheduler.quota import CHECK_US, Account
from backend.scheduler.rota import Rotation

log = logging.getLogger(__name__)

RATE, BURST = 12, 8
"""Calls of the driver a second for quotas, and at once. They are taken from those that the scheduler has."""
USED = 0.8
"""Part of these that periods are strung together for: each process is to find some when it needs them."""
CYCLE_CALLS = 3
"""Calls for each context in a period: one that takes it off the runlist, and two that put it back and look."""
READ_US = 5_000
"""Microseconds between two reads of processes that may run, where what they use is told late: whether they have work
is known only at these."""
WAIT_US = 20_000
"""Microseconds between two reads of processes that stand, so that it is known of when a figure is that comes late."""
GATE_US = 2 * AHEAD_US
"""Work after its gate closed, microseconds, with which a process counts as one that the gate does not hold."""
MOVING_US = 400_000
"""The same of one whose memory is moving: its library waits for what it launched, and without its engine would not come
to an end of that. So much it may have in each turn as well (DRAIN_WORK_US of ``ends.py``)."""
GATE_LOOK_US = 1_000
"""Microseconds between two looks at processes that stand at their gate with work that goes on."""
CALLS_AGAIN_US = 20_000
"""Microseconds after which calls of the driver are asked for again."""
LATE_US = 5_000_000
"""Microseconds for which a GPU may tell what a process did that has ended."""
TURN_US = 10_000
"""Microseconds for which a process is to stand at least for its turn to be another's."""


class Limiter:
    """See the module."""

    def __init__(
        self,
        gpu: Gpu,
        ledger: Ledger,
        population: Population,
        follower: Follower,
        calls: Bucket,
        lever_s: float,
        changed: Callable[[Process, bool], None],
        periods: Callable[[Group, int], None],
    ) -> None:
        """`calls` are those that the scheduler has of the driver, `lever_s` what those of one process may take, in
        seconds. `changed` is told of a process that stands from now on, or does not, and whether that is for long;
        `periods` of periods of a group that have ended."""
        self._gpu = gpu
        self._index = gpu.info.index
        self._ledger = ledger
        self._population = population
        self._follower = follower
        self._calls = calls
        self._lever_s = lever_s
        self._own = Bucket(RATE, BURST)
        self._changed = changed
        self._periods = periods
        self._accounts: dict[Group, Account] = {}
        self._limited: dict[Process, Limited] = {}
        self._gone: dict[Process, Gone] = {}
        self._meters = Meters(gpu.late_us)
        self._rotation = Rotation(self._may_wait, lambda process: follower.runs(Member(process, self._index)))
        self._known: set[Process] | None = None  # all processes at the last search; None where no quota was
        self._poked = trio.Event()
        self._poked.set()
        self._poked_us = self._since_us = 0  # when it was poked, of the next search and of the last
        self._woken = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._epoch = 0.0

    @property
    def pulls(self) -> bool:
        """Whether quotas take calls of the driver: up to RATE a second."""
        return any(one.levers for one in self._limited.values())

    def poke(self) -> None:
        """Has it look for processes and quotas anew, soon."""
        if not self._poked.is_set():
            self._poked.set()
            self._poked_us = self._now_us()

    def stands(self, process: Process) -> bool:
        """Whether a process is to stand, as its quota is used up."""
        one = self._limited.get(process)
        return one is not None and one.is_spent

    def ended(self, process: Process) -> None:
        """A process is about to be gone: what it did last is charged, by a guess where that is told late."""
        one = self._limited.pop(process, None)
        if one is None and self._known is not None and process not in self._known:
            one = Limited(self._accounts_of(Member(process, self._index)))  # it came and went between two searches
            self._meters.begin(process, None, self._poked_us)
        if one is None or not one.accounts:
            return
        _, activity, could_run = self._look_at(process)
        if activity.pending is None:  # its library speaks no more
            activity = attrs.evolve(activity, pending=one.pending)
        now_us = self._now_us()
        worked = self._meters.end(now_us, (process, activity, could_run))
        for account in one.accounts:
            account.charge(worked)
        if self._gpu.late_us:
            self._gone[process] = Gone(one.accounts, activity, now_us)

    def late(self, process: Process, us: int) -> None:
        """A process that has ended had the engine for so many microseconds more than was told of it then."""
        if (one := self._gone.get(process)) is not None and one.activity.gpu_usec is not None:
            one.activity, one.is_told = attrs.evolve(one.activity, gpu_usec=one.activity.gpu_usec + us), True

    async def run(self) -> None:
        """Has quotas hold until cancelled."""
        self._epoch = trio.current_time()
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._search)
            while True:
                self._woken = trio.Event()
                due_us = self._look() if self._accounts else None
                with trio.CancelScope(deadline=math.inf if due_us is None else self._epoch + due_us / 1e6):
                    await self._woken.wait()
                await trio.sleep(CHECK_US / 1e6)  # so much passes between two looks in any case

    # The processes below quotas

    async def _search(self) -> None:
        """Looks for quotas, and for processes below them, whenever something has changed. In parts, as there may be a
        thousand: those that are known are held to theirs meanwhile."""
        while True:
            await self._poked.wait()
            self._poked, self._since_us = trio.Event(), self._poked_us
            pace = Pace()
            there = [
                Member(resident.process, self._index)
                for resident in self._population.below(SliceOn(ROOT, self._index))
                if self._index in resident.contexts
            ]
            found: dict[Group, Books] = {}
            for group in [*there, *self._accounts]:
                await pace.pause()
                for level in self._population.path(group)[:-1] if self._population.holds(group) else ():
                    if level not in found and (books := self._books(level)) is not None:
                        found[level] = books
            self._find(there, {level: books for level, books in found.items() if self._population.holds(level)})
            self._woken.set()
            await trio.sleep(CHECK_US / 1e6)

    def _find(self, there: Sequence[Member], levels: Mapping[Group, Books]) -> None:
        """These processes have a context, and these are the books above them. What an account says outlives each."""
        self._accounts = {
            level: self._account(level, books)
            for level, books in levels.items()
            if books.quota_us < books.period_us  # one engine does no more than that
        }
        before, self._limited = self._limited, {}
        known = set()
        for member in there if self._accounts or before else ():
            if not self._population.holds(member):
                continue
            process = member.process
            known.add(process)
            if mine := self._accounts_of(member):
                one = self._limited[process] = self._renewed(process, before.get(process), mine)
                books = levels.get(member)
                one.equals = mine, self._population.path(member)[1:], books and (books.priority, books.weight)
            elif self._follower.spent(member) is not None and not (one := before.get(process) or Limited(())).busy:
                self._start(process, one, self._restore)
        if not self._accounts:
            self._gone.clear()
        self._meters.keep([*self._limited, *self._gone])
        self._known = known if self._accounts else None

    def _renewed(self, process: Process, one: Limited | None, accounts: tuple[Account, ...]) -> Limited:
        """What is kept of a process with these accounts. One that came since the last search has worked since then."""
        activity = self._gpu.activity(process)
        if one is None:
            one = Limited(accounts)
        is_new = self._known is not None and process not in self._known
        self._meters.begin(process, None if is_new else activity, self._since_us)
        one.accounts, one.contexts = accounts, max(1, activity.contexts)
        return one

    def _books(self, level: Group) -> Books | None:
        try:
            return self._ledger.books(level)
        except OSError:
            return None  # the kernel has seen it die, and we have not yet

    def _account(self, level: Group, books: Books) -> Account:
        account = self._accounts.get(level)
        if account is None:
            return Account(books.quota_us, books.period_us, self._now_us())
        if (account.quota_us, account.period_us) != (books.quota_us, books.period_us):
            account.change(books.quota_us, books.period_us)
        return account

    def _accounts_of(self, member: Member) -> tuple[Account, ...]:
        path = self._population.path(member)
        return tuple(self._accounts[level] for level in path if level in self._accounts)

    # What they work

    def _now_us(self) -> int:
        return round((trio.current_time() - self._epoch) * 1e6)

    def _charge(self) -> None:
        """Charges what processes worked since the last time to all accounts above them."""
        looks = [self._look_at(process) for process in self._limited]
        for process, activity, _ in looks:
            self._limited[process].pending = activity.pending
        looks += [self._look_back_at(process, one) for process, one in self._gone.items()]
        now_us = self._now_us()
        for process, worked in self._meters.look(now_us, looks).items():
            one = self._limited.get(process)
            self._rotation.charge(process, worked)
            if worked and one is not None and one.stands_at_gate:
                one.after_us += worked
            for account in (self._gone[process] if one is None else one).accounts if worked else ():
                account.charge(worked)
        for process, gone in list(self._gone.items()):
            if self._meters.is_settled(gone.at_us) or now_us - gone.at_us > LATE_US:
                del self._gone[process]

    def _look_at(self, process: Process) -> Look:
        member, activity = Member(process, self._index), self._gpu.activity(process)
        if not self._population.holds(member):
            return process, activity, False
        stands = self._follower.spent(member) is not None and activity.pending is None
        return process, activity, self._follower.runs(member) and not stands

    def _look_back_at(self, process: Process, one: Gone) -> Look:
        figure = one.activity.gpu_usec if one.is_told else self._gpu.activity(process).gpu_usec
        return process, attrs.evolve(one.activity, gpu_usec=figure), False

    def _look(self) -> int:
        """Charges what was worked, has processes stand or go on, and returns when to look again, microseconds."""
        now_us = self._now_us()
        self._string()
        self._charge()
        for process, one in self._limited.items():
            if self._waits_for_its_turn(process):
                for account in one.accounts:
                    account.waited_us = now_us
        for level, account in self._accounts.items():
            if (ended := account.advance(now_us)) and self._population.holds(level):
                self._periods(level, ended)
        for account in self._accounts.values():
            account.decide()
        self._rotation.look(now_us, self._limited, self._known)
        dues = [account.next_us(now_us) for account in self._busy_accounts()]
        dues += [due_us for process, one in self._limited.items() if (due_us := self._act(process, one, now_us))]
        return min(dues, default=now_us + 1_000_000)

    def _waits_for_its_turn(self, process: Process) -> bool:
        member = Member(process, self._index)
        return self._population.holds(member) and self._follower.place(member).off

    def _may_wait(self, process: Process) -> bool:
        """Whether a process may wait for a period of its own: it always has work, and nothing but its quota keeps it
        from that."""
        member = Member(process, self._index)
        kept = self._follower.is_held(member) or self._follower.applied(member).off.reasons & ~Reason.QUOTA
        return not kept and self._meters.always_works(process)

    def _busy_accounts(self) -> Iterator[Account]:
        """The accounts that a process is charged to."""
        return iter({id(account): account for one in self._limited.values() for account in one.accounts}.values())

    def _string(self) -> None:
        """Has as many periods strung together as the calls of the driver ask for."""
        calls = sum(CYCLE_CALLS * one.contexts for one in self._limited.values() if one.levers and not one.waits)
        for account in self._accounts.values():
            account.strung = 1
        if calls:
            for one in self._limited.values():
                for account in one.accounts if one.levers else ():
                    account.strung = max(1, math.ceil(calls / (USED * RATE) * 1e6 / account.period_us))

    # What is done about it

    def _act(self, process: Process, one: Limited, now_us: int) -> int | None:
        """Has a process stand or go on, as its accounts say; returns when to look at it again, if that matters."""
        member = Member(process, self._index)
        if one.busy or not self._population.holds(member) or self._gpu.lost or self._follower.is_held(member):
            return None
        spent, is_spent = self._follower.spent(member), one.is_spent
        if trio.current_time() < one.again:
            return now_us + CALLS_AGAIN_US
        if is_spent and spent is None:
            if one.levers and not self._take(one, 1):
                return now_us + CALLS_AGAIN_US
            one.after_us = 0
            self._start(process, one, self._spend)
        elif not is_spent and spent is not None:
            if spent is not Engines.NONE and not self._take(one, 2):
                for account in one.accounts:
                    account.is_kept = True
                return now_us + CALLS_AGAIN_US
            self._start(process, one, self._restore)
        elif spent is Engines.NONE and self._gpu.activity(process).pending != 0:
            if one.after_us > self._most_after_us(member, one) and self._take(one, 1):
                self._start(process, one, self._stop)
            return now_us + GATE_LOOK_US
        elif self._gpu.late_us:
            return now_us + (WAIT_US if is_spent else READ_US)
        return None

    def _most_after_us(self, member: Member, one: Limited) -> int:
        """Return what a process that stands at its gate may do there, microseconds."""
        if self._gpu.is_leaving(member.process) or self._population.record(member).memory.may_come():
            return MOVING_US
        return GATE_US if one.is_bound else 0

    def _take(self, one: Limited, calls: int) -> bool:
        """Whether there are so many calls for each context of a process; they are taken then."""
        now, calls = trio.current_time(), calls * one.contexts
        return self._own.take(now, min(BURST, calls)) and self._calls.take(now, min(BURST, calls))

    def _start(self, process: Process, one: Limited, act: Callable[[Member, Limited], Awaitable[None]]) -> None:
        assert self._nursery is not None
        one.busy = True
        self._nursery.start_soon(self._try, process, one, act)

    async def _try(self, process: Process, one: Limited, act: Callable[[Member, Limited], Awaitable[None]]) -> None:
        member = Member(process, self._index)
        try:
            with deadline(self._lever_s):
                await act(member, one)
            one.failed_s, one.told = 0.0, False
        except Exception as error:
            self._failed(member, one, error)
        finally:
            one.busy = False
        if not self._population.holds(member):
            return
        one.stands_at_gate = self._follower.spent(member) is Engines.NONE
        if self._follower.spent(member) is not None and process not in self._limited:  # it has no quota any more
            self._start(process, one, self._restore)
        self._changed(process, self._follower.spent(member) is not None and self._stands_for_long(one))
        self._woken.set()

    def _failed(self, member: Member, one: Limited, error: Exception) -> None:
        """It works on, and is asked again later. One that ends has let go of its files before that is heard of."""
        if not self._population.holds(member) or self._gpu.lost:
            return
        is_ending = isinstance(error, ProcessLookupError) or not self._gpu.activity(member.process).tsgs
        is_passing = getattr(error, "errno", None) in PASSING and not one.failed_s
        if not is_ending and not is_passing and not one.told:
            one.told = True
            log.error("GPU %d: pid %d cannot be held to its quota: %s", self._index, member.process.pid, error)
        one.failed_s = min(AGAIN_MOST_S, 2 * one.failed_s or AGAIN_S)
        one.again = trio.current_time() + one.failed_s

    def _stands_for_long(self, one: Limited) -> bool:
        now_us = self._now_us()
        return any(account.is_spent and account.next_us(now_us) - now_us >= TURN_US for account in one.accounts)

    async def _spend(self, member: Member, one: Limited) -> None:
        await self._follower.spend(member)
        one.levers = self._follower.spent(member) is Engines.GR

    async def _stop(self, member: Member, one: Limited) -> None:
        one.levers = one.is_bound
        await self._follower.stop(member)

    async def _restore(self, member: Member, one: Limited) -> None:
        await self._follower.restore(member)
        one.is_bound = True
        self._meters.begins(member.process)
