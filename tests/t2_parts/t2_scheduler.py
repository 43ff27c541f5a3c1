"""The scheduler over the software GPU's runlist: shares, strictness and the cost of switches, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.records import Place
from backend.process.identity import Process
from backend.scheduler.bucket import Bucket
from backend.scheduler.core import FILLER_US, Core
from backend.scheduler.fair import LATE_US, LOOK_US, STAY
from backend.scheduler.filler import BURST, RATE
from backend.scheduler.shares import Contender, Level, due, strata
from backend.scheduler.use import Sample
from backend.soft.runlist import US
from tests.support.scheduled import DEFAULT, LOOK, SWITCH, Machine, Program, in_one_go, p99, shares, used_in

NEVER = 1 << 62


@pytest.mark.parametrize("contexts", [1, 4])
def test_weights(contexts: int) -> None:
    machine = Machine(Program(1, weight=100, contexts=contexts), Program(2, weight=200), Program(3, weight=400))
    got = shares(machine, 10, settle=1)
    print(got, machine.rate(1))
    assert got == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03 if contexts == 1 else 0.05)
    assert machine.rate(1) < 1, "what goes on as before is left alone"


class Charging:
    """A runlist that charges each switch to the program switched to, as a real GPU's trace does; all programs always
    have work. Besides, every stay is 2.4 % longer than its timeslice (measured on an H200)."""

    def __init__(self, *programs: Program) -> None:
        self.programs = programs
        self.core = Core(DEFAULT)
        self.slices = dict.fromkeys((p.process for p in programs), DEFAULT)
        self.changes = 0
        self._ring = [p for p in programs for _ in range(p.contexts)]
        self._turn, self._left = 0, 0.0
        self._samples: dict[Process, Sample] = {}

    def run(self, ticks: int) -> dict[Process, float]:
        """Return the shares over so many windows of 100 ms."""
        total = dict.fromkeys(self.slices, 0.0)
        for _ in range(ticks):
            places = in_one_go(self.core.decide(100_000, [p.contender for p in self.programs], self._samples))
            for program in self.programs:
                us = places[program.process].timeslice_us or DEFAULT * program.contexts
                self.changes += us != self.slices[program.process]
                self.slices[program.process] = us
            used, window = dict.fromkeys(self.slices, 0.0), 100_000.0
            while window > 0:
                program = self._ring[self._turn % len(self._ring)]
                if self._left <= 0:
                    self._turn += 1
                    program = self._ring[self._turn % len(self._ring)]
                    self._left = 1.024 * (self.slices[program.process] // program.contexts) + 173
                step = min(window, self._left)
                used[program.process] += step
                window, self._left = window - step, self._left - step
            contexts = {p.process: p.contexts for p in self.programs}
            self._samples = {p: Sample(int(spent), None, contexts[p]) for p, spent in used.items()}
            for process, spent in used.items():
                total[process] += spent
        return {process: us / (ticks * 100_000) for process, us in total.items()}


@pytest.mark.parametrize("contexts", [1, 4])
def test_switches_are_charged(contexts: int) -> None:
    """Four contexts cost four switches a round: their timeslices are shortened, and then left as they are."""
    machine = Charging(Program(1, weight=100, contexts=contexts), Program(2, weight=200), Program(3, weight=400))
    machine.run(50)
    machine.changes = 0
    assert list(machine.run(100).values()) == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.03 if contexts == 1 else 0.05)
    assert machine.changes <= 6
    machine.run(300)
    machine.changes = 0
    assert list(machine.run(300).values()) == pytest.approx([1 / 7, 2 / 7, 4 / 7], rel=0.02)
    assert machine.changes <= 6


def test_who_had_more_than_his_part_has_it_no_longer() -> None:
    """Beside an intermittent program that was given a large weight, others get less than their shares. They are then as
    short of time as that program, and do not count as intermittent."""
    machine = Machine(
        Program(1, request_us=8600, kernel_us=100, load=0.5, weight=6000),
        Program(2, weight=2000),
        Program(3, weight=2000),
    )
    machine.run(25)
    for program, weight in zip(machine.programs, (1500, 4250, 4250), strict=True):
        program.weight = weight
    assert shares(machine, 10, settle=15) == pytest.approx([0.15, 0.425, 0.425], rel=0.05)


class OneWorks(Machine):
    """Only one context of each program has work."""

    def _feed(self) -> None:
        for program in self.programs:
            tsg = program.tsgs[0]
            if len(tsg.queue) < 4:
                tsg.launch(8, program.kernel_us * US)


def test_what_one_had_alone_while_the_other_was_frozen_is_not_held_against_it() -> None:
    """The trace is 0.2 s late: after a thaw it first reports the time in which one program had the GPU for itself."""
    one, other = Program(1), Program(2)
    core = Core(DEFAULT)

    def looks(count: int, us: int, others_us: int) -> list[Place]:
        samples = {one.process: Sample(us, None), other.process: Sample(others_us, None)}
        for _ in range(count):
            places = in_one_go(core.decide(100_000, [one.contender, other.contender], samples))
        return [places[one.process], places[other.process]]

    before = looks(50, 50_000, 50_000)
    in_one_go(core.decide(100_000, [one.contender], {}))
    looks(2, 100_000, 0)
    assert looks(30, 50_000, 50_000) == before


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("contexts", [4, 8])
def test_idle_contexts_cost_nothing(contexts: int, late: int) -> None:
    machine = OneWorks(Program(1, contexts=contexts), Program(2), late=late)
    assert shares(machine, 15, settle=15) == pytest.approx([0.5, 0.5], rel=0.05)


def test_very_different_weights() -> None:
    """The timeslice of the lightest is as long as a switch; where switches are not charged to it, it is lengthened."""
    weights = (10, 1000, 5000)
    machine = Machine(*[Program(n, weight=weight) for n, weight in enumerate(weights, 1)])
    assert shares(machine, 30, settle=30) == pytest.approx([w / sum(weights) for w in weights], rel=0.05)
    assert machine.rate(30) < 1


@pytest.mark.parametrize("programs", [2, 3])
def test_less_is_lost_to_switches(programs: int) -> None:
    def total(schedule: bool) -> int:
        return sum(used_in(Machine(*[Program(n) for n in range(1, programs + 1)], schedule=schedule), 5))

    gain = total(True) / total(False)
    print(gain)
    assert gain >= 1.04


def critical(*batch: Program, seconds: float = 30) -> tuple[float, float, Machine]:
    """Return the p99 of a critical program beside others, relative to its p99 alone; and their work, relative to that
    of one alone."""
    alone = Program(1, priority=0, request_us=8600, kernel_us=100, load=0.35)
    Machine(alone).run(seconds)
    one = Program(1, priority=0, request_us=8600, kernel_us=100, load=0.35)
    machine = Machine(one, *batch)
    machine.run(seconds)
    print(p99(alone), p99(one), [b.used / seconds / 1e9 for b in batch], machine.rate(0))
    return p99(one) / p99(alone), sum(b.used for b in batch) / seconds / 1e9, machine


@pytest.mark.parametrize("kernel_us", [500, 20_000])
def test_a_critical_program_beside_a_batch_program(kernel_us: int) -> None:
    slower, filled, machine = critical(Program(2, kernel_us=kernel_us))
    assert slower <= 1.05
    assert filled >= 0.6
    assert machine.rate(1) < 1


def test_a_critical_program_beside_one_of_four_contexts() -> None:
    """Its contexts switch among themselves: it gets half of what one context would get, and hinders no more."""
    slower, filled, _ = critical(Program(2, contexts=4))
    assert slower <= 1.05
    assert filled >= 0.2


def test_a_critical_program_beside_three_batch_programs() -> None:
    batch = [Program(n, kernel_us=500) for n in (2, 3, 4)]
    slower, filled, machine = critical(*batch)
    assert slower <= 1.05
    assert filled >= 0.6
    assert [b.used for b in batch] == pytest.approx([sum(b.used for b in batch) / 3] * 3, rel=0.1)
    assert machine.rate(1) < 5


def test_turns_are_long_where_nobody_waits_for_less() -> None:
    """Two batch programs take turns of 2 s. Once a program comes that does not use its turn, no turn exceeds 0.5 s."""
    leader = Program(1, priority=0, request_us=8600, kernel_us=100, load=0.35)
    light = Program(4, request_us=5000, load=0.1, starts_us=20_000_000)
    machine = Machine(leader, Program(2), Program(3), light)
    machine.run(19.5)
    before = machine.rate(10)
    machine.run(20)
    print(before, machine.rate(21))
    assert before <= 2 / 2 * 1.1
    assert machine.rate(21) >= 2
    assert light.used / 19.5e9 == pytest.approx(0.1, rel=0.25)


LIGHT = [
    pytest.param([Program(3, request_us=5000, load=0.1)], id="light"),
    pytest.param([Program(n, request_us=5000, load=0.1) for n in (3, 4, 5)], id="three light"),
    pytest.param([Program(3, request_us=20_000, load=0.3)], id="heavy"),
]


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("others", LIGHT)
def test_what_one_filler_leaves_another_has(others: list[Program], late: int) -> None:
    """The GPU is never idle while a filler has work; and the program before them waits no longer for that."""

    def use(*fillers: Program, schedule: bool) -> tuple[Machine, float]:
        one = Program(1, priority=0, request_us=8600, kernel_us=100, load=0.1)
        machine = Machine(one, *[copy(p) for p in fillers], schedule=schedule, late=late if schedule else 0)
        return machine, sum(used_in(machine, 30)) / 30e6

    ours, scheduled = use(Program(2), *others, schedule=True)
    _, driver = use(Program(2), *others, schedule=False)
    alone, _ = use(schedule=False)
    print(scheduled, driver, p99(ours.programs[0]), p99(alone.programs[0]), ours.rate(1))
    assert scheduled >= (0.9 if late else 0.95) * driver
    assert p99(ours.programs[0]) <= 1.05 * p99(alone.programs[0])
    assert ours.rate(1) <= 6
    for program in ours.programs[2:]:
        assert program.used / 30e9 == pytest.approx(program.load, rel=0.25), "each has what it wants"


def copy(program: Program) -> Program:
    return Program(program.pid, request_us=program.request_us, load=program.load)


class Thinking(Machine):
    """The last program works, pauses, and works again; a longer pause does not bring more work."""

    stride = LOOK

    def __init__(self, work_us: int, think_us: int) -> None:
        super().__init__(
            Program(1, priority=0, request_us=2000, load=0.1), Program(2), Program(3, starts_us=1 << 52), late=2
        )
        self._work, self._think = work_us, think_us
        self._again: int | None = 0

    def _feed(self) -> None:
        super()._feed()
        tsg = self.programs[-1].tsgs[0]
        if not tsg.queue and self._again is None:
            self._again = self.runlist.now + self._think * US
        if self._again is not None and self.runlist.now >= self._again:
            tsg.launch(self._work // 100, 100 * US)
            self._again = None


@pytest.mark.parametrize(("work_us", "think_us", "least"), [(5000, 1000, 0.17), (10_000, 10_000, 0.1)])
def test_who_thinks_between_has_his_turns(work_us: int, think_us: int, least: float) -> None:
    """With equal turns it would get half of 0.9 times its duty cycle; it must get nearly half of that."""
    machine = Thinking(work_us, think_us)
    machine.run(5)
    assert used_in(machine, 20)[2] / 20e6 >= least


def test_the_first_second_beside_three_batch_programs() -> None:
    """A newcomer is not slowed down until another program has been seen to use the GPU."""
    slower, _, _ = critical(*[Program(n) for n in (2, 3, 4)], seconds=1)
    assert slower <= 1.05


def test_an_idle_leader_keeps_nobody_from_sharing() -> None:
    """Programs of worse priority share by weight, with long timeslices, while the better one has long been idle."""
    machine = Machine(Program(1, priority=0, ends_us=0), Program(2, weight=300), Program(3, weight=100))
    machine.run(8)
    done = used_in(machine, 5)
    assert done == [0, pytest.approx(0.75 * 5e6, rel=0.03), pytest.approx(0.25 * 5e6, rel=0.03)]
    assert machine.rate(8) < 1


def test_a_filler_that_has_nothing_to_do_is_seen_when_it_has() -> None:
    """Two of three fillers stop, and the third gets all that is left. One comes back, and gets half of that."""
    one = Program(2)
    stops, comes_back = Program(3, ends_us=3_000_000), Program(4, starts_us=10_000_000)
    machine = Machine(Program(1, priority=0, request_us=2000, load=0.2), one, stops, comes_back)
    machine.run(6)
    alone = used_in(machine, 3)
    assert alone[1] > 0.75 * 3e6
    machine.run(1)
    both = used_in(machine, 6)
    assert both[1] == pytest.approx(both[3], rel=0.25)
    assert both[1] + both[3] > 0.75 * 6e6


def test_nobody_behind_two_others_starves_or_waits_for_nothing() -> None:
    """The last of three priorities gets what the two before it leave."""
    bursty = Program(2, priority=4, request_us=2000, load=0.1)
    machine = Machine(Program(1, priority=0, request_us=2000, load=0.2), bursty, Program(3))
    done = shares(machine, 20)
    assert done[2] > 0.5
    busy = Machine(Program(1, priority=0), Program(2, priority=4), Program(3))
    done = [us / 120e6 for us in used_in(busy, 120)]
    print(done)
    assert done[0] > 0.98
    assert done[1] > 5e-4
    assert done[1] > done[2] > 5e-6


def test_nobody_behind_five_others_starves() -> None:
    """All of them could fill the GPU. Those behind the first two get the hundredth reserved for them, in equal
    shares."""
    leader = Program(0, priority=0, request_us=2000, load=0.3)
    machine = Machine(leader, *[Program(n, priority=n) for n in range(1, 6)])
    machine.run(20)
    used = used_in(machine, 160)
    print(used)
    assert used[2:] == [pytest.approx(sum(used[2:]) / 4, rel=0.3)] * 4
    assert sum(used[2:]) == pytest.approx(0.01 * sum(used[1:]), rel=0.3)


def test_an_explicit_timeslice_is_set_against_those_of_the_driver() -> None:
    machine = Machine(Program(1, explicit_us=4 * DEFAULT), Program(2), Program(3))
    assert shares(machine, 5, settle=1) == pytest.approx([4 / 6, 1 / 6, 1 / 6], rel=0.03)
    assert machine.calls == []


@pytest.mark.parametrize(
    ("others", "due_them"),
    [
        ([Program(2, contexts=4), Program(3)], [1 / 2, 1 / 2]),
        ([*[Program(n, slice="a") for n in (2, 3, 4, 5)], Program(6)], [1 / 8] * 4 + [1 / 2]),
        ([Program(2, weight=300), Program(3)], [3 / 4, 1 / 4]),
    ],
    ids=["contexts", "children", "weights"],
)
def test_an_explicit_timeslice_takes_nothing_from_others(others: list[Program], due_them: list[float]) -> None:
    """The others share as if it were not there; it has the requested length, against 2.048 ms of the driver's."""
    machine = Machine(Program(1, explicit_us=DEFAULT), *others)
    found = shares(machine, 10)
    rest = sum(found[1:])
    assert [share / rest for share in found[1:]] == pytest.approx(due_them, rel=0.05)
    assert machine.rate(5) < 1
    assert found[0] / found[-1] == pytest.approx(1, rel=0.05)


