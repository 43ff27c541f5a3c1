"""Sets: programs whose working sets are on the GPU together, and that have their turns together. Pure.

If all programs fit, there is one set and there are no memory turns. Otherwise gangs are packed into sets by what they
use in a turn. (This is the safety sum of Salus: memory that takes no turns is always there, and of the rest one set at
a time.)

A set has at most half of the room where that is possible. Then the whole next set is fetched while this one runs, and
no set waits for the bus. Sets that fill the room are fewer, so each waits for fewer others, but all of their memory
moves while nothing runs. Which is better depends on the bus and the length of turns, and is calculated.

A set stays as it is for as long as it fits, because each change moves memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

import attrs

from backend.scheduler.memory.claims import Name, Rates
from backend.scheduler.memory.spaces import Spaces

BETTER = 1.1
"""Factor by which other sets must be more efficient than the present ones to replace them."""


@attrs.frozen
class Unit:
    """A gang as it is packed: its programs and their working set."""

    members: frozenset[Name]
    """The programs of the gang."""
    used: Mapping[int, int]
    """Working set of all of them together on each GPU, bytes."""

    def on(self, gpu: int) -> int:
        """Return the working set on a GPU, bytes."""
        return self.used.get(gpu, 0)


Set = frozenset[Name]
"""Programs that have their turns together."""

Rooms = Mapping[int, int]
"""Room for the sets on each GPU, bytes: without memory that is always there or cannot be moved."""


def pack(units: Sequence[Unit], rooms: Rooms, rates: Rates, turn_us: int, before: Sequence[Set] = ()) -> Sequence[Set]:
    """Return the sets of the units that take turns, each unit in one of them. `turn_us` is the length of a turn.
    `before` are the present sets; they are kept if they fit and the best others are less than BETTER times as
    efficient.
    """
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
    """Time of the moves that bring a set its memory after another set, if none of it is there before."""

    hidden_us: int
    """Microseconds of moves for which there is room while the other set runs."""
    stall_us: int
    """Microseconds of moves that have to wait until nothing runs, however long the turn was."""


NO_COST = Cost(0, 0)
"""The cost where nothing has to move."""


def cost(one: Sequence[Unit], other: Sequence[Unit], rooms: Rooms, rates: Rates) -> Cost:
    """Return the cost of set `other` when it runs after set `one`. What exceeds the room by itself is not fetched."""
    return _cost(_used(one, rooms), _used(other, rooms), rooms, rates)


def _used(one: Sequence[Unit], rooms: Rooms) -> Rooms:
    """Return the working set of a set on each GPU, bytes."""
    return {gpu: sum(unit.on(gpu) for unit in one) for gpu in rooms}


def _cost(one: Rooms, other: Rooms, rooms: Rooms, rates: Rates) -> Cost:
    hidden_us = stall_us = 0
    for gpu, room in rooms.items():
        lacks, stalls = _lacks(one[gpu], other[gpu], room)
        hidden_us = max(hidden_us, rates.into_usec(lacks - stalls))
        stall_us = max(stall_us, rates.into_usec(stalls))
    return Cost(hidden_us, stall_us)


def _lacks(one: int, other: int, room: int) -> tuple[int, int]:
    """Return what a set lacks on a GPU with that room, and what of it has no room beside another one, bytes."""
    lacks = max(0, min(room, other))
    return lacks, lacks - min(lacks, max(0, room - one))


def costs(sets: Sequence[Sequence[Unit]], rooms: Rooms, rates: Rates) -> Sequence[Cost]:
    """Return the cost of each change from one set to the next, around the cycle; none for a single set."""
    if len(sets) < 2:
        return []
    return [cost(one, other, rooms, rates) for one, other in zip(sets, [*sets[1:], *sets[:1]], strict=True)]


def comings(sets: Sequence[Sequence[Unit]], rooms: Rooms, rates: Rates) -> Mapping[Set, Cost]:
    """Return the most that each set costs after any other one, since turns are given as they are due, in any order. The
    stall is the longest possible, which is that after the others that use most of each GPU, and the hidden part is the
    rest of what all of its memory takes: on one GPU that is the same after each.
    """
    used = [_used(one, rooms) for one in sets]
    most = {gpu: heapq.nlargest(2, ((one[gpu], at) for at, one in enumerate(used))) for gpu in rooms}
    found = {}
    for at, one in enumerate(sets):
        whole_us = stall_us = 0
        for gpu, room in rooms.items():
            for before in [nbytes for nbytes, other in most[gpu] if other != at][:1]:
                lacks, stalls = _lacks(before, used[at][gpu], room)
                whole_us = max(whole_us, rates.into_usec(lacks))
                stall_us = max(stall_us, rates.into_usec(stalls))
        found[members(one)] = Cost(whole_us - stall_us, stall_us)
    return found


def efficiency(sets: Sequence[Sequence[Unit]], rooms: Rooms, rates: Rates, turn_us: int) -> float:
    """Return the fraction of the time in which programs run, if the sets have turns of `turn_us` in a cycle."""
    found = costs(sets, rooms, rates)
    stalls = sum(one.stall_us + max(0, one.hidden_us - turn_us) for one in found)
    return len(found) * turn_us / (len(found) * turn_us + stalls) if found else 1.0


def _fits(units: Sequence[Unit], rooms: Rooms, part: int = 1) -> bool:
    """Return whether the units fit together; where several of them use a GPU, into 1/`part` of its room."""
    for gpu, room in rooms.items():
        used = [unit.on(gpu) for unit in units if unit.on(gpu)]
        if sum(used) > room or (len(used) > 1 and part * sum(used) > room):
            return False
    return True


def _kept(units: Sequence[Unit], rooms: Rooms, before: Sequence[Set]) -> Sequence[Sequence[Unit]]:
    """Return the sets as they were, with new units added where there is room; none if one does not fit any more. A set
    without members is dropped.
    """
    places = {name: at for at, one in reversed([*enumerate(before)]) for name in one}
    there: dict[int, list[Unit]] = {}
    left: list[Unit] = []
    for unit in units:
        if was := [places[name] for name in unit.members if name in places]:
            there.setdefault(min(was), []).append(unit)
        else:
            left.append(unit)
    kept = [there[at] for at in sorted(there)]
    if not kept or any(len(one) > 1 and not _fits(one, rooms) for one in kept):
        return ()
    return _filled(kept, left, rooms, 2)


def _packed(units: Sequence[Unit], rooms: Rooms, part: int) -> Sequence[Sequence[Unit]]:
    """Return sets that use at most 1/`part` of the room each, by first fit, the largest units first. A larger unit is a
    set by itself.
    """
    largest = sorted(units, key=lambda unit: -max((unit.on(gpu) / max(1, room) for gpu, room in rooms.items())))
    return _filled([], largest, rooms, part)


def _filled(sets: Sequence[list[Unit]], units: Sequence[Unit], rooms: Rooms, part: int) -> Sequence[Sequence[Unit]]:
    """Return the sets with each unit in the first that it fits into, or in one of its own."""
    found = list(sets)
    spaces = Spaces(rooms, part, len(found) + len(units))
    for at, one in enumerate(found):
        spaces.put(at, [unit.used for unit in one])
    for unit in units:
        first = spaces.first(unit.used)
        at = len(found) if first is None else first
        if first is None:
            found.append([])
        found[at].append(unit)
        spaces.put(at, [unit.used])
    return found
