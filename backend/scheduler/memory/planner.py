"""The planner: which programs have the turn, and what moves for the next ones. Pure, without a clock and without a GPU.

It plans for GPUs that gangs tie together: a turn is one on all of them. With room for all there are no turns, and
nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, ParamSpec, TypeVar

import attrs

from backend.scheduler.memory import moves as moving
from backend.scheduler.memory.claims import Claim, Claims, Name, Rates
from backend.scheduler.memory.gangs import Gang, Ties, gangs
from backend.scheduler.memory.moves import Moves, Way
from backend.scheduler.memory.sets import Cost, Rooms, Set, Unit, comings, members, pack
from backend.scheduler.memory.turns import TURN_US, Turns, Waiter

CALM_US = 5_000_000
"""Microseconds for which there has to be room for all before turns end: sets that come and go move memory each time."""

P = ParamSpec("P")
R = TypeVar("R")

Still = tuple[int, Name, Way]
"""What does not move for now: memory of a program, that way, on a GPU."""


@attrs.frozen
class Program:
    """What the planner knows of one program."""

    claims: Mapping[int, Claim]
    """What it needs of each GPU that it has a context on."""
    ties: Ties
    """What ties it to others."""
    waiter: Waiter = attrs.field(factory=Waiter)
    """What is asked of its turns."""
    is_ahead: bool = False
    """Whether it goes before others by its priority: it is in every set, and its memory is not taken for them."""
    has_work: bool = True
    """Whether it has something to do: one that has not needs no turn, and gives first."""

    @property
    def is_kept(self) -> bool:
        """Whether low keeps all of its memory where it is: others had nothing of it if it waited."""
        return bool(self.claims) and all(claim.is_kept for claim in self.claims.values())

    @property
    def is_served(self) -> bool:
        """Whether it has room for what it lacks where it is in every set. One that is there as it does not follow, or
        does not tell, has what it has: its word alone takes nothing from others."""
        return self.is_ahead or self.is_kept


@attrs.frozen
class Plan:
    """What is to be done from now on."""

    sets: Sequence[Set] = ()
    """Programs that have their turns together; one set, where there are no turns."""
    always: frozenset[Name] = frozenset()
    """Programs that are in every set."""
    waits: frozenset[Name] = frozenset()
    """Programs that wait for their turns."""
    coming: Set = frozenset()
    """Programs whose turn is the next."""
    moves: Mapping[int, Moves] = attrs.field(factory=dict)
    """What moves on each GPU now: behind the turn, or where it is over, before the next."""
    is_over: bool = False
    """Whether the turn is over."""
    ends_us: int | None = None
    """When the turn ends, if nothing changes; where it is over, when the next one begins, whatever lacks then. None
    where there are no turns."""

    @property
    def has_turns(self) -> bool:
        """Whether there are turns for the sake of memory."""
        return len(self.sets) > 1


class Last(Generic[P, R]):
    """A pure function that returns what it did the last time, where it is called with equal arguments."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._last: tuple[object, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function returns."""
        if self._last is None or self._last[0] != (args, kwargs):
            self._last = (args, kwargs), self._function(*args, **kwargs)
        return self._last[1]