def test_who_comes_and_goes_waits_for_short_rounds() -> None:
    """A service that works 8.6 ms every 43 ms, beside two batch programs of equal priority."""
    service = Program(1, request_us=2000, load=0.1)
    machine = Machine(service, Program(2), Program(3))
    machine.run(3)
    before = len(service.latencies)
    machine.run(10)
    late = sorted(service.latencies[before:])
    assert late[int(0.99 * len(late))] < 25e6
    assert sum(program.used for program in machine.programs) > 0.9 * machine.runlist.now, "and nothing lies idle"
    assert machine.rate(3) < 1


def test_who_does_nothing_makes_no_rounds_short() -> None:
    """A newcomer gets time to act, but an idle one was never seen to work intermittently."""
    machine = Machine(Program(1, ends_us=0), Program(2), Program(3), late=2)
    machine.run(5)
    assert [program.place.timeslice_us for program in machine.programs[1:]] == [pytest.approx(30_000, rel=0.05)] * 2


def test_who_is_gone_makes_no_rounds_short() -> None:
    """An intermittent program had made rounds short for a long time. It ends, and three steady ones come."""
    machine = Machine(Program(1, request_us=2000, load=0.1), Program(2), Program(3))
    machine.run(60)
    machine.replace(Program(4), Program(5), Program(6))
    for settle in (3, 20):
        machine.run(settle)
        assert [program.place.timeslice_us for program in machine.programs] == [pytest.approx(20_000, rel=0.05)] * 3
    assert machine.rate(61) == 0, "and they stay long"


