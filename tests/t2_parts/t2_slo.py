"""The policy `slo` in simulated time: shares follow loads without oscillation; which group should migrate, and when."""

from __future__ import annotations

import errno
import itertools
import math
import socket
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import attrs
import pytest
import trio
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from ggroupfs.client import Group
from ggroupfs.policies.config import Table
from ggroupfs.policies.slo import reports
from ggroupfs.policies.slo.core import (
    HOLD,
    PATIENCE_MOST,
    WHOLE,
    Bounds,
    Change,
    Core,
    Decision,
    Migrate,
    Pace,
    Withdraw,
)
from ggroupfs.policies.slo.levers import By, Levers, Wanted, sms, wanted
from ggroupfs.policies.slo.samples import MOST, Interval, Statistic
from ggroupfs.policies.slo.settings import Settings
from tests.support.page import POLICIES, rows, section
from tests.support.scheduled import Program
from tests.support.served import PRIORITY, SETTLED_S, Load, Served, service

PACE = Pace(window=5, cooldown=5.0, silence=60.0)
BOUNDS = Bounds(upper=0.05, lower=0.02)
SEEDS = (1, 2)


def served(load: Load, seed: int, seconds: float = 300.0, **options: int) -> Served:
    """Return a simulation of one service beside two batch programs."""
    program = service(1, load, seconds, seed)
    return Served({"a": (program, BOUNDS)}, [Program(2), Program(3)], PACE, **options).run(seconds)


def assert_cool(found: Served, name: str = "a") -> None:
    """Check that there is never more than one change in a cool-down."""
    times = [at for at, one in found.decisions if isinstance(one, Change) and one.group == name]
    assert all(later - earlier >= PACE.cooldown for earlier, later in itertools.pairwise(times))


def between(low: float, high: float, since: float, until: float) -> Load:
    """Return a load that is `high` for a while, and `low` before and after."""
    return lambda t: high if since <= t < until else low


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_up_and_down(seed: int) -> None:
    found = served(between(0.1, 0.5, 100, 200), seed)
    assert_cool(found)
    assert found.turns() <= 1, "up with the load and down with it, and nothing else"
    assert found.mean(100 + SETTLED_S, 200) <= BOUNDS.upper
    assert found.mean(200 + SETTLED_S, 300) <= BOUNDS.upper
    raised = sum(step for _, step in found.changes(since=100, until=200))
    lowered = sum(step for _, step in found.changes(since=200))
    assert raised > 0
    assert lowered <= -2 * BOUNDS.down
    assert len(found.changes(since=100 + SETTLED_S, until=200)) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ramp(seed: int) -> None:
    """From 5 to 70 % of the GPU in 260 s: the share only rises, and the latency always stays within its bound."""
    found = served(lambda t: min(0.7, 0.05 + t / 400), seed)
    assert_cool(found)
    assert found.turns() == 0
    assert len(found.changes()) >= 5
    for since in range(30, 300, 30):
        assert found.mean(since, since + 30) <= BOUNDS.upper


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("half", [60, 15])
def test_a_square_wave(half: int, seed: int) -> None:
    """At most one turn in each half period, and the latency is in bounds, be it slower or faster than the policy."""
    found = served(lambda t: 0.5 if (t // half) % 2 else 0.1, seed)
    assert_cool(found)
    assert found.turns() <= 300 / half
    assert found.mean(120, 300) <= BOUNDS.upper


@pytest.mark.parametrize("load", [0.1, 0.3, 0.5])
def test_a_load_that_stays_as_it_is(load: float) -> None:
    turns = [served(lambda _: load, seed).turns() for seed in SEEDS]
    assert max(turns) <= 4, "in 60 cool-downs"


def test_what_is_left_is_for_the_others() -> None:
    """Batch programs do more beside a light load than beside a heavy one, and something in any case."""
    done = []
    for load in (0.1, 0.5):
        critical = service(1, lambda _, load=load: load, 180, 1)
        found = Served({"a": (critical, BOUNDS)}, [Program(2), Program(3)], PACE).run(120)
        before = sum(program.used for program in found.machine.programs[1:])
        found.run(180)
        done.append((sum(program.used for program in found.machine.programs[1:]) - before) / 60e9)
    assert done[0] > done[1] + 0.2
    assert done[1] > 0.2


def test_of_two_that_need_more_than_there_is_one_should_migrate() -> None:
    """The one of worse rank, once; the other gets what it needs of its share."""
    services = {
        "a": (service(1, lambda _: 0.6, 200, 1), BOUNDS),
        "b": (service(2, lambda _: 0.6, 200, 2), attrs.evolve(BOUNDS, rank=1)),
    }
    found = Served(services, [Program(3)], PACE).run(200)
    asked = [one for _, one in found.decisions if isinstance(one, Migrate)]
    assert [one.group for one in asked] == ["b"]
    assert asked[0].missing > 0
    assert found.mean(100, 200) <= BOUNDS.upper
    for name in services:
        assert_cool(found, name)
    assert sum(found.core.shares.values()) == WHOLE


def test_nobody_is_asked_to_migrate_while_there_is_enough() -> None:
    found = served(lambda _: 0.6, 1)
    assert not [one for _, one in found.decisions if isinstance(one, Migrate)]


# The core on its own


COOLDOWNS = 1500


def closed_loop(latency_of: Callable[[int], float], bounds: Bounds, cooldowns: int) -> list[int]:
    """Return the changes of a group whose latency is a function of its share, with a sample each cool-down."""
    core, steps = Core(Pace(window=1, cooldown=1.0)), []
    core.come(0.0, "a", bounds)
    for at in range(cooldowns):
        core.sample(at, "a", latency_of(core.shares["a"]))
        steps += [one.share - one.was for one in core.decide(at) if isinstance(one, Change)]
    return steps


@settings(max_examples=100)
@given(
    power=st.floats(0.5, 8.0),
    scale=st.floats(0.005, 0.2),
    lower=st.floats(0.5, 0.999),
    up=st.integers(100, 3000),
    down=st.integers(100, 3000),
)
@example(4.0, 0.03125, 0.984375, 302, 100)
@example(4.0, 0.005, 0.5, 1234, 1235)
@example(3.36328125, 0.019628630403104544, 0.984375, 302, 199)
def test_where_no_share_is_right_it_comes_to_rest(power: float, scale: float, lower: float, up: int, down: int) -> None:
    """Latency falls steeply as the share grows, and the bounds are so close that no share may lie between them: turns
    become ever rarer, where the cool-down alone would allow one every few seconds."""
    bounds = Bounds(upper=0.05, lower=0.05 * lower, up=up, down=down)
    steps = closed_loop(lambda share: scale * (WHOLE / max(1, share)) ** power, bounds, COOLDOWNS)
    turns = sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))
    assert turns <= 2 * (1 + math.log2(PATIENCE_MOST) + COOLDOWNS / (HOLD * PATIENCE_MOST))


