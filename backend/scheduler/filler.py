"""Fillers: processes that fill the engine time which the first layer leaves free, one at a time, in turns.

Several fillers on the runlist, with the shortest slices, would switch among themselves all the time, and a process
with precedence would have to wait for all of them. So a filler with work is off the runlist until its turn. A filler
without work stays on the runlist, because it could not show new work while off; so does one that rarely has work.

A filler that did not fill its last turn gets the next turn once enough work has come meanwhile to fill it, and the
turn lasts as long as that work takes: no time lies idle while others have work. Work is taken to come at the rate at
which the filler used the engine since its last turn began, so a late trace does no harm.

Use after the end of a turn, while the filler drains, counts as if its turn had gone on, and the turn of the next
filler stands still meanwhile (``ends.py`` says why). The filler with the least turn time relative to its share has
the next turn. So a filler that drained for long waits longer, by as much as it delayed the end of another's turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backend.process.identity import Process
from backend.scheduler.bucket import Bucket
from backend.scheduler.shares import Layer
from backend.scheduler.use import HUNGRY_US, LEAD_US, Use

TURN_US = 500_000
"""Full length of a turn, microseconds. A change of turns takes two driver calls."""
TURN_LEAST_US = 50_000
"""Shortest turn of a filler that has too little work for more, microseconds, per filler that takes turns and per
context of its own. A turn costs a driver call for each context, so this bounds the rate of calls.
"""
TURN_LONG_US = 2_000_000
"""Length of a turn while every filler has filled its last turns, as batch programs do, microseconds. At a change
of turns the two programs switch all the time until the first is off the runlist; longer turns have fewer changes.
"""
LONG_AFTER = 3
"""Number of consecutive turns that every filler must have filled before turns are that long."""
RATE, BURST = 2.5, 5
"""Turns that begin: per second, and at once. Each takes two driver calls or more, of which there are 25 a second."""
REST_MOST_US = 3_000_000
"""Longest wait for a turn of a filler that has too little work to fill one, microseconds."""
RARE = 0.005
"""Fraction of free time up to which a filler counts as rare and takes no turns. While a rare filler has work,
it and the filler whose turn it is switch all the time, and it has a tenth of the engine: at most a twentieth is
lost that way.
"""
FILLED = 0.9
"""Fraction of the free time of a turn from which on the turn counts as filled: the filler had more work."""
NOTHING = 0.05
"""Fraction of a turn. If no more than this of the turn was free, it does not show how much work the filler had."""
AIM = 0.8
"""Fraction of its next turn that a filler's work is to fill; less than 1, since work does not come evenly."""
GROWTH = 1.5
"""Factor by which the work expected of a filler grows with each filled turn after the first, which may be chance."""
IDLE = 0.5
"""Fraction of a window. If the engine is idle for more than that after work of the current filler, its turn ends."""
ENOUGH = 0.5
"""Fraction of the engine time that a filler would use in equal turns. A filler that uses less does not save up
work while it rests, so its turns do not wait for work.
"""
SLACK = 0.01
"""Tolerance of that comparison, as a fraction of all time; `needs` may also grow by it from turn to turn."""
FORGETS = 1.02
"""Factor by which `needs` may grow from one turn to the next; a turn that used less lowers it at once."""
LATE_US = 250_000
"""Delay after which use is reported at the latest, microseconds: a trace is 0.2 s late."""
MEMORY_US = 4_000_000
"""Age at which the history of an account is halved, microseconds."""
TRICKLE = 0.01
"""Fraction of turn time that fillers behind the best layer get in any case, so that none starves."""
OWED_US = 100_000
"""Time that must be owed to those fillers before one of them has it as a turn, microseconds."""