def test_rounds_are_long_again_when_who_came_and_went_has_always_something_to_do() -> None:
    """Its behaviour in short rounds says nothing of its behaviour in long ones."""
    machine = Machine(Program(1, request_us=2000, load=0.1), Program(2), Program(3))
    machine.run(3)
    service = machine.programs[0]
    assert service.place.timeslice_us < 3000
    service.arrivals, service.request_us = [], 0
    machine.run(20)
    assert [program.place.timeslice_us for program in machine.programs] == [pytest.approx(20_000, rel=0.05)] * 3
    machine.run(20)
    assert machine.rate(23) == 0


def test_one_alone_is_left_alone() -> None:
    machine = Machine(Program(1, priority=3, weight=5))
    machine.run(2)
    idle = Machine(Program(1), Program(2, ends_us=0))
    idle.run(5)
    assert machine.calls == []
    assert idle.programs[0].place == idle.programs[1].place == Place()


# Arbitrary trees


@st.composite
def trees(draw: st.DrawFn) -> list[Contender]:
    """Draw contenders below up to three slices, some nested."""
    levels = st.builds(lambda p, w: (p, w), st.integers(0, 15), st.integers(1, 10000))
    slices = {name: Level(name, *draw(levels)) for name in ("a", "b", "a/b")}
    paths = {"": (), "a": (slices["a"],), "b": (slices["b"],), "a/b": (slices["a"], slices["a/b"])}
    count = draw(st.integers(2, 7))
    return [
        Contender(
            Process(n, 1),
            (*paths[draw(st.sampled_from(sorted(paths)))], Level(n, *draw(levels))),
            draw(st.integers(0, 9)) == 0,
            draw(st.booleans()),
        )
        for n in range(1, count + 1)
    ]


