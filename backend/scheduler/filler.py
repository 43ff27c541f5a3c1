"""Who fills what others leave: one at a time, in turns.

Several on the runlist with the shortest slices would switch among themselves all the time, and who goes before them
would have to wait for all of them. So who has something to do is off the runlist until it is his turn; who has nothing
to do stays there, so that it is seen when he has, and so does who has something to do now and then only.

Who does not fill his turn has the next one when what came for him meanwhile is enough to do for all of it, and for as
long as that takes: nothing lies idle while others have work. How much comes for him is what he used since his last
turn began, so it does not matter that a trace is late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backend.process.identity import Process
from backend.scheduler.bucket import Bucket
from backend.scheduler.shares import Layer
from backend.scheduler.use import HUNGRY_US, LEAD_US, Use

TURN_US = 500_000
"""For how long one is on the runlist before the next one is: two calls of the driver each time."""
TURN_LEAST_US = 50_000
"""... where he has not enough to do for more, for each that takes turns, and for each of his contexts, of which each is
a call: the more there are of them, the fewer turns there are in a second."""
TURN_LONG_US = 2_000_000
"""... where all of them have filled their last turns, as batch programs do: until the one before him is off, the next
one and he switch all the time."""
LONG_AFTER = 3
"""So many turns, one after the other."""
RATE, BURST = 2.5, 5
"""Turns that begin in a second, and at once: each is two calls of the driver or more, of which there are 25."""
REST_MOST_US = 3_000_000
"""Who has so little to do that it fills no turn waits no longer than this."""
RARE = 0.005
"""Who uses no more of what is left than this takes no turns. While he has work he and the one whose turn it is switch
all the time, and a tenth of the engine is his: so a twentieth of it is lost at most."""
FILLED = 0.9
"""Who used so much of his turn, of what those before him left of it, had more to do."""
NOTHING = 0.05
"""Where they left no more of it than this, nobody can tell."""
AIM = 0.8
"""How full the next turn of one that had not is to be: what comes for him does not come evenly."""
GROWTH = 1.5
"""So many times more is expected of one with each turn that he filled but for the first: that may be chance."""
IDLE = 0.5
"""A turn ends in which the engine was seen to be idle for such a part of a window, after work of whose turn it is."""
ENOUGH = 0.5
"""Who rests has at least so much of what he would have in equal turns, if nothing came for him while he is off."""
SLACK = 0.01
"""... or of all the time so much less than that."""
FORGETS = 1.02
"""What he needs at most, as seen in one turn, is so many times more after each turn in which he used more."""
LATE_US = 250_000
"""What was used is heard of so much later at most: a trace is 0.2 s late."""
MEMORY_US = 4_000_000
"""What somebody used counts half after so long."""
TRICKLE = 0.01
"""The part of the time that those behind the first layer have in any case: nobody starves."""
OWED_US = 100_000
"""They have it when it is as much as this."""


@attrs.define
class Account:
    """What one that fills has to do, as far as can be told."""

    since: int
    """The time from which on it is counted, microseconds of the filler's own clock."""
    free: int = 0
    """From then on, what those before him left of it."""
    used: int = 0
    """The engine, from then on."""
    length: int = 0
    """What his last turn was to be."""
    on: int = 0
    """How much of it has passed."""
    offered: int = 0
    """... in which nobody before him had the engine."""
    done: int = 0
    """The engine, since it began: what is heard of late is counted too."""
    seen: bool = False
    """Whether anything of that was before the last window."""
    ended: int = 0
    """When he was taken off."""
    waits: bool = False
    """Whether he has been off the runlist since then."""
    needs: float = 1.0
    """What he uses at most of a turn for which nothing has piled up."""
    times: int = 0
    """How many turns before the last one he had filled, one after the other."""

    def observe(self, now: int, free: int, used: int, waits: bool) -> None:
        """It is that time; so much was free since the last time, and so much used."""
        self.waits |= waits
        self.seen = self.done > 0
        self.free += free
        self.used += used
        self.done += used
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
        self.on = self.offered = self.done = 0
        self.seen = self.waits = False

    @property
    def filled(self) -> bool:
        """Whether he had enough to do for all of his turn."""
        return self.done >= FILLED * self.offered or self.offered < NOTHING * self.on

    def is_rare(self, now: int) -> bool:
        """Whether he has something to do now and then only."""
        little = now - self.since >= MEMORY_US // 2 and self.used <= RARE * self.free
        return little and not self.waits and not self.length

    def next(self, now: int, least: int, part: float) -> int:
        """The length of the next turn; 0 while he has not enough to do for the least. `part` is what he has of all
        turns where everybody fills his.

        Who works, thinks, and works again has no more to do after a rest than without one. To him turns come as if he
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
    """Whose turn it is."""

    _now: int = 0
    _accounts: dict[Process, Account] = attrs.field(factory=dict)
    _had: dict[Process, float] = attrs.field(factory=dict)  # time of turns, by the part that was due
    _current: Process | None = None
    _off: set[Process] = attrs.field(factory=set)
    _turns: Bucket = attrs.field(factory=lambda: Bucket(RATE, BURST))
    _left: int = 0  # microseconds of its turn
    _more: int = 0  # how many of them there are as long as all fill theirs
    _owed: float = 0.0  # microseconds, to those behind the first layer
    _owing: bool = False  # whether the turn is one that was owed

    def off(self, window_us: int, layers: Sequence[Layer], use: Use, lead_us: int, spare_us: int) -> set[Process]:
        """Who is to be off the runlist. In the last window those who go before had the engine for `lead_us`
        microseconds, and for `spare_us` nobody."""
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
        if len(parts) < 2:
            self._current, self._left = next(iter(parts), None), 0
        else:
            self._choose(window_us, hungry, use)
        self._off = {process for process in parts if process != self._current}
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
            account.observe(self._now, free, free if used is None else used, process in self._off)
            if process == self._current:
                account.on += window_us
                if account.seen and spare_us > IDLE * window_us:
                    self._left = 0
                account.offered += free
                account.ended = self._now

    def _is_hungry(self, process: Process, use: Use) -> bool:
        return use.wants(process, HUNGRY_US) and not self._accounts[process].is_rare(self._now)

    # Whose turn it is

    def _charge(self, window_us: int, hungry: Sequence[Layer], parts: Layer) -> None:
        assert self._current is not None
        self._left -= window_us
        self._had[self._current] += window_us / parts[self._current]
        if len(hungry) < 2:
            self._owed = 0.0
        elif self._current in hungry[0]:
            self._owed = min(TURN_US, self._owed + TRICKLE * window_us)
        elif self._owing:
            self._owed = max(0.0, self._owed - window_us)

    def _choose(self, window_us: int, hungry: Sequence[Layer], use: Use) -> None:
        """One whose turn is over goes on where nobody else has enough to do."""
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
        elif self._left >= window_us / 2:  # who goes before it by priority does so now
            candidates = {} if self._owing else self._best(due[:here])
        else:
            # Whoever of them had least: the best of them would have all of it, and the last none.
            candidates = {p: us for layer in due[1:] for p, us in layer.items()} if owes else self._best(due)
        chosen = min(candidates, key=lambda process: self._had[process], default=self._current)
        if chosen is None or not candidates:
            return
        if chosen != self._current and not self._turns.take(self._now / 1e6) and here is not None:
            return
        for process in self._had:  # who was not waiting for his turn saves up nothing
            if not any(process in layer for layer in due):
                self._had[process] = max(self._had[process], self._had[chosen])
        self._owing = owes and chosen not in hungry[0]
        length = round(min(candidates[chosen], self._owed)) if self._owing else candidates[chosen]
        self._more = max(0, TURN_LONG_US - length) if all_fill and not self._owing and length >= TURN_US else 0
        self._left = length + self._more
        self._accounts[chosen].begin(self._now, self._left)
        self._current = chosen

    def _all_fill(self, hungry: Sequence[Layer]) -> bool:
        return all(self._accounts[process].times >= LONG_AFTER for layer in hungry for process in layer)

    @staticmethod
    def _best(due: Sequence[Mapping[Process, int]]) -> Mapping[Process, int]:
        """Those of the best priority among which anybody is due."""
        return next((layer for layer in due if layer), {})

    def _longest_off(self, hungry: Sequence[Layer], use: Use) -> Mapping[Process, int]:
        process = min((p for layer in hungry for p in layer), key=lambda p: self._accounts[p].ended)
        return {process: self._least(process, hungry, use)}

    @staticmethod
    def _least(process: Process, hungry: Sequence[Layer], use: Use) -> int:
        return TURN_LEAST_US * sum(map(len, hungry)) * use.contexts(process)
