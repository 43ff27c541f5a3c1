"""Which of several programs works in a period of the quota that they have together. Pure.

Without the library it takes calls of the driver to have a program stand and go on. For all of them in each period that
is as many times the calls of one as there are programs, so the periods would be long. The GPU does the work of one of
them at a time, and to the quota it is the same which that is. So one goes on in each period, the one that had the least
of them, and the others stand: that takes the calls of one program, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import attrs

from backend.process.identity import Process
from backend.scheduler.limited import Limited

TURNS_MOST = 32
"""Processes that have periods in turns, at most."""
SPARED = 2
"""Periods, strung together as they are, after which one that has not used up the quota meanwhile has no work."""
RESTS_US = 60_000_000
"""Microseconds until it is tried again whether it always has work."""


@attrs.define
class Rota:
    """See the module."""

    current: Process | None = None
    """The one that has the period; None before the first one."""
    is_over: bool = attrs.field(default=True, init=False)
    """Whether the period is over."""
    _had: dict[Process, int] = attrs.field(factory=dict, init=False)  # work in them, microseconds; of those there

    def charge(self, process: Process, us: int) -> None:
        """One of them worked for so many microseconds; for less than nothing where it was less than was thought."""
        if process in self._had:
            self._had[process] += us

    def end(self) -> None:
        """The period is over: all of them stand."""
        self.is_over = True

    def of(self, those: Sequence[Process]) -> Process:
        """Return the one of these, at least one, that works now."""
        if self.is_over or self.current is None or self.current not in those:
            self.current = self.next(those)
            self.is_over = False
        return self.current

    def next(self, those: Sequence[Process]) -> Process:
        """Return the one of these, at least one, that had the least. One that comes had as much as that."""
        least = min((self._had[one] for one in those if one in self._had), default=0)
        self._had = {one: self._had.get(one, least) for one in those}
        return min(those, key=self._had.__getitem__)


@attrs.define
class Rotation:
    """The rota of a GPU, and which processes are on it."""

    may_wait: Callable[[Process], bool]
    """Whether a process may wait for a period of its own."""
    runs: Callable[[Process], bool]
    """Whether a process is on the runlist: one that waits for calls of the driver leaves its period for that."""
    rota: Rota = attrs.field(factory=Rota)
    """Of those that are on it."""
    _since_us: int = 0  # when the one that works began, or was not on the runlist last

    def charge(self, process: Process, us: int) -> None:
        """As the rota's."""
        self.rota.charge(process, us)

    def look(self, now_us: int, limited: Mapping[Process, Limited], known: Set[Process] | None) -> None:
        """Has one process work in this period where the others may wait: `waits` of each. These are the processes below
        quotas, and all that are known of the GPU."""
        those = self._on_it(now_us, limited, known)
        accounts = limited[those[0]].accounts if those else ()
        if not those:
            self.rota.end()
            for one in limited.values():
                one.waits = False
        elif any(account.is_spent for account in accounts):
            self.rota.end()
            following = self.rota.next(those)
            # All of them stand: the next period is reckoned by that (``stringing.py``).
            for process, one in limited.items():
                one.waits = process in those and process != following
        else:
            begins, before = self.rota.is_over, self.rota.current
            current = self.rota.of(those)
            longest_us = max(account.strung * account.period_us for account in accounts)
            if begins or current != before or not self.runs(current):
                self._since_us = now_us
            elif now_us - self._since_us > SPARED * longest_us:
                limited[current].rests_us = now_us + RESTS_US
            for process, one in limited.items():
                one.waits = process in those and process != current
            for account in accounts:  # the others are kept from what that one leaves
                account.is_kept = True

    def _on_it(self, now_us: int, limited: Mapping[Process, Limited], known: Set[Process] | None) -> Sequence[Process]:
        """Return the processes that may work one in each period: all that are on the GPU, if they are equals below the
        same quotas, always have work, and do as they are had; else none. One that does not go on in its period would
        keep all others from theirs. One that has just come works besides, until all of them stand: only then is known
        whether that takes levers, and to have the others go on for that would take as many calls as there are."""
        if not 2 <= len(limited) <= TURNS_MOST or known != limited.keys():
            return ()
        first = next(iter(limited.values()))
        for process, one in limited.items():
            if (
                one.failing
                or one.levers is False
                or one.equals != first.equals
                or now_us < one.rests_us
                or not self.may_wait(process)
            ):
                return ()
        those = tuple(process for process, one in limited.items() if one.levers)
        return those if len(those) > 1 else ()