@given(trees())
def test_parts_of_the_active_add_up_to_one(contenders: list[Contender]) -> None:
    layers = list(strata(contenders))
    assert sorted(p.pid for layer in layers for p in layer) == [one.process.pid for one in contenders]
    active = {one.process for one in contenders if one.active}
    for layer in layers:
        assert all(0 < part <= 1 for part in layer.values())
        if active & layer.keys():
            assert sum(part for process, part in layer.items() if process in active) == pytest.approx(1)


@given(trees(), st.data())
def test_what_is_left_goes_to_siblings_first(contenders: list[Contender], data: st.DataObject) -> None:
    """A program that uses little gets that, none gets more than it wants, and a group with demand gets its share."""
    most = {one.process: data.draw(st.floats(0, 0.3)) for one in contenders if data.draw(st.booleans())}
    parts = due(contenders, most)
    assert all(part <= most.get(process, 1) + 1e-9 for process, part in parts.items())
    if len(most) < len(contenders):
        assert sum(parts.values()) == pytest.approx(1)
    tops = {one.path[0].group: one.path[0].weight for one in contenders}
    for top, weight in tops.items():
        below = [one.process for one in contenders if one.path[0].group == top]
        if any(process not in most for process in below):
            assert sum(parts[process] for process in below) >= weight / sum(tops.values()) - 1e-9


