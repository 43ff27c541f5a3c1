"""The quotas of one GPU at work: which programs work by compute.max, and which stand until the next period.

Each group with a quota has an account (``quota.py``), each process below one a meter (``meter.py``), and what that says
is charged to all accounts above the process. A process stands while one of them is spent (``holding.py``). There are
RATE calls of the driver a second for that, for all processes of a GPU: where they do not do for every period, several
are strung together, and the work of all of them is done at their beginning. Where all that is on the GPU are programs
below the same quotas that always have work, one of them works in each (``rota.py``).

A program whose gate does not hold what it does is off the runlist as well, once it has done GATE_US of work there: one
with long kernels, or a library that lies. One that stands for the first time is so at once: nothing bounded before how
far it launched ahead. One whose memory is moving is left on it for longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import trio

from backend.core.follower import Follower
from backend.core.population import Population
from backend.core.protocols import Gpu, Ledger
from backend.core.reasons import Engines, Reason
from backend.core.records import Books
from backend.core.turns import AHEAD_US
from backend.process.identity import ROOT, Group, Member, Process, SliceOn
from backend.scheduler.bucket import Bucket
from backend.scheduler.holding import RATE, Holding
from backend.scheduler.limited import Act, Gone, Limited
from backend.scheduler.meter import Look, Meters
from backend.scheduler.parts import Pace
from backend.scheduler.quota import CHECK_US, Account
from backend.scheduler.rota import Rotation
from backend.scheduler.stringing import string
from backend.scheduler.watched import WORKS
from backend.space.space import Space

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
LOOK_REST = 3
"""Time after a look in which none is made, as a multiple of what it took: one at a hundred processes takes 3 ms of a
CPU, and a slice may have thousands. What is over for that is a debt, as all that is."""
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
        space_of: Callable[[Member], Space | None] = lambda member: None,
    ) -> None:
        """`calls` are those that the scheduler has of the driver, `lever_s` what those of one process may take, in
        seconds. `changed` is told of a process that stands from now on, or does not, and whether that is for long;
        `periods` of periods of a group that have ended. `space_of` is the space in which a process runs beside
        others."""
        self._gpu = gpu
        self._index = gpu.info.index
        self._ledger = ledger
        self._population = population
        self._follower = follower
        self._holding = Holding(gpu, population, follower, calls, lever_s, self._done)
        self._changed = changed
        self._periods = periods
        self._space_of = space_of
        self._charged_us = 0  # when what was worked was charged last
        self._accounts: dict[Group, Account] = {}
        self._limited: dict[Process, Limited] = {}
        self._leaving: dict[Process, Limited] = {}  # those that stand yet, or may, and have no quota any more
        self._gone: dict[Process, Gone] = {}
        self._meters = Meters(gpu.late_us, gpu.switch_us)
        self._rotation = Rotation(self._may_wait, self._runs)
        self._known: set[Process] | None = None  # all processes at the last search; None where no quota was
        self._poked = trio.Event()
        self._poked.set()
        self._poked_us = self._since_us = 0  # when it was poked, of the next search and of the last
        self._woken = trio.Event()
        self._epoch = 0.0

    @property
    def pulls(self) -> bool:
        """Whether quotas take calls of the driver: up to RATE a second (``holding.py``)."""
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

    def stood(self, process: Process) -> bool:
        """Whether a process stood, for its quota or for the period of another, at any time since this was asked."""
        one = self._limited.get(process)
        if one is None:
            return False
        stood, one.stood = one.stood, one.is_spent
        return stood

    def quota_us(self, process: Process) -> int | None:
        """Return the quota that a process alone has at once, microseconds; None where it has none of its own."""
        one = self._limited.get(process)
        return None if one is None else one.quota_us

    def ended(self, process: Process) -> None:
        """A process is about to be gone: what it did last is charged, by a guess where that is told late."""
        self._leaving.pop(process, None)
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
        """Has quotas hold until cancelled. What stands then goes on once this is run again, or the Follower takes it
        back."""
        self._begin()
        async with trio.open_nursery() as self._holding.nursery:
            self._holding.nursery.start_soon(self._search)
            while True:
                self._woken, began = trio.Event(), trio.current_time()
                due_us = self._look() if self._accounts or self._leaving else None
                busy = trio.current_time() - began
                with trio.CancelScope(deadline=math.inf if due_us is None else self._epoch + due_us / 1e6):
                    await self._woken.wait()
                await trio.sleep(max(CHECK_US / 1e6, LOOK_REST * busy))

    def _begin(self) -> None:
        """Its time begins. Of what was used while it did not run, and of what that was charged to, nothing is known:
        each quota begins anew, and what stands goes on."""
        self._epoch = trio.current_time()
        self._forget()
        self._poked.set()
        self._poked_us = self._since_us = 0

    def _forget(self) -> None:
        """Nothing is charged to any account any more, and nothing is owed."""
        self._leaving |= self._limited
        for one in self._leaving.values():
            one.let_go()
        self._accounts, self._limited, self._gone, self._known = {}, {}, {}, None
        self._meters = Meters(self._gpu.late_us, self._gpu.switch_us)
        self._rotation = Rotation(self._may_wait, self._runs)

    def _lose(self) -> None:
        """The GPU is lost: nothing is used there, and no lever moves. Once it is back, quotas begin anew."""
        self._forget()
        for process in self._leaving:
            member = Member(process, self._index)
            if self._population.holds(member) and self._follower.spent(member) is not None:
                self._follower.forgive(member)
                self._changed(process, False)
        self._leaving.clear()

    # The processes below quotas

    async def _search(self) -> None:
        """Looks for quotas, and for processes below them, whenever something has changed. In parts, as there may be a
        thousand: those that are known are held to theirs meanwhile."""
        while True:
            await self._poked.wait()
            self._poked, self._since_us = trio.Event(), self._poked_us
            if self._gpu.lost:
                self._lose()
                continue
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
        before, self._limited, self._leaving = {**self._leaving, **self._limited}, {}, {}
        known = set()
        for member in there:
            if not self._population.holds(member):
                continue
            process = member.process
            known.add(process)
            if self._accounts and (mine := self._accounts_of(member)):
                one = self._limited[process] = self._renewed(process, before.get(process), mine)
                books = levels.get(member)
                one.equals = mine, self._population.path(member)[1:], books and (books.priority, books.weight)
                space = self._space_of(member)
                one.apart = frozenset() if space is None else self._apart(member, space)
                if space is not None:
                    one.equals = None  # the programs of a space work at the same time
            elif self._stands(process, one := before.get(process) or Limited(())):
                one.let_go()
                self._leaving[process] = one
            if self._follower.spent(member) is None and not one.busy:
                self._changed(process, False)  # a move that failed has let it go on, say
        if not self._accounts:
            self._gone.clear()
        self._meters.keep([*self._limited, *self._gone])
        self._known = known if self._accounts else None

    def _stands(self, process: Process, one: Limited) -> bool:
        """Whether a process stands, or may: nothing is known of it before its levers have moved."""
        member = Member(process, self._index)
        is_there = self._population.holds(member)
        return is_there and (one.busy or one.is_behind or self._follower.spent(member) is not None)

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

    def _apart(self, member: Member, space: Space) -> frozenset[Account]:
        """Return the accounts of a process of a space that not all programs of the space have: its own, and those of
        slices within the space, or elsewhere, if it was moved.
        """
        return frozenset(
            self._accounts[level]
            for level in self._population.path(member)
            if level in self._accounts and not (isinstance(level, SliceOn) and level.slice.contains(space.slice))
        )

    # What they work

    def _now_us(self) -> int:
        return round((trio.current_time() - self._epoch) * 1e6)

    def _charge(self) -> None:
        """Charges what processes worked since the last time to all accounts above them."""
        looks = [self._look_at(process, one.is_pulled) for process, one in self._limited.items()]
        for process, activity, _ in looks:
            one = self._limited[process]
            one.pending, one.is_pulled = activity.pending, one.busy
        looks += [self._look_back_at(process, one) for process, one in self._gone.items()]
        now_us = self._now_us()
        passed_us, self._charged_us = now_us - self._charged_us, now_us
        for process, worked in self._shared(passed_us, self._meters.look(now_us, looks)).items():
            limited = self._limited.get(process)
            self._rotation.charge(process, worked)
            for account in (self._gone[process] if limited is None else limited).accounts if worked else ():
                account.charge(worked)
        on = {
            account
            for process, one in self._limited.items()
            if self._meters.worked_on(process)
            for account in one.accounts
        }
        for account in self._accounts.values():
            account.note(account in on)
        for process, gone in list(self._gone.items()):
            if self._meters.is_settled(gone.at_us) or now_us - gone.at_us > LATE_US:
                del self._gone[process]

    def _shared(self, passed_us: int, worked: Mapping[Process, int]) -> Mapping[Process, int]:
        """Return what processes worked, where those of a space, which work at the same time, have no more together than
        the time that has passed."""
        spaces: dict[Space, int] = {}
        whose = {}
        for process, us in worked.items():
            if us > 0 and (space := self._space_of(Member(process, self._index))) is not None:
                whose[process] = space
                spaces[space] = spaces.get(space, 0) + us
        if not whose or passed_us <= 0:
            return worked
        return {
            process: us * passed_us // max(passed_us, spaces[whose[process]]) if process in whose else us
            for process, us in worked.items()
        }

    def _look_at(self, process: Process, is_pulled: bool = False) -> Look:
        """`is_pulled`: a lever of it was under way since the last look. When it moved is not known: in the middle."""
        member, activity = Member(process, self._index), self._gpu.activity(process)
        if not self._population.holds(member):
            return process, activity, 0.0
        if is_pulled and activity.pending is None:
            return process, activity, 0.5
        stands = self._follower.spent(member) is not None and activity.pending is None
        return process, activity, float(self._follower.runs(member) and not stands)

    def _look_back_at(self, process: Process, one: Gone) -> Look:
        figure = one.activity.gpu_usec if one.is_told else self._gpu.activity(process).gpu_usec
        return process, attrs.evolve(one.activity, gpu_usec=figure), 0.0

    def _look(self) -> int:
        """Charges what was worked, has processes stand or go on, and returns when to look again, microseconds."""
        now_us = self._now_us()
        for account in self._accounts.values():
            account.strung, account.is_late = 1, False
        for process, one in self._limited.items():
            one.wants_sight = bool(one.levers) and self._meters.wants_sight(process, now_us)
            one.part, one.pace = self._meters.part(process), self._meters.pace(process)
            works = one.part >= WORKS  # else what is given back is by samples, and a second late
            for account in one.accounts if one.levers and self._gpu.late_us and works else ():
                account.is_late = True
        string(RATE, self._limited.values())
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
        self._leaving = {process: one for process, one in self._leaving.items() if self._stands(process, one)}
        self._holding.begin()
        each = (*self._leaving.items(), *sorted(self._limited.items(), key=lambda item: item[1].demand))
        dues += [due_us for process, one in each if (due_us := self._act(process, one, now_us))]
        return min(dues, default=now_us + 1_000_000)

    def _waits_for_its_turn(self, process: Process) -> bool:
        member = Member(process, self._index)
        return self._population.holds(member) and self._follower.place(member).off

    def _runs(self, process: Process) -> bool:
        return self._follower.runs(Member(process, self._index))

    def _may_wait(self, process: Process) -> bool:
        """Whether a process may wait for a period of its own: it always has work, and nothing but its quota keeps it
        from that."""
        member = Member(process, self._index)
        kept = self._follower.is_held(member) or self._follower.applied(member).off.reasons & ~Reason.QUOTA
        return not kept and self._meters.always_works(process)

    def _busy_accounts(self) -> Iterator[Account]:
        """The accounts that a process is charged to."""
        return iter({id(account): account for one in self._limited.values() for account in one.accounts}.values())

    # What is done about it

    def _act(self, process: Process, one: Limited, now_us: int) -> int | None:
        """Has a process stand or go on, as its accounts say; returns when to look at it again, if that matters."""
        member = Member(process, self._index)
        if one.busy or not self._population.holds(member) or self._gpu.lost or self._follower.is_held(member):
            return None
        spent, is_spent = self._follower.spent(member), one.is_spent
        one.stood = one.stood or is_spent
        if is_spent and spent is None:
            return self._start(process, one, Act.SPEND)
        if not is_spent and (spent is not None or one.is_behind):
            due_us = self._start(process, one, Act.RESTORE)
            for account in one.accounts if due_us is not None else ():
                account.is_kept = True
            return due_us
        if spent is Engines.NONE and not one.is_gated and self._gpu.activity(process).pending != 0:
            if self._meters.after_us(process) > self._most_after_us(member, one):
                self._start(process, one, Act.STOP)
            return now_us + GATE_LOOK_US
        if self._gpu.late_us:
            return now_us + (WAIT_US if is_spent else READ_US)
        return None

    def _most_after_us(self, member: Member, one: Limited) -> int:
        """Return the work that a process which stands at its gate may be guessed to do there, microseconds. Beside
        others what it launched ahead has slices of its own, each after theirs, and it is guessed to have a part of all
        that time."""
        if self._gpu.is_leaving(member.process) or self._population.record(member).memory.may_come():
            return MOVING_US
        if one.holds:
            return GATE_US + 2 * self._follower.place(member).timeslice_us
        return GATE_US if one.is_bound else 0

    def _start(self, process: Process, one: Limited, act: Act) -> int | None:
        """Has that done; returns when to ask again where it is not, microseconds."""
        again = self._holding.start(process, one, act)
        one.is_pulled = one.is_pulled or one.busy
        return None if again is None else round((again - self._epoch) * 1e6)

    def _done(self, process: Process, one: Limited, act: Act | None) -> None:
        """That was done with a process; nothing, where it failed."""
        spent = self._follower.spent(Member(process, self._index))
        if act is Act.RESTORE:
            self._meters.begins(process)
        elif act is Act.SPEND and spent is Engines.NONE:
            self._meters.closes(process)
        self._changed(process, spent is not None and self._stands_for_long(one))
        self._woken.set()

    def _stands_for_long(self, one: Limited) -> bool:
        now_us = self._now_us()
        return any(account.is_spent and account.next_us(now_us) - now_us >= TURN_US for account in one.accounts)
