"""Periods of a shared quota, given to its programs one after the other. Pure.

Without the library, each stop and start of a program takes driver calls. With all programs stopped and started in
every period, the calls multiply by the number of programs, and the periods would have to be long. The GPU runs one
program at a time, and the quota does not care which. So only one program works in each period, the one that has had
the least work; the others stand. A period then takes the calls of a single program, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set

import attrs

from backend.process.identity import Process
from backend.scheduler.limited import Limited

TURNS_MOST = 32
"""Processes that can take periods in turns, at most."""
SPARED = 2
"""Number of periods, counted as strung together (``stringing.py``), after which a process that has not used up the
quota counts as one without enough work.
"""
RESTS_US = 60_000_000
"""Microseconds until such a process is tried on the rota again."""


@attrs.define
class Rota:
    """The process that has the current period, and the work that each process has had."""

    current: Process | None = None
    """The process that has the period; None before the first period."""
    is_over: bool = attrs.field(default=True, init=False)
    """Whether the period is over."""
    _had: dict[Process, int] = attrs.field(factory=dict, init=False)  # work of those on the rota, microseconds

    def charge(self, process: Process, us: int) -> None:
        """Add `us` microseconds of work to a process. A negative figure takes back work that was overestimated."""
        if process in self._had:
            self._had[process] += us

    def end(self) -> None:
        """End the period; every process stands."""
        self.is_over = True

    def of(self, those: Sequence[Process]) -> Process:
        """Return the process that works now, one of `those`, of which there is at least one."""
        if self.is_over or self.current is None or self.current not in those:
            self.current = self.next(those)
            self.is_over = False
        return self.current

    def next(self, those: Sequence[Process]) -> Process:
        """Return the process of `those`, of which there is at least one, that has had the least work. A new process
        counts as having had as much as that one.
        """
        least = min((self._had[one] for one in those if one in self._had), default=0)
        self._had = {one: self._had.get(one, least) for one in those}
        return min(those, key=self._had.__getitem__)


@attrs.define
class Rotation:
    """The rota of one GPU, and which processes are on it."""

    may_wait: Callable[[Process], bool]
    """Return whether a process may wait for a period of its own."""
    runs: Callable[[Process], bool]
    """Return whether a process is on the runlist. While it waits for driver calls to get there, its period goes by
    unused, and that does not count as lack of work.
    """
    rota: Rota = attrs.field(factory=Rota)
    """The rota of those processes."""
    _since_us: int = 0  # start of the current period, or when its process was last off the runlist

    def charge(self, process: Process, us: int) -> None:
        """Add `us` microseconds of work to a process on the rota."""
        self.rota.charge(process, us)

    def look(self, now_us: int, limited: Mapping[Process, Limited], known: Set[Process] | None) -> None:
        """Choose the process that works in this period and set `waits` of all processes in `limited`. `limited`
        holds the processes below quotas; `known`, all processes on the GPU, or None where there is no quota.
        """
        those = self._on_it(now_us, limited, known)
        accounts = limited[those[0]].accounts if those else ()
        if not those:
            self.rota.end()
            for one in limited.values():
                one.waits = False
        elif any(account.is_spent for account in accounts):
            self.rota.end()
            following = self.rota.next(those)
            # All of them stand. The next period is computed for the one that goes on then (``stringing.py``).
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
            for account in accounts:  # the others stand, so what is left is owed to the group
                account.is_kept = True

    def _on_it(self, now_us: int, limited: Mapping[Process, Limited], known: Set[Process] | None) -> Sequence[Process]:
        """Return the processes that take periods in turns: all of the GPU's, provided that they are equals below
        the same quotas, always have work, and obey their levers. Otherwise return none, since a process that does
        not go on in its period would keep all others from theirs.

        A new process works beside the one that has the period, until all of them stand: only then is it known
        whether it takes levers, and to let all others go on until then would take as many calls as there are of
        them.
        """
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