@given(trees(), st.data())
def test_siblings_of_the_best_priority_share_by_weight(contenders: list[Contender], data: st.DataObject) -> None:
    """Of two siblings, the better priority is in an earlier layer; in one layer, shares are as the weights."""
    everybody = [attrs.evolve(one, active=True) for one in contenders]
    layers = list(strata(everybody))
    layer_of = {process: n for n, layer in enumerate(layers) for process in layer}
    one, other = data.draw(st.sampled_from(everybody)), data.draw(st.sampled_from(everybody))
    if one is not other and one.path[:-1] == other.path[:-1]:
        mine, its = one.path[-1], other.path[-1]
        if mine.priority < its.priority:
            assert layer_of[one.process] < layer_of[other.process]
        elif mine.priority == its.priority and layer_of[one.process] == layer_of[other.process]:
            layer = layers[layer_of[one.process]]
            assert layer[one.process] / layer[other.process] == pytest.approx(mine.weight / its.weight)


@settings(max_examples=15)
@given(trees(), st.integers(0, 1000))
def test_any_history(contenders: list[Contender], seed: int) -> None:
    """One filler with work is on the runlist, with the shortest timeslice; all sharers are; and over a long time every
    program has been on it."""
    core, chance = Core(DEFAULT), random.Random(seed)
    on: dict[Process, int] = {}
    turns, slices, before = 0, 0, {one.process: Place() for one in contenders}
    places = dict(before)
    everybody_wants = chance.random() < 0.5
    as_slices_are = everybody_wants and chance.random() < 0.5
    first = next(iter(strata([attrs.evolve(one, active=True) for one in contenders])))
    for _ in range(5000):
        samples = {}
        whole = sum(places[process].timeslice_us or DEFAULT for process in first)
        for one in contenders:
            wants = everybody_wants or chance.random() < 0.3
            used = chance.randrange(1, 30_000) if wants and not places[one.process].off else 0
            if as_slices_are and one.process in first:
                part = (places[one.process].timeslice_us or DEFAULT) / whole
                used = round(90_000 * part * chance.uniform(0.9, 1.1))
            samples[one.process] = Sample(used)
        places = dict(in_one_go(core.decide(100_000, contenders, samples)))
        assert places.keys() == before.keys()
        assert not all(place.off for place in places.values())
        for one in contenders:
            place = places[one.process]
            assert not (one.explicit and place.timeslice_us)
            assert 0 <= place.timeslice_us <= 2_000_000
            on[one.process] = on.get(one.process, 0) + (not place.off)
            if everybody_wants and one.process not in first:
                assert one.explicit or place.timeslice_us == FILLER_US
            if place.off:
                assert one.process not in first
        if everybody_wants and len(first) < len(contenders):
            assert sum(not places[one.process].off for one in contenders if one.process not in first) == 1
        turns += sum(places[p].off != before[p].off for p in places)
        slices += sum(places[p].timeslice_us != before[p].timeslice_us for p in places)
        before = places
    assert all(on.values()), "none starves"
    if everybody_wants:
        assert turns <= 2 * (500 * RATE + BURST) + len(contenders), "all but one are off in the beginning"
        assert slices <= len(contenders) * 500e6 / (LATE_US + LOOK_US), "one for each look"
    if as_slices_are:
        assert turns + slices <= 500 * 5 + 20 * len(contenders), "what goes on as before is left alone"