def test_the_cool_down_and_the_window() -> None:
    """A change needs a full window of samples since the last one, and the cool-down."""
    for window, gap in ((5, 5), (8, 8), (2, 5)):
        core = Core(Pace(window=window, cooldown=5.0))
        core.come(0.0, "a", BOUNDS)
        changed = []
        for at in range(1, 40):
            core.sample(at, "a", 1.5 * BOUNDS.upper)
            changed += [at for one in core.decide(at) if isinstance(one, Change)]
        assert changed[0] == gap
        assert {later - earlier for earlier, later in itertools.pairwise(changed)} == {gap}
        assert len(changed) == min(7, 39 // gap), "all of the GPU, in steps of a tenth"


@pytest.mark.parametrize(("times", "steps"), [(1.01, 1), (1.99, 1), (2.01, 2), (3.01, 3), (100, 3)])
def test_far_above_its_bound_more_is_given_at_once(times: float, steps: int) -> None:
    core = Core(PACE)
    core.come(0.0, "a", BOUNDS)
    _, made = fed(core, 0.0, {"a": times * BOUNDS.upper}, 5)
    assert [one.share - one.was for one in made if isinstance(one, Change)] == [steps * BOUNDS.up]


def fed(core: Core, at: float, latencies: dict[str, float], seconds: int = 10) -> tuple[float, list[Decision]]:
    """Feed these samples for so many seconds; return the decisions."""
    made: list[Decision] = []
    for _ in range(seconds):
        at += 1
        for name, latency in latencies.items():
            core.sample(at, name, latency)
        made += core.decide(at)
    return at, made


def test_migration_is_asked_when_nothing_is_left_and_withdrawn_when_it_is_not_needed() -> None:
    core = Core(PACE)
    core.come(0.0, "a", attrs.evolve(BOUNDS, initial=9000))
    at, made = fed(core, 0.0, {"a": 0.1}, 6)
    assert made == [Change("a", WHOLE, 9000, pytest.approx(0.1))]
    at, made = fed(core, at, {"a": 0.1}, 8)
    assert not made, "a window, and a cool-down in which it may become better"
    at, made = fed(core, at, {"a": 0.1}, 20)
    assert made == [Migrate("a", WHOLE, WHOLE, pytest.approx(0.1))], "twice as slow: a GPU is missing"
    at, made = fed(core, at, {"a": 0.04})
    assert made == [Withdraw("a")]
    at, made = fed(core, at, {"a": 0.1}, 12)
    assert [type(one) for one in made] == [Migrate]
    assert core.go("a") == [Withdraw("a")]
    assert core.go("a") == []


def test_a_group_that_may_not_have_more_takes_nothing_from_others() -> None:
    core = Core(PACE)
    core.come(0.0, "a", attrs.evolve(BOUNDS, initial=4000, most=4000))
    core.come(0.0, "b", attrs.evolve(BOUNDS, initial=6000, rank=1))
    _, made = fed(core, 0.0, {"a": 0.1, "b": 0.03}, 12)
    assert [type(one) for one in made] == [Migrate]
    assert core.shares == {"a": 4000, "b": 6000}


def test_what_another_does_not_need_is_taken_first() -> None:
    """Whatever the other's rank, and before any group is asked to migrate."""
    for quiet in ({"b": 0.01}, {}):
        core = Core(PACE)
        core.come(0.0, "a", attrs.evolve(BOUNDS, initial=5000, rank=1))
        core.come(0.0, "b", attrs.evolve(BOUNDS, initial=5000, down=1))
        at, made = fed(core, 0.0, {"a": 0.03, **quiet}, 59)
        before = core.shares
        _, made = fed(core, at, {"a": 0.06, **quiet}, 10)
        assert not [one for one in made if isinstance(one, Migrate)]
        assert core.shares["a"] >= before["a"] + BOUNDS.up
        assert core.shares["b"] == 4000


def test_who_comes_when_nothing_is_left() -> None:
    """It gets its least share from groups of a larger rank; where there are none, it should migrate."""
    for rank, kinds in ((1, [Change, Change]), (0, [Migrate])):
        core = Core(PACE)
        core.come(0.0, "a", attrs.evolve(BOUNDS, initial=WHOLE, rank=rank))
        core.come(0.0, "b", attrs.evolve(BOUNDS, up=100))
        assert core.shares["b"] == 0
        _, made = fed(core, 0.0, {"a": 0.03}, 11)
        assert [type(one) for one in made] == kinds
        assert core.shares["b"] == (BOUNDS.least if rank else 0)


def test_alone_nobody_is_lowered() -> None:
    core = Core(PACE)
    core.come(0.0, "a", BOUNDS)
    for at in range(1, 100):
        core.sample(at, "a", 0.001)
        assert not core.decide(at, contended=False)
    assert core.decide(100), "until somebody comes"


def test_a_backlog_that_shrinks_is_waited_for() -> None:
    core = Core(PACE)
    core.come(0.0, "a", BOUNDS)
    for at, latency in enumerate([0.8, 0.8, 0.8, 0.4, 0.04, 0.04, 0.04], 1):
        core.sample(at, "a", latency)
        assert not core.decide(at), "the mean is still above the bound, and the last sample is not"
    core.sample(8, "a", 0.06)
    assert core.decide(8)


def test_a_share_that_would_be_too_small_is_not_tried() -> None:
    """In inverse proportion to the share, 45 ms would become 54 ms, and 38 ms become 46 ms."""
    for latency, lowered in ((0.045, False), (0.038, True)):
        core = Core(PACE)
        core.come(0.0, "a", attrs.evolve(BOUNDS, lower=0.049))
        _, made = fed(core, 0.0, {"a": latency}, 6)
        assert bool(made) == lowered


def test_one_sample_speaks_against_less() -> None:
    core = Core(PACE)
    core.come(0.0, "a", BOUNDS)
    for at, latency in enumerate([0.001, 0.021, 0.001, 0.001, 0.001, 0.001], 1):
        core.sample(at, "a", latency)
        assert not core.decide(at)
    core.sample(7, "a", 0.001)
    assert [type(one) for one in core.decide(7)] == [Change]


def test_who_falls_silent_may_stay() -> None:
    """Its reports are old: it needs nothing now, and its share falls step by step to the least."""
    core = Core(PACE)
    core.come(0.0, "a", attrs.evolve(BOUNDS, initial=WHOLE))
    at, made = fed(core, 0.0, {"a": 0.1}, 11)
    assert [type(one) for one in made] == [Migrate]
    at, made = fed(core, at, {}, 59)
    assert not made
    at, made = fed(core, at, {}, 1)
    assert made == [Change("a", WHOLE - BOUNDS.down, WHOLE, None), Withdraw("a")]
    fed(core, at, {}, 200)
    assert core.shares == {"a": BOUNDS.least}


def test_what_was_given_is_tried_before_migration_is_asked() -> None:
    """An earlier shortage does not say that there is one now."""
    core = Core(PACE)
    core.come(0.0, "a", attrs.evolve(BOUNDS, initial=9500))
    core.come(0.0, "b", attrs.evolve(BOUNDS, initial=500))
    at, made = fed(core, 0.0, {"a": 0.1, "b": 0.03}, 8)
    assert not made, "nothing is left"
    core.go("b")
    at, made = fed(core, at, {"a": 0.1}, 1)
    assert [one.share for one in made if isinstance(one, Change)] == [WHOLE]
    at, made = fed(core, at, {"a": 0.1}, 9)
    assert not made
    at, made = fed(core, at, {"a": 0.1}, 1)
    assert [type(one) for one in made] == [Migrate]


def test_patience_ends_with_the_load() -> None:
    """Once a group has needed far less, an earlier shortage is not held against it for long."""
    core, at = Core(Pace(window=1, cooldown=1.0)), 0

    def turns(enough: int, cooldowns: int) -> int:
        nonlocal at
        steps = []
        for _ in range(cooldowns):
            at += 1
            core.sample(at, "a", 0.06 if core.shares["a"] < enough else 0.01)
            steps += [one.share - one.was for one in core.decide(at) if isinstance(one, Change)]
        return sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))

    core.come(0.0, "a", attrs.evolve(BOUNDS, initial=5000, up=500))
    first = turns(5000, 60)
    assert turns(5000, 600) <= 3 * first, "it has learnt that 5000 points are needed"
    assert turns(0, 600) <= 1
    assert core.shares["a"] == BOUNDS.least
    turns(3000, 10)
    assert turns(3000, 60) >= first - 1, "and learns anew"


