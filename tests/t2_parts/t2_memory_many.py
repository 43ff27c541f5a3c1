"""Turns of memory of many programs: what is reckoned once for all of them is what is reckoned for each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.scheduler.memory import sets as packing
from backend.scheduler.memory.claims import Claim, Name, Rates
from backend.scheduler.memory.gangs import Ties
from backend.scheduler.memory.planner import Planner, Program
from backend.scheduler.memory.sets import Cost, Rooms, Set, Unit, comings, cost, members, pack
from backend.scheduler.memory.turns import (
    HALF,
    LOST,
    OVERHEAD_US,
    TURN_LEAST_US,
    TURN_LONG_US,
    TURN_US,
    WAIT_US,
    Slots,
    Turns,
    Waiter,
)

GIB = 1 << 30
RATES = Rates(30 * 10**9, 30 * 10**9)
MANY = 1000
"""Programs, each of which makes a set."""
DECIDES_S = 0.2
"""Seconds of the processor that a plan for them takes at most: ten times what it takes, and a twentieth of what it did
where each set was reckoned with by each."""


@pytest.mark.parametrize("size", [48 * GIB, GIB])
def test_a_plan_for_many_programs_does_not_keep_the_daemon(size: int) -> None:
    """It is made anew with each piece that moves, and all else waits meanwhile."""
    ties = Ties(frozenset({0}), is_known=True)
    programs = {
        name: Program({0: Claim(size + name)}, ties, Waiter(WAIT_US, 1 / MANY, 150_000)) for name in range(MANY)
    }
    planner = Planner(RATES)
    planner.decide(0, programs, {0: 80 * GIB})
    planner.begin(0)
    took = []
    for now_us in (4_000, 8_000, 12_000, 16_000):
        programs[0] = Program({0: Claim(size - now_us)}, ties, programs[0].waiter)
        began = time.process_time()
        planner.decide(now_us, programs, {0: 80 * GIB})
        took.append(time.process_time() - began)
    assert min(took) <= DECIDES_S


# Lengths of turns


def _length_us(turns: Turns, waiters: Mapping[Name, Waiter], costs: Mapping[Set, Cost], one: Set) -> int:
    """Return the length of the turns of a set, reckoned from all others."""

    def part(one: Set) -> float:
        return sum(waiters[name].part for name in one)

    others = [other for other in turns.sets if other != one]
    total = sum(map(part, turns.sets))
    mine = part(one) * len(turns.sets) / total
    round_us = Slots.of(turns.sets, waiters, costs).round_us
    waits_us = {other: min(max(round_us, waiters[name].wait_us) for name in other) for other in turns.sets}
    fair_us = max(us for us in waits_us.values() if sum(part(o) for o in waits_us if waits_us[o] >= us) >= HALF * total)
    bound_us = min(waits_us[one], fair_us)
    stall_us = max(costs[other].stall_us for other in turns.sets)
    wanted_us = max(max(costs[other].hidden_us for other in turns.sets), (stall_us + OVERHEAD_US) / LOST)
    most_us = TURN_US if bound_us <= WAIT_US else TURN_LONG_US
    stalls_us = sum(costs[other].stall_us + OVERHEAD_US for other in turns.sets)
    turn_us = min(wanted_us, most_us, (bound_us - stalls_us) / len(others))
    levers_us = sum(waiters[name].levers_us for name in one)
    pulled_us = levers_us - OVERHEAD_US - min(costs[other].stall_us for other in others)
    least_us = max(TURN_LEAST_US, *(costs[other].hidden_us for other in others), pulled_us)
    return max(least_us, round(turn_us * mine))


WAITERS = st.builds(
    Waiter,
    st.sampled_from([100_000, WAIT_US, 3_000_000, 60_000_000]),
    st.sampled_from([0.1, 1 / 3, 1.0, 10.0]),
    st.sampled_from([0, 150_000, 900_000]),
)
COSTS = st.builds(Cost, st.sampled_from([0, 70_000, 300_000]), st.sampled_from([0, 0, 40_000, 300_000]))


@given(st.lists(st.tuples(st.lists(WAITERS, min_size=1, max_size=3), COSTS), min_size=2, max_size=9), st.data())
def test_lengths_of_turns_are_those_reckoned_from_all_others(
    drawn: Sequence[tuple[Sequence[Waiter], Cost]], data: st.DataObject
) -> None:
    names = [frozenset((at, number) for number in range(len(each))) for at, (each, _) in enumerate(drawn)]
    waiters = {(at, number): one for at, (each, _) in enumerate(drawn) for number, one in enumerate(each)}
    costs = {one: drawn[at][1] for at, one in enumerate(names)}
    turns, now_us = Turns(), 0
    for _ in range(4):
        turns.observe(now_us, names, waiters, costs)
        turns.begin(now_us)
        queue = turns.queue()
        now_us = data.draw(st.integers(turns.began_us, turns.began_us + 2_000_000))
        at_us, expected = max(now_us, turns.ends_us), dict[Name, int]()
        assert turns.ends_us == min(
            turns.began_us + _length_us(turns, waiters, costs, turns.current or names[0]),
            turns.latest_us - costs[queue[0]].stall_us,
        )
        for one in [*queue, turns.current or names[0]]:
            expected |= dict.fromkeys(one, at_us)
            at_us += _length_us(turns, waiters, costs, one)
        assert turns.next_use(now_us) == expected
        turns.end(now_us)


# What each set costs


SIZES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=2, max_size=9)


@given(SIZES, st.integers(1, 40), st.integers(1, 40), st.integers(1, 50), st.booleans())
def test_what_a_set_costs_is_the_most_after_any_other(
    sizes: Sequence[tuple[int, int]], room: int, other: int, rate: int, is_wide: bool
) -> None:
    """On one GPU. On several it takes no longer than the longest stall of any and the longest moves beside it."""
    rooms = {0: room, 1: other} if is_wide else {0: room}
    units = [[Unit(frozenset([at]), {0: used, 1: more})] for at, (used, more) in enumerate(sizes)]
    rates = Rates(rate, rate)
    for one, found in comings(units, rooms, rates).items():
        mine = next(each for each in units if members(each) == one)
        every = [cost(each, mine, rooms, rates) for each in units if each is not mine]
        assert found.stall_us == max(each.stall_us for each in every)
        longest_us = max(each.hidden_us + each.stall_us for each in every)
        took_us = found.hidden_us + found.stall_us
        assert took_us <= longest_us
        assert is_wide or took_us >= longest_us - 1, "that rounds up twice"
        assert took_us == max(rates.into_usec(min(mine[0].on(gpu), rooms[gpu])) for gpu in rooms)


# Sets


def _fits(units: Sequence[Unit], rooms: Rooms, part: int = 1) -> bool:
    for gpu, room in rooms.items():
        used = [unit.on(gpu) for unit in units if unit.on(gpu)]
        if sum(used) > room or (len(used) > 1 and part * sum(used) > room):
            return False
    return True


def _filled(sets: Sequence[list[Unit]], units: Iterable[Unit], rooms: Rooms, part: int) -> Sequence[Sequence[Unit]]:
    """Return the sets with each unit in the first that it fits into, with a look at each."""
    found = list(sets)
    for unit in units:
        one = next((one for one in found if _fits([*one, unit], rooms, part)), None)
        if one is None:
            found.append([unit])
        else:
            one.append(unit)
    return found


def _kept(units: Sequence[Unit], rooms: Rooms, before: Sequence[Set]) -> Sequence[Sequence[Unit]]:
    kept: list[list[Unit]] = []
    left = list(units)
    for one in before:
        if there := [unit for unit in left if unit.members & one]:
            left = [unit for unit in left if unit not in there]
            kept.append(there)
    if not kept or any(len(one) > 1 and not _fits(one, rooms) for one in kept):
        return ()
    return _filled(kept, left, rooms, 2)


@given(SIZES, SIZES, st.integers(-3, 60), st.integers(-3, 60), st.booleans())
def test_the_first_set_with_room_is_found_as_by_a_look_at_each(
    sizes: Sequence[tuple[int, int]],
    others: Sequence[tuple[int, int]],
    room: int,
    other: int,
    is_wide: bool,
) -> None:
    """Also where there is less than no room, as for what is always there, and where sets were others before."""
    rooms = {0: room, 1: other} if is_wide else {0: room}
    rates = Rates(7, 7)
    units = [Unit(frozenset([at, -1 - at]), {0: used, 1: more}) for at, (used, more) in enumerate(sizes)]
    before = pack([Unit(frozenset([at]), {0: used}) for at, (used, _) in enumerate(others)], {0: 40}, rates, TURN_US)
    found = pack(units, rooms, rates, TURN_US, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_filled", _filled)
        patch.setattr(packing, "_kept", _kept)
        assert pack(units, rooms, rates, TURN_US, before) == found
