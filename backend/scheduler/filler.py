"""The processes that fill what others leave: one at a time, in turns.

Several on the runlist with the shortest slices would switch among themselves all the time, and one that goes before
them would have to wait for all of them. So one that has something to do is off the runlist until its turn; one that has
nothing to do stays there, so that it is seen when it has, and so does one that has something to do now and then only.

A process that does not fill its turn has the next one when what came for it meanwhile is enough to do for all of it,
and for as long as that takes: nothing lies idle while others have work. How much comes for it is what it used since its
last turn began, so it does not matter that a trace is late.

What a process uses after its turn, as it drains, counts as if its turn had gone on, and the turn of the next one stands
still meanwhile (``ends.py`` says why). The process that has had least time of turns, by the part that is due to it, has
the next one: a process that drained for long waits as much longer, for a turn of another that ends as much later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backend.process.identity import Process
from backend.scheduler.bucket import Bucket
from backend.scheduler.shares import Layer
from backend.scheduler.use import HUNGRY_US, LEAD_US, Use

TURN_US = 500_000
"""Microseconds for which one is on the runlist before the next one is: two calls of the driver each time."""
TURN_LEAST_US = 50_000
"""Microseconds of a turn of one that has not enough to do for more, for each that takes turns, and for each of its
contexts, of which each is a call: the more there are of them, the fewer turns there are in a second."""
TURN_LONG_US = 2_000_000
"""Microseconds of a turn where all of them have filled their last turns, as batch programs do: until the one before it
is off, that and the next one switch all the time."""
LONG_AFTER = 3
"""Turns, one after the other, that all of them have filled by then."""
RATE, BURST = 2.5, 5
"""Turns that begin in a second, and at once: each is two calls of the driver or more, of which there are 25."""
REST_MOST_US = 3_000_000
"""Microseconds that one waits at most which has so little to do that it fills no turn."""
RARE = 0.005
"""Part of what is left up to which a process that uses no more takes no turns. While it has work, that process and the
one whose turn it is switch all the time, and a tenth of the engine is its own: a twentieth of it is lost at most."""
FILLED = 0.9
"""Part of a turn, of what those before it left of that, from which on a process that used so much had more to do."""
NOTHING = 0.05
"""Part of a turn up to which, where those before it left no more, what it had to do cannot be told."""
AIM = 0.8
"""How full the next turn of one that had not filled its last one is to be: what comes for it does not come evenly."""
GROWTH = 1.5
"""How many times more is expected of one with each turn that it filled but for the first: that may be chance."""
IDLE = 0.5
"""Part of a window in which the engine is idle, after work of the process whose turn it is, that ends the turn."""
ENOUGH = 0.5
"""Part of what one that rests would have in equal turns that it has at least, if nothing came for it meanwhile."""
SLACK = 0.01
"""Part of all the time by which that may be less."""
FORGETS = 1.02
"""How many times more one needs at most, than was seen in one turn, after each turn in which it used more."""
LATE_US = 250_000
"""Microseconds after which what was used is heard of at the latest: a trace is 0.2 s late."""
MEMORY_US = 4_000_000
"""Microseconds after which what a process used counts half."""
TRICKLE = 0.01
"""Part of the time that those behind the first layer have in any case: none starves."""
OWED_US = 100_000
"""Microseconds that are owed to them when they have it."""


@attrs.define
class Account:
    """What one that fills has to do, as far as can be told."""

    since: int
    """The time from which on it is counted, microseconds of the filler's own clock."""
    free: int = 0
    """Microseconds of the engine that those before it left, from then on."""
    used: int = 0
    """Microseconds of the engine that it used, from then on."""
    length: int = 0
    """What its last turn was to be, microseconds."""
    on: int = 0
    """How much of that has passed, microseconds."""
    offered: int = 0
    """In how much of that those before it did not have the engine, microseconds."""
    done: int = 0
    """Microseconds of the engine that it used of that: what is heard of late is counted, too."""
    heard: int = 0
    """Microseconds of the engine that those before it left in the windows that `done` is of: a trace is as late for all
    of them, so that what was offered to it in its turn is not of the same time."""
    seen: bool = False
    """Whether anything of that was before the last window."""
    unheard: int = 0
    """What of that may not have been heard of yet when the turn was over, microseconds."""
    turned: int = 0
    """Microseconds of the engine that it used in the last window, of its turn."""
    drained: int = 0
    """Microseconds of the engine that it used in the last window, and that were not of its turn."""
    ended: int = 0
    """When it was taken off."""
    waits: bool = False
    """Whether it has been off the runlist since then."""
    needs: float = 1.0
    """What it uses at most of a turn for which nothing has piled up."""
    times: int = 0
    """How many turns before the last one it had filled, one after the other."""

    def observe(self, now: int, free: int, used: int, waits: bool, drains: bool) -> None:
        """It is that time; so much was free since the last time, and so much used. `drains`: its turn was over, and
        what was not used in it was used in that of another."""
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
        """A turn begins. One that follows on the last one belongs to it."""
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
        """It is taken off, from its own turn or from that of another. What its turn offered to it, and was not heard to
        be used, may have been: how late a trace is, it does not say."""
        self.unheard = min(LATE_US, max(0, self.offered - self.done)) if had_it else 0

    @property
    def filled(self) -> bool:
        """Whether it had enough to do for all of its turn."""
        left = min(self.heard, self.offered) if self.done else self.offered
        return self.done >= FILLED * left or self.offered < NOTHING * self.on

    def is_rare(self, now: int) -> bool:
        """Whether it has something to do now and then only."""
        little = now - self.since >= MEMORY_US // 2 and self.used <= RARE * self.free
        return little and not self.waits and not self.length

    def next(self, now: int, least: int, part: float) -> int:
        """The length of the next turn; 0 while it has not enough to do for the least. `part` is what it has of all
        turns where each process fills its own.

        One that works, thinks, and works again has no more to do after a rest than without one. Its turns come as if it
        filled them.
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
    """The turns of the processes of one GPU that fill, and the one whose turn it is."""

    _now: int = 0
    _accounts: dict[Process, Account] = attrs.field(factory=dict)
    _had: dict[Process, float] = attrs.field(factory=dict)  # time of turns, by the part that was due
    _current: Process | None = None
    _off: set[Process] = attrs.field(factory=set)
    _drained: Mapping[Process, float] = attrs.field(factory=dict)  # parts of the last window, of those that drained
    _heard: Process | None = None  # whose turn it was in the windows that are heard of now
    _turns: Bucket = attrs.field(factory=lambda: Bucket(RATE, BURST))
    _left: int = 0  # microseconds of its turn
    _more: int = 0  # how many of them there are as long as all fill theirs
    _owed: float = 0.0  # microseconds, to those behind the first layer
    _owing: bool = False  # whether the turn is one that was owed

    def off(self, window_us: int, layers: Sequence[Layer], use: Use, lead_us: int, spare_us: int) -> set[Process]:
        """Return the processes that are to be off the runlist. In the last window those that go before had the engine
        for `lead_us` microseconds, and for `spare_us` it was idle."""
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
        if parts:  # one that stands waits for its turn as well: let go on, it would run beside the one that has its own
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
        if current is self._accounts.get(self._current):  # else it begins anew
            part = 1 - sum(self._drained.values())
            current.on += round(window_us * part)
            if current.seen and spare_us > IDLE * window_us:
                self._left = 0
            current.offered += round(free * part)
            current.ended = self._now

    def _hear(self, free_us: int) -> None:
        """Adds what was free in the last window to those that used it in their turns. One that was not used is of the
        process that used the one before, until that would be heard of no more, and then of the one whose turn it is."""
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
        """Return the part of the last window that each process had to drain in, of `free_us` microseconds that it and
        the one whose turn it is had: by what these used, as the switches between them are for both."""
        drained = {process: account.drained for process, account in self._accounts.items() if account.drained}
        if not drained or self._current is None:
            return {}
        used = use.used(self._current)
        whole = sum(drained.values()) + (free_us if used is None else used)
        return {process: us / whole for process, us in drained.items()}

    def _is_hungry(self, process: Process, use: Use) -> bool:
        """Whether a process has something to do in a turn; one whose quota is used up has not."""
        is_rare = self._accounts[process].is_rare(self._now)
        return use.wants(process, HUNGRY_US) and not is_rare and not use.stands(process)

    # Whose turn it is

    def _have_alone(self, process: Process | None, one_stands: bool) -> None:
        """Has a process have all that is left, for as long as no other has something to do. Where another stands, as
        its quota is used up, that is a turn: or the two would change places in each period."""
        if process is None or not one_stands:
            self._left = 0
        elif process != self._current:
            self._left = TURN_US
            self._accounts[process].begin(self._now, TURN_US)
        self._current = process

    def _charge(self, window_us: int, hungry: Sequence[Layer], parts: Layer) -> None:
        """Charges a window to the current process, but for what others drained, which is charged to these."""
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
        """One whose turn is over goes on where no other has enough to do."""
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
        elif self._left >= window_us / 2:  # one that goes before it by priority does so now
            candidates = {} if self._owing else self._best(due[:here])
        else:
            # The one of them that had least: the best of them would have all of it, and the last none.
            candidates = {p: us for layer in due[1:] for p, us in layer.items()} if owes else self._best(due)
        chosen = min(candidates, key=lambda process: self._had[process], default=self._current)
        if chosen is None or not candidates:
            return
        if chosen != self._current and not self._turns.take(self._now / 1e6) and here is not None:
            return
        for process in self._had:  # one that was not waiting for its turn saves up nothing
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
        """Those of the best priority among which one is due."""
        return next((layer for layer in due if layer), {})

    def _longest_off(self, hungry: Sequence[Layer], use: Use) -> Mapping[Process, int]:
        process = min((p for layer in hungry for p in layer), key=lambda p: self._accounts[p].ended)
        return {process: self._least(process, hungry, use)}

    @staticmethod
    def _least(process: Process, hungry: Sequence[Layer], use: Use) -> int:
        return TURN_LEAST_US * sum(map(len, hungry)) * use.contexts(process)