@attrs.define
class Account:
    """An estimate of the work that one filler has. *Free* time is engine time that the first layer leaves."""

    since: int
    """Start of the history, microseconds of the Filler's own clock."""
    free: int = 0
    """Free time since then, microseconds."""
    used: int = 0
    """Engine time that the filler used since then, microseconds."""
    length: int = 0
    """Planned length of its last turn, microseconds; 0 before the first."""
    on: int = 0
    """Time of that turn that has passed, microseconds."""
    offered: int = 0
    """Free time within `on`, microseconds."""
    done: int = 0
    """Engine time used in that turn, microseconds; use that is reported late is added."""
    heard: int = 0
    """Free time of the windows in which `done` was reported, microseconds. A trace is equally late for all
    processes, so `done` is of an earlier period than `offered`.
    """
    seen: bool = False
    """Whether any of `done` was reported before the last window."""
    unheard: int = 0
    """Upper bound of the use in that turn that was not reported when the turn ended, microseconds."""
    turned: int = 0
    """Engine time in the last window that belongs to the filler's turn, microseconds."""
    drained: int = 0
    """Engine time in the last window that the filler used while it drained, after its turn, microseconds."""
    ended: int = 0
    """End of its last turn, microseconds; up to now while the turn goes on."""
    waits: bool = False
    """Whether the filler has been off the runlist since then."""
    needs: float = 1.0
    """Estimate of the largest fraction of a turn that the filler uses when no work has piled up for it."""
    times: int = 0
    """Number of consecutive filled turns before its last turn."""

    def observe(self, now: int, free: int, used: int, waits: bool, drains: bool) -> None:
        """Account for the time up to `now`, in which `free` microseconds were free and the filler used `used`.
        `waits` says whether it was off the runlist, and `drains` whether it was draining: then use beyond
        `unheard` is not of its turn.
        """
        of_turn = min(used, self.unheard) if drains else used
        self.unheard -= of_turn if drains else 0
        self.turned, self.drained = of_turn, used - of_turn
        self.waits |= waits
        self.seen = self.done > 0
        self.free += free
        self.used += used
        self.done += of_turn
        age = now - self.since
        if age > MEMORY_US:
            self.since += age // 2
            self.free //= 2
            self.used //= 2

    def begin(self, now: int, length: int) -> None:
        """Begin a turn at `now`. If the last turn ended less than LATE_US ago, this one continues it."""
        self.length = length
        if now - self.ended < LATE_US:
            return
        self.times = self.times + 1 if self.filled else 0
        if self.offered >= NOTHING * self.on > 0:
            needs = min(1.0, self.needs * FORGETS + SLACK)
            less = max(0.0, needs - self.done / self.offered)
            self.needs = needs - less * min(1.0, self.on / LATE_US)
        self.ended = now
        self.on = self.offered = self.done = self.heard = 0
        self.seen = self.waits = False

    def end(self, *, had_it: bool) -> None:
        """Note that the filler goes off the runlist. With `had_it`, from its own turn: what that turn offered and
        is not reported as used may have been used, since a trace does not say how late it is.
        """
        self.unheard = min(LATE_US, max(0, self.offered - self.done)) if had_it else 0

    @property
    def filled(self) -> bool:
        """Whether the filler had enough work for all of its last turn."""
        left = min(self.heard, self.offered) if self.done else self.offered
        return self.done >= FILLED * left or self.offered < NOTHING * self.on

    def is_rare(self, now: int) -> bool:
        """Whether the filler has work only now and then."""
        little = now - self.since >= MEMORY_US // 2 and self.used <= RARE * self.free
        return little and not self.waits and not self.length

    def next(self, now: int, least: int, part: float) -> int:
        """Return the length of the next turn, microseconds; 0 while there is too little work for `least`. `part` is
        the filler's fraction of all turns when every filler fills its own.

        A program that computes, pauses and computes again has no more work after a rest than without one. It gets its
        turns as if it filled them.
        """
        if self.offered < NOTHING * self.on:
            return max(TURN_US, least)
        off, age = now - self.ended, max(1, now - self.since)
        had = self.used / age
        needs = min(self.needs, self.done / self.offered) if self.on > 2 * LATE_US and self.offered else self.needs
        if not self.filled and had + SLACK < ENOUGH * needs * part * self.free / age:
            return max(TURN_US, least)
        coming = (GROWTH ** min(self.times, 20) if self.filled else 1.0) * had
        spare = AIM * self.offered / max(1, self.on) - coming
        if spare <= 0:
            return max(TURN_US, least)
        length = min(TURN_US, coming * off / spare)
        return 0 if length < least and off < REST_MOST_US else max(least, round(length))