class History:
    """Calls that may be made to a core, and invariants of its answers."""

    def __init__(self, reserve: int) -> None:
        self.core, self.reserve, self.now = Core(PACE, reserve), reserve, 0.0
        self.bounds: dict[str, Bounds] = {}
        self.changed: dict[str, float] = {}
        self.asked: set[str] = set()
        self.last: dict[str, list[float]] = {}

    def come(self, name: str, bounds: Bounds) -> None:
        if name not in self.bounds:
            self.bounds[name] = bounds
            self.check(self.core.come(self.now, name, bounds))
            self.last[name] = []

    def go(self, name: str) -> None:
        self.check(self.core.go(name))
        self.bounds.pop(name, None)
        self.changed.pop(name, None)

    def sample(self, latencies: dict[str, float]) -> None:
        self.now += 1
        for name, latency in latencies.items():
            self.core.sample(self.now, name, latency)
            self.last.setdefault(name, []).append(latency)
        before = self.core.shares
        made = self.core.decide(self.now)
        self.check(made)
        for one in made:
            if isinstance(one, Migrate):
                self.check_migration(one, before)

    def check(self, made: list[Decision]) -> None:
        for one in made:
            if isinstance(one, Change):
                assert self.now - self.changed.get(one.group, -math.inf) >= PACE.cooldown
                self.changed[one.group] = self.now
                assert self.core.shares[one.group] == one.share != one.was or one.was == 0
                self.last[one.group] = []
            elif isinstance(one, Migrate):
                assert one.group not in self.asked
                self.asked.add(one.group)
            else:
                self.asked.remove(one.group)
        shares = self.core.shares
        assert self.asked <= shares.keys()
        assert sum(shares.values()) + self.core.left == WHOLE - self.reserve
        assert self.core.left >= 0
        for name, share in shares.items():
            assert 0 <= share <= self.bounds[name].most

    def check_migration(self, one: Migrate, before: dict[str, int]) -> None:
        bounds = self.bounds[one.group]
        assert one.missing > 0
        assert one.share == before[one.group] == self.core.shares[one.group]
        if one.latency is not None:
            window = self.last[one.group][-PACE.window :]
            assert len(window) == PACE.window
            assert sum(window) / len(window) > bounds.upper or one.share < bounds.least
        else:
            assert one.share < bounds.least
        if one.share < bounds.most:
            assert self.core.left == 0
            for other, share in self.core.shares.items():
                if other != one.group and self.bounds[other].rank > bounds.rank:
                    assert share <= self.bounds[other].least


