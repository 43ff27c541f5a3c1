"""The scheduler over the runlist of the software GPU: a slice gets its share, whichever of its programs uses it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.support.scheduled import DEFAULT, Machine, Program, shares, used_in


def test_a_slice_has_its_part_however_many_are_in_it() -> None:
    machine = Machine(*[Program(n, slice="batch", contexts=n) for n in (1, 2, 3)], Program(4))
    assert shares(machine, 10) == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2], rel=0.05)


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(("services", "load"), [(1, 0.1), (3, 0.02), (3, 0.005)])
def test_what_a_child_leaves_is_its_siblings(services: int, load: float, late: int) -> None:
    """The share is not passed to other groups: the slice keeps its half, with few driver calls."""
    children = [Program(n, slice="a", request_us=2000, load=load) for n in range(2, 2 + services)]
    machine = Machine(Program(1, slice="a"), *children, Program(9), late=late)
    machine.run(25)
    done = used_in(machine, 20)
    assert sum(done[:-1]) / sum(done) == pytest.approx(0.5, rel=0.05)
    assert sum(done) > 0.9 * 20e6
    assert machine.rate(25) < 1


@pytest.mark.parametrize(("load", "request_us"), [(1e-5, 2000), (0.02, 2000), (0.02, 20_000), (0.1, 2000)])
@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
@pytest.mark.parametrize("explicit_us", [1000, 8000])
def test_what_a_child_leaves_is_its_siblings_beside_an_explicit_timeslice(
    explicit_us: int, others: int, load: float, request_us: int
) -> None:
    """The slice has 2.048 ms, whichever of its programs uses them, and so has a slice beside it."""
    light = Program(3, slice="a", request_us=request_us, load=load)
    rest = [Program(n) for n in range(4, 4 + others)]
    machine = Machine(Program(1, explicit_us=explicit_us), Program(2, slice="a"), light, *rest, late=2)
    machine.run(15)
    done = used_in(machine, 60)
    print(done, machine.rate(15))
    found = [done[1] + done[2], *done[3:]]
    assert [us / done[0] for us in found] == [pytest.approx(DEFAULT / explicit_us, rel=0.05)] * (1 + others)
    assert machine.rate(15) < 1


@pytest.mark.parametrize("explicit_us", [0, DEFAULT])
def test_who_is_known_to_use_little_takes_nothing_from_his_siblings_when_he_comes(explicit_us: int) -> None:
    """Two programs of a slice have work every 10 s or more rarely, and four fifths of its weight."""
    rare = [Program(n, slice="a", weight=200, request_us=2000, load=0.0002) for n in (3, 4)]
    machine = Machine(Program(1, explicit_us=explicit_us), Program(2, slice="a"), *rare, late=2)
    machine.run(20)
    done = used_in(machine, 60)
    print(done, [len(one.latencies) for one in rare], machine.rate(20))
    assert sum(done[1:]) / done[0] == pytest.approx(1, rel=0.06)
    assert machine.rate(20) < 1


def family(chance: random.Random, first: int, name: str) -> list[Program]:
    """Return programs below the root, or in a slice of that name; at least one always has work."""

    def busy(pid: int, weights: Sequence[int], slice: str = "") -> Program:
        return Program(pid, weight=chance.choice(weights), contexts=chance.choice([1, 1, 1, 4]), slice=slice)

    if chance.random() < 0.5:
        return [busy(first, (50, 100, 100, 300))]
    weights = (50, 100, 100, 200)
    programs = [busy(first, weights, name)]
    for pid in range(first + 1, first + chance.randint(1, 3)):
        if chance.random() < 0.6:
            request_us, load = chance.choice([500, 2000, 8000]), chance.choice([0.0001, 0.005, 0.02])
            programs.append(Program(pid, weight=chance.choice(weights), request_us=request_us, load=load, slice=name))
        else:
            programs.append(busy(pid, weights, name))
    return programs


@pytest.mark.parametrize("explicit_us", [0, 500, 8000])
@pytest.mark.parametrize("seed", range(8))
def test_whoever_is_in_it(seed: int, explicit_us: int) -> None:
    """Families share in the proportion of their weights; beside an explicit timeslice, weight 100 has 2.048 ms."""
    chance = random.Random(seed)
    families = [family(chance, 10 * n, f"slice {n}") for n in range(1, chance.randint(3, 4))]
    by_hand = [Program(1, explicit_us=explicit_us)] if explicit_us else []
    machine = Machine(*by_hand, *[program for one in families for program in one], late=2)
    machine.run(20)
    before = {program.pid: program.used for program in machine.programs}
    machine.run(60)
    used = {program.pid: program.used - before[program.pid] for program in machine.programs}
    weights = [100 if one[0].slice else one[0].weight for one in families]
    unit = used[1] * DEFAULT / explicit_us / 100 if explicit_us else sum(used.values()) / sum(weights)
    found = [sum(used[p.pid] for p in one) / weight / unit for one, weight in zip(families, weights, strict=True)]
    print(families, found, machine.rate(20))
    assert found == [pytest.approx(1, rel=0.05)] * len(families)
    assert machine.rate(20) < 2
