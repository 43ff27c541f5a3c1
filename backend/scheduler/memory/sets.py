"""Sets: programs whose working sets are on the GPU together, and that have their turns together. Pure.

Where all fit, there is one set, and no turns for the sake of memory. Else gangs are packed into sets, by what they use
in a turn (the safety sum of Salus: what is not in turns is always there, and of the rest one set at a time). A set has
at most half of the room, where that can be: then the next one comes as a whole while it runs, and none waits for the
bus. Sets that fill the room are fewer, and what waits for a turn waits for fewer of them; but all of each set moves
while nothing runs. Which is better depends on the bus and the turns, and is reckoned.

A set stays what it is as long as it fits, as each change moves memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from backend.scheduler.memory.claims import Name, Rates

BETTER = 1.1
"""Factor by which other sets have to be better than those that there are, to take their place."""


@attrs.frozen
class Unit:
    """A gang, and what it uses."""

    members: frozenset[Name]
    """Its programs."""
    used: Mapping[int, int]
    """Working set of all of them on each GPU, bytes."""

    def on(self, gpu: int) -> int:
        """Return its working set on a GPU, bytes."""
        return self.used.get(gpu, 0)


Set = frozenset[Name]
"""Programs that have their turns together."""

Rooms = Mapping[int, int]
"""Room for the sets on each GPU: without what is always there, and what cannot be moved; bytes."""


def pack(units: Sequence[Unit], rooms: Rooms, rates: Rates, turn_us: int, before: Sequence[Set] = ()) -> Sequence[Set]:
    """Return the sets of units that take turns, each unit in one of them. `turn_us` is the length of a turn, and
    `before` are the sets that there are: they stay where they fit, and others would not be much better."""
    if _fits(units, rooms):
        return [members(units)] if units else []
    kept = _kept(units, rooms, before)
    others = [_packed(units, rooms, part) for part in (1, 2)]
    best = max(others, key=lambda sets: (efficiency(sets, rooms, rates, turn_us), -len(sets)))
    if kept and BETTER * efficiency(kept, rooms, rates, turn_us) >= efficiency(best, rooms, rates, turn_us):
        best = kept
    return [members(one) for one in best]


def members(units: Iterable[Unit]) -> Set:
    """Return the programs of some units."""
    return frozenset(name for unit in units for name in unit.members)


@attrs.frozen
class Cost:
    """What it takes that a set has its memory after another one, where it has nothing of it before."""

    hidden_us: int
    """Microseconds of moves for which there is room beside the set that runs."""
    stall_us: int
    """Microseconds of moves that are made while nothing runs, however long the turn was."""


NO_COST = Cost(0, 0)
"""What it takes where nothing has to move."""


def cost(one: Sequence[Unit], other: Sequence[Unit], rooms: Rooms, rates: Rates) -> Cost:
    """Return what it takes that one set comes after another. What has no room by itself does not come."""
    hidden_us = stall_us = 0
    for gpu, room in rooms.items():
        lacks = max(0, min(room, sum(unit.on(gpu) for unit in other)))
        beside = min(lacks, max(0, room - sum(unit.on(gpu) for unit in one)))
        hidden_us = max(hidden_us, rates.into_usec(beside))
        stall_us = max(stall_us, rates.into_usec(lacks - beside))
    return Cost(hidden_us, stall_us)


def costs(sets: Sequence[Sequence[Unit]], rooms: Rooms, rates: Rates) -> Sequence[Cost]:
    """Return what each set takes that comes after the one before it, one after the other; nothing of one alone."""
    if len(sets) < 2:
        return []
    return [cost(one, other, rooms, rates) for one, other in zip(sets, [*sets[1:], *sets[:1]], strict=True)]


def comings(sets: Sequence[Sequence[Unit]], rooms: Rooms, rates: Rates) -> Mapping[Set, Cost]:
    """Return what each set takes to come after any of the others: the longest stall that may be, with as much behind
    the turn before it as makes up the whole. Turns are given as they are due, in any order."""
    found = {}
    for number, other in enumerate(sets):
        each = [cost(one, other, rooms, rates) for at, one in enumerate(sets) if at != number]
        stall_us = max((one.stall_us for one in each), default=0)
        whole_us = max((one.hidden_us + one.stall_us for one in each), default=0)
        found[members(other)] = Cost(whole_us - stall_us, stall_us)
    return found


def efficiency(sets: Sequence[Sequence[Unit]], rooms: Rooms, rates: Rates, turn_us: int) -> float:
    """Return the part of the time in which programs run, where sets have turns of that length one after the other."""
    found = costs(sets, rooms, rates)
    stalls = sum(one.stall_us + max(0, one.hidden_us - turn_us) for one in found)
    return len(found) * turn_us / (len(found) * turn_us + stalls) if found else 1.0


def _fits(units: Sequence[Unit], rooms: Rooms, part: int = 1) -> bool:
    """Return whether units together have room, and at most that part of it where there are several on a GPU."""
    for gpu, room in rooms.items():
        used = [unit.on(gpu) for unit in units if unit.on(gpu)]
        if sum(used) > room or (len(used) > 1 and part * sum(used) > room):
            return False
    return True


def _kept(units: Sequence[Unit], rooms: Rooms, before: Sequence[Set]) -> Sequence[Sequence[Unit]]:
    """Return the sets as they were, with those that have come where there is room; nothing where one does not fit any
    more. A set without a member is none."""
    kept: list[list[Unit]] = []
    left = list(units)
    for one in before:
        there = [unit for unit in left if unit.members & one]
        if there:
            left = [unit for unit in left if unit not in there]
            kept.append(there)
    if not kept or any(len(one) > 1 and not _fits(one, rooms) for one in kept):
        return ()
    return _filled(kept, left, rooms, 2)


def _packed(units: Sequence[Unit], rooms: Rooms, part: int) -> Sequence[Sequence[Unit]]:
    """Return sets of at most that part of the room each, the largest units first: first fit, decreasing. One that has
    more is a set by itself."""
    largest = sorted(units, key=lambda unit: -max((unit.on(gpu) / max(1, room) for gpu, room in rooms.items())))
    return _filled([], largest, rooms, part)


def _filled(sets: Sequence[list[Unit]], units: Iterable[Unit], rooms: Rooms, part: int) -> Sequence[Sequence[Unit]]:
    found = list(sets)
    for unit in units:
        for one in found:
            if _fits([*one, unit], rooms, part):
                one.append(unit)
                break
        else:
            found.append([unit])
    return found