BOUNDS_OF = st.builds(
    lambda initial, least, rank, up, down, most: Bounds(
        0.05, 0.02, max(initial, least), least, max(initial, least, most), up, down, rank
    ),
    initial=st.integers(100, WHOLE),
    least=st.integers(1, 3000),
    rank=st.integers(0, 2),
    up=st.integers(100, 4000),
    down=st.integers(100, 4000),
    most=st.integers(100, WHOLE),
)
LATENCIES = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.01, 0.03, 0.06, 0.5]), max_size=3)
STEPS = st.one_of(
    st.tuples(st.just("come"), st.sampled_from("abc"), BOUNDS_OF),
    st.tuples(st.just("go"), st.sampled_from("abc")),
    st.tuples(st.just("sample"), LATENCIES, st.integers(1, 30)),
)


@settings(max_examples=300)
@given(reserve=st.sampled_from([0, 1000]), steps=st.lists(STEPS, max_size=30))
def test_whatever_happens(reserve: int, steps: list[tuple[object, ...]]) -> None:
    history = History(reserve)
    for step in steps:
        if step[0] == "sample":
            for _ in range(step[2]):
                history.sample(step[1])
        else:
            getattr(history, step[0])(*step[1:])


# From points to files, and from reports to samples


def test_weights() -> None:
    assert wanted({"a": 3000, "b": 2000}, 4, PRIORITY) == (
        {"a": Wanted(3000), "b": Wanted(2000)},
        Wanted(1250),
    )
    full, rest = wanted({"a": 10_000, "b": 0}, 3, PRIORITY)
    assert full == {"a": Wanted(10_000, PRIORITY), "b": Wanted(1, PRIORITY)}
    assert rest == Wanted(1)
    assert wanted({}, 0, PRIORITY) == ({}, Wanted(10_000))