@attrs.define
class Filler:
    """The turns of the fillers of one GPU."""

    _now: int = 0
    _accounts: dict[Process, Account] = attrs.field(factory=dict)
    _had: dict[Process, float] = attrs.field(factory=dict)  # turn time divided by the share that is due
    _current: Process | None = None
    _off: set[Process] = attrs.field(factory=set)
    _drained: Mapping[Process, float] = attrs.field(factory=dict)  # fractions of the last window, of draining fillers
    _heard: Process | None = None  # the filler that had the turn in the windows now being reported
    _turns: Bucket = attrs.field(factory=lambda: Bucket(RATE, BURST))
    _left: int = 0  # microseconds left of the current turn
    _more: int = 0  # of these, microseconds that it has only as long as all fillers fill their turns
    _owed: float = 0.0  # microseconds, to fillers behind the first layer of fillers
    _owing: bool = False  # whether the current turn pays what is owed

    def off(self, window_us: int, layers: Sequence[Layer], use: Use, lead_us: int, spare_us: int) -> set[Process]:
        """Return the processes that are to be off the runlist. `layers` are the layers of fillers. In the last
        window of `window_us` microseconds the first layer had the engine for `lead_us`, and the engine was idle
        for `spare_us`.
        """
        self._now += window_us
        self._observe(window_us, layers, use, lead_us, spare_us)
        hungry = [{p: part for p, part in layer.items() if self._is_hungry(p, use)} for layer in layers]
        hungry = [layer for layer in hungry if layer]
        parts = {process: part for layer in hungry for process, part in layer.items()}
        self._had = {process: had for process, had in self._had.items() if process in parts}
        newest = min(self._had.values(), default=0.0)
        for process in parts:
            self._had.setdefault(process, newest)
        if self._current in parts:
            self._charge(window_us, hungry, parts)
        before = self._current
        if len(parts) < 2:
            self._have_alone(next(iter(parts), None), any(use.stands(process) for process in self._accounts))
        else:
            self._choose(window_us, hungry, parts, use)
        off = {process for process in parts if process != self._current}
        if parts:  # a standing process waits for its turn as well: if let go on, it would run beside the current one
            standing = {process for process in self._accounts if use.stands(process)}
            off |= standing - {self._current}
        for process in off - self._off:
            self._accounts[process].end(had_it=process == before)
        self._off = off
        return self._off

    def _observe(self, window_us: int, layers: Sequence[Layer], use: Use, lead_us: int, spare_us: int) -> None:
        last, self._accounts = self._accounts, {}
        free = max(0, window_us - lead_us)
        for process in (process for layer in layers for process in layer):
            if process not in last or not use.wants(process, LEAD_US):
                self._accounts[process] = Account(self._now, ended=self._now - REST_MOST_US)
                continue
            account = self._accounts[process] = last[process]
            used = use.used(process)
            drains = process in self._off and use.drains(process) and used is not None
            account.observe(self._now, free, free if used is None else used, process in self._off, drains)
        self._drained = self._parts_drained(free, use)
        self._hear(free)
        if self._current is None or self._current not in last:
            return
        current = last[self._current]
        if current is self._accounts.get(self._current):  # otherwise its account is a new one
            part = 1 - sum(self._drained.values())
            current.on += round(window_us * part)
            if current.seen and spare_us > IDLE * window_us:
                self._left = 0
            current.offered += round(free * part)
            current.ended = self._now

    def _hear(self, free_us: int) -> None:
        """Add the free time of the last window to the fillers that used it in their turns. A window without use
        goes to the filler that used the window before, as long as more of its use may be reported, and to the
        current one after that.
        """
        used = {process: account.turned for process, account in self._accounts.items() if account.turned}
        whole = sum(used.values()) + sum(account.drained for account in self._accounts.values())
        for process, us in used.items():
            self._accounts[process].heard += round(free_us * us / whole)
        if used:
            self._heard = max(used, key=lambda process: (process == self._current, self._accounts[process].ended))
        elif not whole:
            last, current = (self._accounts.get(one) if one else None for one in (self._heard, self._current))
            idle = last if last and self._now - last.ended <= LATE_US else current
            if idle:
                idle.heard += free_us

    def _parts_drained(self, free_us: int, use: Use) -> Mapping[Process, float]:
        """Return the fraction of the last window that each filler spent draining: its use out of that of the
        draining fillers and the current one, so that switches between them are charged to both. An unknown use of
        the current one counts as `free_us`.
        """
        drained = {process: account.drained for process, account in self._accounts.items() if account.drained}
        if not drained or self._current is None:
            return {}
        used = use.used(self._current)
        whole = sum(drained.values()) + (free_us if used is None else used)
        return {process: us / whole for process, us in drained.items()}

    def _is_hungry(self, process: Process, use: Use) -> bool:
        """Return whether a filler has work for a turn. A filler whose quota is used up has none."""
        is_rare = self._accounts[process].is_rare(self._now)
        return use.wants(process, HUNGRY_US) and not is_rare and not use.stands(process)

    # Whose turn it is

    def _have_alone(self, process: Process | None, one_stands: bool) -> None:
        """Leave all free time to the one filler with work. Where another stands because its quota is used up, that
        is a turn with a length: otherwise the two would change places in each period.
        """
        if process is None or not one_stands:
            self._left = 0
        elif process != self._current:
            self._left = TURN_US
            self._accounts[process].begin(self._now, TURN_US)
        self._current = process

    def _charge(self, window_us: int, hungry: Sequence[Layer], parts: Layer) -> None:
        """Charge the last window to the current filler, and the time in which others drained to those."""
        assert self._current is not None
        for process, part in self._drained.items():
            if process in parts:
                self._had[process] += window_us * part / parts[process]
        window_us = round(window_us * (1 - sum(self._drained.values())))
        self._left -= window_us
        self._had[self._current] += window_us / parts[self._current]
        if len(hungry) < 2:
            self._owed = 0.0
        elif self._current in hungry[0]:
            self._owed = min(TURN_US, self._owed + TRICKLE * window_us)
        elif self._owing:
            self._owed = max(0.0, self._owed - window_us)

    def _choose(self, window_us: int, hungry: Sequence[Layer], parts: Layer, use: Use) -> None:
        """Choose the filler whose turn it is. After its turn it goes on where no other has enough work."""
        all_fill = self._all_fill(hungry)
        if not all_fill:
            self._left, self._more = self._left - self._more, 0
        due = [
            {
                p: length
                for p, part in layer.items()
                if (
                    length := self._accounts[p].next(self._now, self._least(p, hungry, use), part / sum(layer.values()))
                )
            }
            for layer in hungry
        ]
        here = next((n for n, layer in enumerate(hungry) if self._current in layer), None)
        owes = self._owed >= OWED_US and any(due[1:])
        if here is None:
            candidates = self._best(due) or self._longest_off(hungry, use)
        elif self._left >= window_us / 2:  # a filler of a better priority takes over now
            candidates = {} if self._owing else self._best(due[:here])
        else:
            # The one of all of these that had least: with the best layer only, the last layer would get nothing.
            candidates = {p: us for layer in due[1:] for p, us in layer.items()} if owes else self._best(due)
        chosen = min(candidates, key=lambda process: self._had[process], default=self._current)
        if chosen is None or not candidates:
            return
        if chosen != self._current and not self._turns.take(self._now / 1e6) and here is not None:
            return
        for process in self._had:  # a filler that was not waiting for its turn saves up no claim
            if not any(process in layer for layer in due):
                self._had[process] = max(self._had[process], self._had[chosen])
        self._owing = owes and chosen not in hungry[0]
        length = round(min(candidates[chosen], self._owed)) if self._owing else candidates[chosen]
        most = TURN_LONG_US if all_fill and not self._owing and length >= TURN_US else length
        others = [self._had[process] for process in candidates if process != chosen]
        if chosen == self._current and others:  # it goes on until it has had as much as the next one
            behind = round((min(others) - self._had[chosen]) * parts[chosen])
            most = min(most, max(behind, self._least(chosen, hungry, use)))
        self._left, self._more = most, max(0, most - length)
        self._accounts[chosen].begin(self._now, self._left)
        self._current = chosen

    def _all_fill(self, hungry: Sequence[Layer]) -> bool:
        return all(self._accounts[process].times >= LONG_AFTER for layer in hungry for process in layer)

    @staticmethod
    def _best(due: Sequence[Mapping[Process, int]]) -> Mapping[Process, int]:
        """Return the best layer in which a turn is due."""
        return next((layer for layer in due if layer), {})

    def _longest_off(self, hungry: Sequence[Layer], use: Use) -> Mapping[Process, int]:
        process = min((p for layer in hungry for p in layer), key=lambda p: self._accounts[p].ended)
        return {process: self._least(process, hungry, use)}

    @staticmethod
    def _least(process: Process, hungry: Sequence[Layer], use: Use) -> int:
        return TURN_LEAST_US * sum(map(len, hungry)) * use.contexts(process)
