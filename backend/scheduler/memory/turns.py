"""Turns of sets: which one runs, for how long, and which ones come then. Pure, in microseconds of a clock of its own.

Each set has a time at which it waited as long as it may: the earliest of its programs'. The next turn is that of the
set most behind its part, where that is in time for all, else that of the earliest; and a turn ends in time for all:
with what each set has at least before it (:meth:`Turns.step_us`), none waits longer than is said
(:meth:`Turns.bound_us`). That is what was asked for, where it is as long as all others have at least; else it is that,
which grows with the programs, and with their memory: no lever is pulled sooner than there is a call for it, and no turn
begins sooner than its memory can be there. (A turn without its memory is none: what is read over the bus is as slow as
a fortieth. So what was asked for is not kept by one.)

From the begin of one turn to that of the next it takes at least what the next one's memory takes, behind the turn and
after it, in whichever order they come. One whose turn is over waits behind those that are due before it. What it pushes
back is due no sooner than it is, so no sooner than all sets but one take.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import attrs

from backend.scheduler.memory.claims import Name
from backend.scheduler.memory.sets import NO_COST, Cost, Set

TURN_US = 500_000
"""Length of a turn, microseconds, where none waits too long by that: as of those that fill (``filler.py``)."""
TURN_LONG_US = 1_000_000
"""Length of a turn at most, microseconds, where longer waits than WAIT_US were asked for."""
TURN_LEAST_US = 50_000
"""Length of a turn at least, microseconds: what it takes to end one (5 ms) is a tenth of it, and levers are moved 25
times a second."""
OVERHEAD_US = 25_000
"""Microseconds from the end of a turn to the begin of the next at most, besides moves: a drain, and the levers."""
SLOT_LEAST_US = TURN_LEAST_US + OVERHEAD_US
"""Microseconds from the begin of a turn to that of the next, at least."""
AT_ONCE_US = 600_000
"""Microseconds in which as many calls come back as are there for one switch, where all before it had their slots: all
that the scheduler saves (BURST of ``scheduler.py``), at the most of them a second. A set with more begins later."""
LOST = 0.05
"""Part of the time that may be lost by moves and switches, where turns could be longer."""
LATER = 1.5
"""Times as long as its memory takes at most that a turn is put off for it, where what moves was slower than is known. A
program that lacks a tenth of its memory is as slow as a fifth, and so is its drain, for which the next one waits."""
HALF = 0.4999
"""Part of the GPU from which some programs have half of it together: parts are rounded."""
ROUNDS = 2.0
"""Rounds that a program waits at most whose set has less than the part of each, where that is longer than what was
asked for: so there is time for more turns of the sets that have more."""
NO_END = 1 << 62
"""A time that does not come, microseconds."""
WAIT_US = 1_000_000
"""Microseconds that a program waits for its turn at most, where nothing else is asked for."""


@attrs.frozen
class Waiter:
    """What is asked of the turns of one program."""

    wait_us: int = WAIT_US
    """How long it may wait for a turn."""
    part: float = 1.0
    """Its part of the GPU, beside those of others."""
    levers_us: int = 0
    """Microseconds in which the calls of the driver come back that one of its turns takes: its end and its begin."""


@attrs.frozen
class Two:
    """The first two of some numbers, in an order: the first of all but one of them is known by that."""

    first: float = 0
    """The first."""
    second: float = 0
    """The second; it may be as much."""

    @classmethod
    def most(cls, numbers: Iterable[float]) -> Two:
        """Return the largest two; 0 for those that are not there."""
        return cls(*[*heapq.nlargest(2, numbers), 0, 0][:2])

    @classmethod
    def least(cls, numbers: Iterable[float]) -> Two:
        """Return the smallest two; 0 for those that are not there."""
        return cls(*[*heapq.nsmallest(2, numbers), 0, 0][:2])

    def beside(self, number: float) -> float:
        """Return the first of all but one, which is `number`."""
        return self.second if number == self.first else self.first


@attrs.frozen
class Slots:
    """What the slots of sets take at least, microseconds, and the parts of sets: reckoned once for each look, where
    turns ask for it often, and of each set."""

    leads_us: Mapping[Set, int] = attrs.field(factory=dict)
    """How long before the turn of each set the one before begins, at least: as what has room beside that one comes,
    which is no shorter than TURN_LEAST_US, and then the rest."""
    levers_us: Mapping[Set, int] = attrs.field(factory=dict)
    """In how long the calls of the levers of each set come back."""
    stall_us: int = 0
    """The longest stall of all sets."""
    stalls_us: int = 0
    """The stalls of all sets, and the time from the end of the turn of each to the next begin, besides."""
    shortest_us: Two = attrs.field(factory=Two)
    """The shortest stalls."""
    hidden_us: Two = attrs.field(factory=Two)
    """The longest moves of all sets that the turn before hides."""
    parts: Mapping[Set, float] = attrs.field(factory=dict)
    """The part of each set, which is that of its programs."""
    part: float = 0.0
    """The parts of all."""
    late_us: int = 0
    """How much later than OVERHEAD_US a turn may begin, since not all calls for it are there."""
    rounds_us: Mapping[Name, int] = attrs.field(factory=dict)
    """How long each program waits at most, where that is longer than was asked for: a round, and up to ROUNDS of them
    for one of a set that has less than the part of each."""
    round_us: int = 0
    """From the end of the turn of any set to the begin of its next one at most, where all others have the least.

    The first of them comes after a stall, and from each to the next it takes what that one's levers or the memory of
    the next take (:meth:`Turns.step_us`): as many of the longest of both, whatever the order."""

    @classmethod
    def of(cls, sets: Sequence[Set], waiters: Mapping[Name, Waiter], costs: Mapping[Set, Cost]) -> Slots:
        """Return those of some sets, given what is asked of their programs and what it takes that each has its
        memory."""
        of_sets = {one: costs.get(one, NO_COST) for one in sets}
        leads_us = {
            one: max(TURN_LEAST_US, cost.hidden_us) + cost.stall_us + OVERHEAD_US for one, cost in of_sets.items()
        }
        levers_us = {one: sum(waiters[name].levers_us for name in one) for one in sets}
        stalls_us = [cost.stall_us for cost in of_sets.values()]
        stall_us = max(stalls_us, default=0)
        late_us = max(0, max(levers_us.values(), default=0) - AT_ONCE_US)
        round_us = 0
        if len(sets) > 1:
            each = sorted([*leads_us.values(), *levers_us.values()], reverse=True)
            round_us = sum(each[: len(sets) - 1]) + stall_us + OVERHEAD_US + late_us
        parts = {one: sum(waiters[name].part for name in one) for one in sets}
        part, rounds_us = sum(parts.values()), dict[Name, int]()
        for one in sets:
            less = part / (len(sets) * parts[one]) if parts[one] else ROUNDS
            rounds = min(ROUNDS, max(1.0, 2 * less - 1))  # others have more turns, and longer ones
            rounds_us |= dict.fromkeys(one, round(rounds * round_us))
        return cls(
            leads_us,
            levers_us,
            stall_us,
            sum(stalls_us) + len(stalls_us) * OVERHEAD_US,
            Two.least(stalls_us),
            Two.most(cost.hidden_us for cost in of_sets.values()),
            parts,
            part,
            late_us,
            rounds_us,
            round_us,
        )


@attrs.define
class Turns:
    """See the module."""

    sets: Sequence[Set] = ()
    """All sets."""
    current: Set | None = None
    """The one that has the turn; None from the end of one to the begin of the next."""
    coming: Set | None = None
    """The one whose turn is about to begin."""
    began_us: int = 0
    """When the turn began."""
    ended_us: int = 0
    """When the last one ended."""
    _costs: Mapping[Set, Cost] = attrs.field(factory=dict)
    _waiters: Mapping[Name, Waiter] = attrs.field(factory=dict)
    _slots: Slots = attrs.field(factory=Slots)
    _since: dict[Name, int] = attrs.field(factory=dict)  # when each program began to wait
    _said: dict[Name, int] = attrs.field(factory=dict)  # the longest bound of each since then
    _queue: Sequence[Set] | None = None  # the order of the turns, where that was asked for since anything changed

    @property
    def has_turns(self) -> bool:
        """Whether there are turns at all."""
        return len(self.sets) > 1

    @property
    def waiting(self) -> frozenset[Name]:
        """The programs that wait for a turn."""
        return frozenset(self._since) if self.has_turns else frozenset()

    def bound_us(self, name: Name) -> int:
        """Return how long a program waits at most. While it waits that becomes no less: what is due sooner than was
        said may not come in time."""
        return max(self._least_us(name), self._said.get(name, 0))

    def _least_us(self, name: Name) -> int:
        """Return how long a program waits at most that begins to do so now."""
        return max(self._waiters[name].wait_us, self._slots.rounds_us[name])

    def step_us(self, one: Set, other: Set) -> int:
        """Return the time from the begin of a turn of a set to that of the next one, of another, at least,
        microseconds."""
        return max(self._slots.leads_us[other], self._slots.levers_us[one])

    def _cost(self, one: Set) -> Cost:
        return self._costs.get(one, NO_COST)

    def observe(
        self, now_us: int, sets: Sequence[Set], waiters: Mapping[Name, Waiter], costs: Mapping[Set, Cost] | None = None
    ) -> None:
        """Note the sets from now on, and what is asked of the turns of each of their programs. `costs` is what it takes
        at most that each has its memory. Where sets are others, the one with the most of the programs that run goes
        on."""
        self._waiters, self._costs, self._queue = waiters, costs or {}, None
        self._slots = Slots.of(sets, waiters, self._costs)
        if list(sets) != list(self.sets):
            self.current, self.coming = _heir(sets, self.current), _heir(sets, self.coming)
        self.sets = sets
        runs = self.current or frozenset[Name]()
        waits = [name for one in sets for name in one if name not in runs]
        self._since = {name: self._since.get(name, now_us) for name in waits}
        self._said = {name: self.bound_us(name) for name in waits}
        if self.current is None and self.coming is None and sets:
            self.coming, self._queue = self.queue()[0], None

    def end(self, now_us: int) -> None:
        """The turn is over: its programs wait from now on, and the first that waits is about to have the next."""
        self.ended_us = now_us
        self.coming = next(iter(self.queue()), self.current)
        for name in self.current or ():
            self._since[name] = now_us
        self.current = self._queue = None

    def begin(self, now_us: int) -> None:
        """The turn of the set that is coming begins."""
        self.current, self.coming, self.began_us, self._queue = self.coming, None, now_us, None
        for name in self.current or ():
            self._since.pop(name, None)
            self._said.pop(name, None)

    def queue(self) -> Sequence[Set]:
        """Return the sets that wait, in the order of their turns: as they are due, behind the one that is most behind
        its part, where all come in time all the same, and the turn that there is lasts as long as it would."""
        if self._queue is None:
            self._queue = self._in_order()
        return self._queue

    def _in_order(self) -> Sequence[Set]:
        waiting = sorted(
            (one for one in self.sets if one != self.current), key=lambda one: (one != self.coming, self._due(one))
        )
        if self.current is None or self.coming is not None or len(waiting) < 2:
            return waiting
        fair_us = self._fair_us()
        first = max(waiting, key=lambda one: self._behind(one, fair_us))
        queue = [first, *(one for one in waiting if one != first)]
        ends_us = self.began_us + self._length_us(self.current, fair_us)
        return queue if ends_us <= self._latest_us(queue) - self._cost(first).stall_us else waiting

    def _behind(self, one: Set, fair_us: int) -> float:
        """How much of its part a set that waits has had to wait for, by the begin of the turn that there is: the time
        from one of its turns to the next, by what that takes of it, with what moves for it while nothing runs."""
        takes_us = self._cost(one).stall_us + OVERHEAD_US + self._length_us(one, fair_us)
        waits_us = max(0, self.began_us - min((self._since[name] for name in one), default=self.began_us))
        return self._slots.parts[one] * (1 + waits_us / takes_us)

    @property
    def ends_us(self) -> int:
        """When the turn is over: at its length, or when another one has waited so long that all come in time, with
        what then still moves before."""
        return self._ends_us(self.queue(), self._fair_us())

    def _ends_us(self, queue: Sequence[Set], fair_us: int) -> int:
        if self.current is None or not self.has_turns:
            return NO_END
        length_us = self._length_us(self.current, fair_us)
        return min(self.began_us + length_us, self._latest_us(queue) - self._cost(queue[0]).stall_us)

    @property
    def latest_us(self) -> int:
        """When the next turn is about to begin at the latest, whatever is still to be moved, so that all come in
        time; it has begun OVERHEAD_US later, or as much later as its levers take."""
        return self._latest_us(self.queue())

    def _latest_us(self, queue: Sequence[Set]) -> int:
        latest_us, before_us, last = NO_END, 0, None
        for one in queue:
            before_us += 0 if last is None else self.step_us(last, one)
            latest_us, last = min(latest_us, self._until(one) - before_us), one
        return latest_us

    def patience_us(self, one: Set) -> int:
        """Return for how long after the end of a turn that of a set, which lacks memory, may be put off beyond
        `latest_us`: LATER times what its memory takes at most."""
        cost = self._cost(one)
        return round(LATER * (cost.hidden_us + cost.stall_us)) + OVERHEAD_US

    def next_use(self, now_us: int) -> Mapping[Name, int]:
        """Return when each program has its next turn, as far as can be told; of those that run, the one after this."""
        queue, fair_us = self.queue(), self._fair_us()
        found: dict[Name, int] = {}
        at = now_us if self.current is None else max(now_us, self._ends_us(queue, fair_us))
        for one in [*queue, *([self.current] if self.current else [])]:
            found |= dict.fromkeys(one, at)
            at += self._length_us(one, fair_us)
        return found

    def _until(self, one: Set) -> int:
        """When a set that waits is about to have its turn at the latest."""
        begins_us = OVERHEAD_US + self._slots.late_us
        return min((self._since[name] + self.bound_us(name) - begins_us for name in one), default=NO_END)

    def _due(self, one: Set) -> int:
        """When a set that waits is due by what holds now. By what was said while the bus was slow, say, it would be
        behind others that began to wait later, again and again."""
        return min((self._since[name] + self._least_us(name) for name in one), default=NO_END)

    def _waits_us(self, one: Set) -> int:
        """How long a set would wait at most if it had the part of each: lengths are of that, and of the part."""
        return min((max(self._waiters[name].wait_us, self._slots.round_us) for name in one), default=NO_END)

    def _fair_us(self) -> int:
        """Return how long those wait at least that have half of the GPU together, those that may wait longest. Turns
        are no longer than that allows: one that waits gladly has no more for it."""
        left = self._slots.part * HALF
        for waits_us, part in sorted(
            ((self._waits_us(one), self._slots.parts[one]) for one in self.sets), reverse=True
        ):
            left -= part
            if left <= 0:
                return waits_us
        return NO_END

    def _length_us(self, one: Set, fair_us: int) -> int:
        """Return the length of the turns of a set: as long as what moves meanwhile, and long beside what moves while
        nothing runs, as far as the set itself may wait for those of all others, if they were as long. Each set has the
        part of its programs. One that may wait less has its turns more often, and that of others ends for it; so its
        own are shorter, and the others have what they had."""
        if not self.has_turns:
            return NO_END
        slots, cost = self._slots, self._cost(one)
        waits_us = min(self._waits_us(one), fair_us)
        wanted_us = max(slots.hidden_us.first, (slots.stall_us + OVERHEAD_US) / LOST)
        most_us = TURN_US if waits_us <= WAIT_US else TURN_LONG_US
        # Between two turns of one all others have theirs; and each of all comes after a stall, that one, too.
        turn_us = min(wanted_us, most_us, (waits_us - slots.stalls_us) / (len(self.sets) - 1))
        part = slots.parts[one] * len(self.sets) / (slots.part or 1.0)
        # The calls of its levers have come back when the next one begins.
        pulled_us = slots.levers_us[one] - OVERHEAD_US - slots.shortest_us.beside(cost.stall_us)
        least_us = max(TURN_LEAST_US, slots.hidden_us.beside(cost.hidden_us), pulled_us)
        return round(max(least_us, turn_us * part))


def _heir(sets: Sequence[Set], before: Set | None) -> Set | None:
    """Return the set that has the most of the programs of another one; None where none has any."""
    if not before:
        return None
    heir = max(sets, key=lambda one: len(one & before), default=None)
    return heir if heir is not None and heir & before else None