def test_shares_as_quotas() -> None:
    """In place of weights, or besides; a quota below the smallest possible one becomes that."""
    assert wanted({"a": 3000, "b": 2000}, 4, PRIORITY, By.QUOTA) == (
        {"a": Wanted(quota="30000 100000"), "b": Wanted(quota="20000 100000")},
        Wanted(quota="12500 100000"),
    )
    assert wanted({"a": 3000, "b": 50}, 1, PRIORITY, By.BOTH, 50_000) == (
        {"a": Wanted(3000, quota="15000 50000"), "b": Wanted(50, quota="1000 50000")},
        Wanted(6950),
    )
    assert wanted({"a": 10_000}, 3, PRIORITY, By.QUOTA, 20_000) == (
        {"a": Wanted(None, PRIORITY, "max 20000")},
        Wanted(quota="1000 20000"),
    )


class Files(Group):
    """Control files in memory."""

    held: ClassVar[dict[str, str]] = {}

    async def read(self, name: str) -> str:
        return self.held[name]

    async def write(self, name: str, value: object) -> None:
        self.held[name] = str(value)


def test_shares_of_a_spatial_slice_are_sms() -> None:
    """Where programs run at the same time a part of the GPU is SMs, and time where they do not."""
    before = {"compute.max": "max 100000", "compute.sm.max": "96"}
    Files.held, spatial = dict(before), True

    async def is_spatial() -> bool:
        return spatial

    async def main() -> None:
        nonlocal spatial
        levers = Levers(Files(Path("/")), is_spatial)
        (part,) = wanted({"a": 3000}, 0, PRIORITY, By.QUOTA)[0].values()
        await levers.apply(part)
        assert Files.held == before | {"compute.sm.max": "30%"}
        spatial = False
        await levers.apply(part)
        assert Files.held == {"compute.max": "30000 100000", "compute.sm.max": "96"}
        await levers.release()
        assert Files.held == before
        assert [sms(points) for points in (0, 50, 1250, 10_000)] == ["0.01%", "0.5%", "12.5%", "max"]

    trio.run(main)