class Planner:
    """See the module."""

    def __init__(self, rates: Rates) -> None:
        """`rates` is what the bus of a GPU carries, as far as is known; see :attr:`rates`."""
        self.rates = rates
        """What the bus of each GPU carries each way, both at once."""
        self.turns = Turns()
        """Turns, as they are now."""
        self.gangs: Sequence[Gang] = ()
        """The gangs of the programs that were looked at last."""
        self._pressed_us: int | None = None  # when there was no room for all last
        # Between two looks neither programs nor room are others, as a rule: what was packed then is what would be now.
        self._packed = Last(pack)
        self._costed = Last(_costs)

    def decide(
        self,
        now_us: int,
        programs: Mapping[Name, Program],
        rooms: Rooms,
        still: Collection[Still] = (),
        *,
        is_patient: bool = False,
    ) -> Plan:
        """Return the plan from now on. `rooms` is what the claims of all programs have room for on each GPU, bytes;
        `still` is what does not move now: sets and turns are as if it did. Where it `is_patient` a turn is put off for
        memory that is slower to come than is known."""
        units, always = self._units(programs, rooms)
        left = {gpu: max(0, room - _reserved(gpu, programs, always)) for gpu, room in rooms.items()}
        sets = self._sets(now_us, units, left)
        waiters = {name: programs[name].waiter for one in sets for name in one}
        self.turns.observe(now_us, sets, waiters, self._costed(sets, units, left, self.rates))
        turns = self.turns
        if not turns.has_turns:
            if turns.coming is not None:
                turns.begin(now_us)
            return Plan(sets, always)
        is_over = turns.current is None
        coming = turns.coming or turns.queue()[0]
        runs = (turns.current or frozenset()) | always
        ends_us = turns.latest_us if is_over else turns.ends_us
        if is_over and is_patient:
            ends_us = max(ends_us, self._begins_us(now_us, programs, coming))
        left_us = max(0, ends_us - now_us)
        moves = {
            gpu: self._moves(gpu, now_us, left_us, programs, room, coming, runs, always, still)
            for gpu, room in rooms.items()
        }
        return Plan(sets, always, turns.waiting, coming, moves, is_over, ends_us)

    def _begins_us(self, now_us: int, programs: Mapping[Name, Program], coming: Set) -> int:
        """When the next turn begins at the latest that is put off for what still comes."""
        lacks: dict[int, int] = {}
        for name in coming & programs.keys():
            for gpu, claim in programs[name].claims.items():
                lacks[gpu] = lacks.get(gpu, 0) + claim.missing
        later_us = max(map(self.rates.into_usec, lacks.values()), default=0)
        most_us = self.turns.ended_us + self.turns.patience_us(coming)
        return min(now_us + later_us, most_us)

    def end(self, now_us: int) -> None:
        """The turn is over."""
        self.turns.end(now_us)

    def begin(self, now_us: int) -> None:
        """The next turn has begun."""
        self.turns.begin(now_us)

    def _units(self, programs: Mapping[Name, Program], rooms: Rooms) -> tuple[Sequence[Unit], frozenset[Name]]:
        """Return the gangs that have turns, and the programs that are in every set. Of several GPUs some may have room
        for all that is there: what is on those alone needs no turns."""
        units, always = [], set[Name]()
        self.gangs = gangs({name: one.ties for name, one in programs.items()})
        for gang in self.gangs:
            those = {name: programs[name] for name in gang.members}
            is_kept = all(one.is_kept for one in those.values())
            if not gang.takes_turns or is_kept or any(one.is_ahead for one in those.values()):
                always |= gang.members
            elif any(one.has_work for one in those.values()):
                each = {gpu: [one.claims[gpu] for one in those.values() if gpu in one.claims] for gpu in gang.gpus}
                used = {gpu: sum(one.used - one.kept for one in claims) for gpu, claims in each.items()}
                units.append(Unit(gang.members, used))
        if len(rooms) > 1:
            left = {gpu: room - _reserved(gpu, programs, always) for gpu, room in rooms.items()}
            short = {gpu for gpu, room in left.items() if sum(unit.on(gpu) for unit in units) > room}
            always |= {name for unit in units if short.isdisjoint(unit.used) for name in unit.members}
            units = [unit for unit in units if not short.isdisjoint(unit.used)]
        return units, frozenset(always)

    def _sets(self, now_us: int, units: Sequence[Unit], rooms: Rooms) -> Sequence[Set]:
        """Return the sets. Where there is room for all again, those that there are stay for some time."""
        before = self.turns.sets if self.turns.has_turns else ()
        sets = self._packed(units, rooms, self.rates, TURN_US, before)
        if len(sets) > 1:
            self._pressed_us = now_us
        elif self.turns.has_turns and self._pressed_us is not None and now_us - self._pressed_us < CALM_US:
            there = members(units)
            kept = [one & there for one in self.turns.sets if one & there]
            if len(kept) > 1 and frozenset().union(*kept) == there:
                return kept
        return sets

    def _moves(
        self,
        gpu: int,
        now_us: int,
        left_us: int,
        programs: Mapping[Name, Program],
        room: int,
        coming: Set,
        runs: Collection[Name],
        always: Collection[Name],
        still: Collection[Still],
    ) -> Moves:
        """Return what moves on one GPU for the set that comes next. Nothing goes for what does not come in the
        `left_us` microseconds before this turn ends, or the next begins: then what ran gives, which is used last."""
        claims = {name: _still(gpu, name, claim, still) for name, claim in claims_on(gpu, programs).items()}
        due = [name for name in always if name in claims and programs[name].is_served]
        reserved = min(room, sum(max(0, claims[name].missing - claims[name].spare) for name in due))
        wanted = [name for name in claims if name in coming and name not in runs]
        most_in = self.rates.into_in(left_us)
        return moving.plan(room - reserved, claims, wanted, runs, self.turns.next_use(now_us), most_in)


def _costs(sets: Sequence[Set], units: Sequence[Unit], rooms: Rooms, rates: Rates) -> Mapping[Set, Cost]:
    """Return what it takes at most that each set has its memory."""
    places = {name: at for at, one in enumerate(sets) for name in one}
    there: list[list[Unit]] = [[] for _ in sets]
    for unit in units:
        for at in {places[name] for name in unit.members if name in places}:
            there[at].append(unit)
    return comings(there, rooms, rates)


def _still(gpu: int, name: Name, claim: Claim, still: Collection[Still]) -> Claim:
    """Return what a program claims of the moves that can be made now."""
    if (gpu, name, Way.OUT) in still:
        claim = attrs.evolve(claim, leaves=0)
    if (gpu, name, Way.IN) in still:
        claim = attrs.evolve(claim, used=claim.resident)
    return claim


def claims_on(gpu: int, programs: Mapping[Name, Program]) -> Claims:
    """Return the claims of the programs that have a context on a GPU."""
    return {name: one.claims[gpu] for name, one in programs.items() if gpu in one.claims}


def _reserved(gpu: int, programs: Mapping[Name, Program], always: Collection[Name]) -> int:
    """Return the bytes of a GPU that are always taken: what those in every set have, and need where they are served
    before others, and what the others keep while they wait."""
    found = 0
    for name, one in claims_on(gpu, programs).items():
        if name not in always:
            found += one.stays + one.kept
        else:
            found += max(one.used, one.held) if programs[name].is_served else one.held
    return found