@given(st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 3)), max_size=300))
def test_a_bucket_gives_no_more_than_it_has(asked: list[tuple[float, int]]) -> None:
    bucket, now, taken = Bucket(30, 20), 0.0, []
    for wait, count in asked:
        now += wait
        if bucket.take(now, count):
            taken += [now] * count
    for start in taken:
        assert sum(start <= at < start + 1 for at in taken) <= 50


class Waiting(Machine):
    """Programs that wait for the results of a launch before the next one, 20 us later."""

    GAP = 20 * US

    def __init__(self, *launches: Callable[[float], tuple[int, int]], schedule: bool = True) -> None:
        """`launches`: for each program, the number and microseconds of kernels that it launches at a time (s)."""
        super().__init__(*[Program(n) for n in range(1, len(launches) + 1)], schedule=schedule)
        self._launches = launches
        self._again = [0] * len(launches)
        self.passes = [0] * len(launches)

    def _go_on(self, end: int) -> None:
        for index, program in enumerate(self.programs):
            tsg = program.tsgs[0]
            if not tsg.queue and self.runlist.now >= self._again[index]:
                count, us = self._launches[index](self.runlist.now / 1e9)
                tsg.launch(count, us * US)
                self.passes[index] += 1
                self._again[index] = NEVER
        until = min(end, self._next, *self._again)
        finished = self.runlist.advance_to_finish(max(until, self.runlist.now + 1))
        for index, program in enumerate(self.programs):
            if finished is program.tsgs[0] and not finished.queue:
                self._again[index] = self.runlist.now + self.GAP