@pytest.mark.logs("shares are compute.max")
def test_where_sms_are_refused_shares_are_time() -> None:
    """As of a program without the library: it runs by itself, whatever its slice is to have."""
    before = {"compute.max": "max 100000", "compute.sm.max": "max"}
    Files.held = dict(before)
    asked = []

    class Refuses(Files):
        async def write(self, name: str, value: object) -> None:
            if name == "compute.sm.max":
                asked.append(value)
                raise OSError(errno.EOPNOTSUPP, "the program was started without the library")
            await super().write(name, value)

    async def is_spatial() -> bool:
        return True

    async def main() -> None:
        levers = Levers(Refuses(Path("/")), is_spatial)
        for _ in range(3):
            await levers.apply(wanted({"a": 3000}, 0, PRIORITY, By.QUOTA)[0]["a"])
            assert Files.held == before | {"compute.max": "30000 100000"}
        assert asked == ["30%"], "it is asked for once"
        await levers.release()
        assert Files.held == before

    trio.run(main)


@pytest.mark.parametrize(("name", "value"), [("mean", 50.5), ("p50", 50), ("p99", 99), ("p100", 100), ("p0", 1)])
def test_statistics(name: str, value: float) -> None:
    assert Statistic(name).of([float(one) for one in range(100, 0, -1)]) == value


@pytest.mark.parametrize("name", ["p101", "median", "p-1", "99", ""])
def test_what_is_no_statistic(name: str) -> None:
    with pytest.raises(ValueError, match="percentile"):
        Statistic(name)


def test_who_reports_without_end_is_heard_in_turns() -> None:
    """After a number of reports others get a turn, however fast the reports come."""
    heard = 0

    class Endless:
        async def recvmsg(self, *_: object) -> tuple[bytes, list[tuple[int, int, bytes]], int, None]:
            who = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, reports.CREDENTIALS.pack(1, 2, 3))
            return b"{}", [who], 0, None

    def take(raw: bytes, pid: int, uid: int) -> None:
        nonlocal heard
        assert (raw, pid, uid) == (b"{}", 1, 2)
        heard += 1
        assert heard <= 10 * reports.AT_ONCE, "it never stops"

    async def main() -> None:
        with trio.move_on_after(10 * reports.BREATH_S - reports.BREATH_S / 2):
            await reports.receive(Endless(), take)  # type: ignore[arg-type]

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert heard == 10 * reports.AT_ONCE


def test_an_interval() -> None:
    interval = Interval(Statistic("mean"))
    assert interval.take() is None
    interval.add([1.0, 2.0])
    interval.add([3.0])
    assert interval.take() == 2.0
    assert interval.take() is None
    for _ in range(3):
        interval.add([1.0] * (MOST // 2))
    interval.add([9.0])
    assert interval.take() == 1.0


# The page


def read(group: dict[str, object], others: dict[str, object]) -> Settings:
    bounds = {"name": "a", "slice": "/a.slice", "upper": "50ms", "lower": "20ms"}
    return Settings.read(Table({**others, "group": [bounds | group]}, "the page"))


def test_the_defaults_on_the_page_are_right() -> None:
    """A file with every default of the page means the same as one with only the mandatory lines."""
    told: dict[str, object] = {}
    for keys, values in rows(section("Configuration", POLICIES / "slo.md")):
        if values:
            for key, value in zip(keys.split(", "), values.split(", "), strict=True):
                text = value.strip("`")
                told[key.strip("`")] = text if text.startswith("/") else tomllib.loads(f"it = {text}")["it"]
    ours = {"gpu", "statistic", "share", "least", "most", "scale_up", "scale_down", "rank"}
    everywhere = {"socket", "interval", "window", "cooldown", "silence", "reserve", "priority"}
    everywhere |= {"lever", "period", "migrate"}
    assert told.keys() == ours | everywhere
    full = read({key: told[key] for key in ours}, {key: told[key] for key in everywhere})
    bare = read({}, {})
    statistics = [settings.targets[0].statistic for settings in (full, bare)]
    assert len({one.of(range(10_000)) for one in statistics}) == 1
    full, bare = (
        attrs.evolve(settings, targets=[attrs.evolve(settings.targets[0], statistic=statistics[0])])
        for settings in (full, bare)
    )
    assert full == bare
    assert (bare.pace, bare.targets[0].bounds) == (Pace(), BOUNDS), "nor has the core others"