def test_who_waits_for_each_result_has_his_part_beside_long_ones() -> None:
    """In long rounds it gets one result per round. Its neighbour's work becomes slow after 20 s. From 3 s after that,
    it steadily gets what two such programs have beside each other, without the switches. With the driver's timeslices
    it gets less, since its work takes a bit longer than one timeslice."""
    launches = (lambda _: (2, 1100), lambda now: (2, 1100) if now < 20 else (16, 700))
    driver = Waiting(*launches, schedule=False)
    driver.run(30)
    least = 0.9 / (2 * 0.0022 + 2 * SWITCH / 1e9)
    ours, seconds = Waiting(*launches), []
    ours.run(23)
    for _ in range(120):
        before = ours.passes[0]
        ours.run(1)
        seconds.append(ours.passes[0] - before)
    print(least, driver.passes[0] / 30, seconds, ours.calls)
    assert min(seconds) > max(least, driver.passes[0] / 30)
    assert len(ours.calls) < 20


def test_who_waits_no_more_has_his_part_and_no_more() -> None:
    """Its neighbour's timeslice was fitted to it while it waited; then it behaves as the neighbour does."""
    ours = Waiting(lambda now: (2, 1100) if now < 20 else (16, 700), lambda _: (16, 700))
    ours.run(23)
    before = [program.used for program in ours.programs]
    ours.run(10)
    used = [program.used - b for program, b in zip(ours.programs, before, strict=True)]
    assert used[0] / sum(used) == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("quota_us", "slice_us"), [(40_000, 40_000), (80_000, 80_000 / 3), (3_000, 3_000), (None, None)]
)
def test_the_slice_of_one_below_a_quota_is_a_whole_part_of_it(quota_us: int | None, slice_us: float | None) -> None:
    """A time of whole rounds then has all of the quota, whenever it begins."""
    core, limited, other = Core(DEFAULT), Process(1, 1), Process(2, 1)
    contenders = [Contender(one, (Level(one, 4, 100),)) for one in (limited, other)]
    samples = {limited: Sample(30_000, stood=quota_us is not None, quota_us=quota_us), other: Sample(70_000)}
    for _ in range(20):
        places = dict(in_one_go(core.decide(100_000, contenders, samples)))
    assert places[limited].timeslice_us == (round(slice_us / STAY) if slice_us else places[other].timeslice_us)
    assert 25_000 <= places[other].timeslice_us <= 35_000
