"""The policy `balance`, as pure code and in simulated time: which programs move, that it helps, and that it settles."""

from __future__ import annotations

import errno
import itertools
import math
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggroupfs.policies.balance.choice import BETTER, CRITICAL, FIXED, GAIN, GOAL, KEEP, Plan, even, relieve
from ggroupfs.policies.balance.core import HOLD_S, Core, Met, Pace, Short
from ggroupfs.policies.balance.demand import Demand, Seen, want
from ggroupfs.policies.balance.history import PATIENCE_MOST, SOON, History
from ggroupfs.policies.balance.picture import Bound, Card, Load, Move, Picture, parts, rate, strain
from tests.support.balanced import GIB, Balanced
from tests.support.scheduled import Program
from tests.support.served import service

REST_S = 60.0
CRITICAL_PID = 9


def busy(*pids: int) -> list[Program]:
    """Return programs that always have work."""
    return [Program(pid) for pid in pids]


def p99(program: Program, since: int = 0) -> float:
    """Return the p99 of the requests from that number on, in seconds."""
    found = sorted(program.latencies[since:])
    return found[int(0.99 * len(found))] / 1e9


def assert_rested(moves: Sequence[tuple[float, Move]]) -> None:
    """Check that no group moved twice in a minute."""
    times: dict[str, float] = {}
    for at, move in moves:
        assert at - times.get(move.load.name, -math.inf) >= REST_S
        times[move.load.name] = at


# In simulated time


@pytest.mark.parametrize("blind", [False, True])
def test_four_programs_and_an_idle_gpu(blind: bool) -> None:
    """The two that can be moved fastest go within 10 s, and then nothing moves any more."""
    memory = {1: 4 * GIB, 2: 2 * GIB, 3: GIB, 4: 3 * GIB}
    found = Balanced([busy(1, 2, 3, 4), []], memory=memory, blind=blind).run(10)
    assert [move.load.name for _, move in found.moves] == ["3", "2"]
    found.run(200)
    assert len(found.moves) == 2
    assert found.pids(1) == {2, 3}


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("load", [0.2, 0.3])
def test_a_critical_program_has_its_latency_back(load: float, blind: bool) -> None:
    """Beside four programs that always have work its p99 is far above the bound. 10 s later it is below, and stays
    there for the minutes after which moved programs could be moved again. The program itself is not moved."""
    critical = service(CRITICAL_PID, lambda _: load, 300, seed=1)
    memory = {1: 4 * GIB, 2: 2 * GIB, 3: GIB, 4: GIB // 2}
    found = Balanced(
        [[critical, *busy(1, 2, 3, 4)], []], memory=memory, bounds={CRITICAL_PID: Bound(upper=0.06)}, blind=blind
    ).run(10)
    served = len(critical.latencies)
    assert p99(critical) > 0.12
    found.run(300)
    assert p99(critical, since=served) <= 0.06
    assert {move.load.name for _, move in found.moves} <= {"1", "2", "3", "4"}
    assert all(at <= 10 for at, _ in found.moves)
    assert not found.told


def test_a_load_that_steps() -> None:
    """A program alone with work is left where it is; two others begin to work, and one of the three goes."""
    programs = [Program(1), Program(2, starts_us=30_000_000), Program(3, starts_us=30_000_000, ends_us=90_000_000)]
    found = Balanced([programs, []]).run(30)
    assert not found.moves
    found.run(40)
    assert len(found.moves) == 1
    found.run(300)
    assert_rested(found.moves)
    assert len(found.moves) <= 2, "and once more, when the third one ends, at most"


def test_a_load_that_grows_slowly() -> None:
    """Requests that grow from 5 to 60 % of a GPU in five minutes, beside a best-effort program: one move."""
    ramp = [service(pid, lambda t: 0.05 + min(t, 300) / 550, 400, seed=pid) for pid in (1, 2)]
    found = Balanced([[*ramp, Program(3)], []]).run(400)
    assert 1 <= len(found.moves) <= 2
    assert_rested(found.moves)
    assert sum(program.used for program in found.machines[1].programs) > 0


@pytest.mark.parametrize("half", [20, 60])
def test_a_square_wave_does_not_swing(half: int) -> None:
    """Two services have much to do by turns, beside programs that always have: there are a few moves in ten minutes,
    ever rarer, where one in each half period would have been possible."""
    waves = [service(pid, lambda t, n=pid: 0.8 if (t // half) % 2 == n % 2 else 0.05, 600, seed=pid) for pid in (1, 2)]
    found = Balanced([[*waves, Program(3)], [Program(4)]]).run(600)
    assert_rested(found.moves)
    assert len(found.moves) <= 4
    assert not [move for at, move in found.moves if at > 300]


def test_without_room_nothing_moves() -> None:
    """No move is even tried."""
    memory = {1: 5 * GIB, 2: 5 * GIB, 3: 5 * GIB}
    found = Balanced([busy(1, 2), busy(3)], memory=memory, capacity=9 * GIB).run(30)
    assert not found.moves
    assert not found.refused


def test_what_is_refused_is_not_tried_again_and_others_are() -> None:
    memory = {1: GIB, 2: 2 * GIB, 3: 3 * GIB}
    refusals = {1: errno.EOPNOTSUPP, 2: errno.EBUSY}
    found = Balanced([busy(1, 2, 3), []], memory=memory, refusals=refusals).run(30)
    assert [move.load.name for _, move in found.refused] == ["1", "2"]
    assert [move.load.name for _, move in found.moves] == ["3"]
    found.run(400)
    assert [move.load.name for _, move in found.refused] == ["1", "2"], "it is balanced now"


def test_what_is_busy_is_tried_again_later() -> None:
    """After 60 s, and then after ever longer times."""
    found = Balanced([busy(1, 2), []], refusals={1: errno.EBUSY, 2: errno.EOPNOTSUPP}).run(400)
    times = [at for at, move in found.refused if move.load.name == "1"]
    assert len([move for _, move in found.refused if move.load.name == "2"]) == 1
    assert len(times) == 3
    first, second = (later - earlier for earlier, later in itertools.pairwise(times))
    assert first >= REST_S
    assert second >= 2 * REST_S


# The choice


def load(name: str, gpu: int = 0, want: float = 1.0, held: int = 1, **options: object) -> Load:
    """Return a group; `held` is its memory in GiB."""
    return Load(name, gpu, want, held * GIB, use=want, **options)  # type: ignore[arg-type]


def critical(name: str = "c", gpu: int = 0, held: int = 1, **options: object) -> Load:
    """Return a group whose latency alone is half of its bound, and that has work for a fifth of the time."""
    known: dict[str, object] = {"alone": 0.02, "feared": 0.02, "bound": Bound(upper=0.04), "want": 0.2}
    return load(name, gpu, held=held, **known | options)


def picture(*loads: Load, gpus: int = 2, capacity: int = 100) -> Picture:
    """Return a picture with GPUs of `capacity` GiB."""
    used = {gpu: sum(one.held for one in loads if one.gpu == gpu) for gpu in range(gpus)}
    return Picture.of({gpu: Card(capacity * GIB, used[gpu]) for gpu in range(gpus)}, loads)


def anywhere(_: Load, __: int) -> bool:
    return True


def names(plan: Plan | None) -> list[tuple[str, int]]:
    """Return which group goes where."""
    return [] if plan is None else [(move.load.name, move.to) for move in plan.moves]


def test_the_smallest_that_helps() -> None:
    """One of two must go, since the latency alone is half of the bound: not the smallest of all, which is idle."""
    seen = picture(critical(), load("big", held=8), load("small", held=2), load("idle", want=0.0, held=0), gpus=2)
    half = attrs.evolve(seen.groups[0]["c"], bound=Bound(upper=0.05))
    seen = picture(half, *[one for one in seen.on(0) if one.name != "c"])
    assert names(relieve(seen, 0, ["c"], anywhere)) == [("small", 1)]


def test_several_where_one_is_not_enough_and_no_more_than_needed() -> None:
    seen = picture(critical(held=40), *[load(f"n{size}", held=size) for size in (5, 1, 3, 2)])
    plan = relieve(seen, 0, ["c"], anywhere)
    assert plan is not None
    assert sorted(names(plan)) == [("n1", 1), ("n2", 1), ("n3", 1), ("n5", 1)]
    loose = picture(critical(held=40, bound=Bound(upper=0.05)), *seen.on(0)[1:])
    assert sorted(names(relieve(loose, 0, ["c"], anywhere))) == [("n1", 1), ("n2", 1), ("n3", 1)]


def test_what_turns_out_to_be_needless_is_left_out() -> None:
    """It helped the most for its cost only while the large ones were there."""
    seen = picture(critical(held=90), load("a", held=40), load("b", held=20), load("little", want=0.3, held=0))
    assert sorted(names(relieve(seen, 0, ["c"], anywhere))) == [("a", 1), ("b", 1)]


def test_a_critical_group_goes_where_its_neighbours_cannot() -> None:
    seen = picture(critical(), load("a", movable=False), load("b", held=200))
    assert names(relieve(seen, 0, ["c"], anywhere)) == [("c", 1)]


def test_a_critical_group_goes_before_very_much_is_moved_for_it() -> None:
    """The neighbour has so many GiB that moving the critical group itself costs less."""
    for held, who in ((2, "n"), (CRITICAL * 2, "c")):
        seen = picture(critical(), load("n", held=held))
        assert names(relieve(seen, 0, ["c"], anywhere)) == [(who, 1)]


def test_nobody_is_moved_beside_one_who_would_miss_his_bounds() -> None:
    seen = picture(critical("c"), load("n"), critical("d", 1), critical("e", 2, alone=0.01, feared=0.01), gpus=3)
    assert names(relieve(seen, 0, ["c"], anywhere)) == [("n", 2)], "beside d it would be just as bad"
    seen = picture(critical("c"), load("n"), critical("e", 1, alone=0.01, feared=0.02))
    assert names(relieve(seen, 0, ["c"], anywhere)) != [("n", 1)], "once it was as slow there"
    seen = picture(critical("c", priority=7), load("n"), gpus=2)
    assert strain(seen.groups[0]["c"], [load("n")]) == 0.5, "who goes first does not mind"


def test_what_does_not_suffice_is_done_if_it_helps() -> None:
    """The group would be too slow even alone, so at least its neighbour goes. If that does not help, nothing moves."""
    slow = {"alone": 0.05, "feared": 0.05}
    assert names(relieve(picture(critical(**slow), load("n")), 0, ["c"], anywhere)) == [("n", 1)]
    assert relieve(picture(critical(**slow), load("n", want=0.0)), 0, ["c"], anywhere) is None
    little = 1 - 1 / (BETTER - 0.05)
    assert relieve(picture(critical(**slow), load("n", want=little)), 0, ["c"], anywhere) is None


def test_evening_out() -> None:
    seen = picture(load("a", held=4), load("b", held=2), load("c", held=3), load("d", held=1))
    assert names(even(seen, 0, anywhere)) == [("d", 1), ("b", 1)]
    seen = picture(load("a"), load("b"), load("c"), load("d", 1), load("e", 1))
    assert even(seen, 0, anywhere) is None, "it would only be the other way round"
    seen = picture(load("a"), load("b", want=GAIN - 0.01))
    assert even(seen, 0, anywhere) is None
    seen = picture(load("a"), load("b"), load("c"), load("d", 1), gpus=3)
    assert names(even(seen, 0, anywhere))[0][1] == 2, "where the least is wanted"
    seen = picture(load("a"), load("b"), critical(gpu=1))
    assert even(seen, 0, anywhere) is None
    assert even(picture(critical(want=1.0), critical("d", want=1.0)), 0, anywhere) is None, "they have what they need"
    # Groups look like this if they seldom had a processor to make work with: moving b gains too little.
    seen = picture(load("a", held=4), load("b", want=0.1, held=2), load("c", held=3), load("d", want=0.6))
    assert names(even(seen, 0, anywhere)) == [("d", 1), ("c", 1)]


LOADS = st.lists(
    st.builds(
        lambda gpu, want, held, weight, priority, bound, alone, movable: Load(
            "", gpu, want, held << 20, 0, want, weight, priority, bound, alone, alone, movable
        ),
        gpu=st.integers(0, 2),
        want=st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0]),
        held=st.integers(1, 30_000),
        weight=st.sampled_from([1, 100, 10_000]),
        priority=st.sampled_from([7, 8, 8, 8]),
        bound=st.sampled_from([None, None, None, Bound(upper=0.04), Bound(least=0.4)]),
        alone=st.sampled_from([0.01, 0.02, 0.03, 0.1]),
        movable=st.booleans(),
    ),
    min_size=1,
    max_size=7,
).map(lambda found: [attrs.evolve(one, name=f"g{index}") for index, one in enumerate(found)])


def legal(seen: Picture, move: Move) -> bool:
    """Return whether a target has room, and groups there keep their bounds."""
    kept = all(
        strain(one, [*others(seen, one), move.load]) <= max(KEEP, strain(one, others(seen, one)) + 1e-6)
        for one in seen.on(move.to)
    )
    return move.load.movable and seen.has_room(move.load, move.to) and kept


def others(seen: Picture, one: Load) -> list[Load]:
    return [other for other in seen.on(one.gpu) if other.name != one.name]


@settings(max_examples=300)
@given(loads=LOADS, capacity=st.integers(10, 60))
def test_no_single_move_would_be_cheaper(loads: list[Load], capacity: int) -> None:
    """The choice is compared with all possible moves; every move of a plan is legal at its time, and moves a group that
    is best-effort or falls short itself."""
    seen = picture(*loads, gpus=3, capacity=capacity)
    for gpu in range(3):
        short = [one.name for one in seen.on(gpu) if one.bound is not None and seen.strain(one.name, gpu) > 1]
        if not short:
            continue
        plan = relieve(seen, gpu, short, anywhere)
        cheapest = math.inf
        for one in seen.on(gpu):
            for move in (Move(one, to) for to in range(3) if to != gpu):
                mine = one.bound is None or one.name in short
                then = seen.after(move)
                left = [then.strain(name, move.to if name == one.name else gpu) for name in short]
                if mine and legal(seen, move) and max(left) <= GOAL:
                    cheapest = min(cheapest, (one.held + FIXED) * (1 if one.bound is None else CRITICAL))
        if plan is None:
            assert cheapest == math.inf
            continue
        if cheapest < math.inf:
            assert plan.strain <= GOAL
            assert plan.cost <= cheapest
        now = seen
        for move in plan.moves:
            assert move.load.gpu == gpu
            assert move.load.bound is None or move.load.name in short
            assert legal(now, move)
            now = now.after(move)


# The model


@settings(max_examples=300)
@given(loads=LOADS)
def test_how_a_gpu_is_divided(loads: list[Load]) -> None:
    got = parts(loads)
    assert sum(got.values()) == pytest.approx(min(1.0, sum(one.want for one in loads)), abs=1e-9)
    for one in loads:
        assert -1e-9 <= got[one.name] <= one.want + 1e-9
        for other in loads:
            if got[one.name] < one.want - 1e-6 and got[other.name] > 1e-6:
                assert other.priority <= one.priority
                if other.priority == one.priority:
                    assert got[one.name] / one.weight >= got[other.name] / other.weight - 1e-6


def test_how_fast_one_goes() -> None:
    assert rate(load("a", want=0.1), []) == 1.0
    assert rate(load("a", want=0.1), [load("b")]) == 0.5
    assert rate(load("a"), [load("b", want=0.2)]) == pytest.approx(0.8)
    assert rate(load("a", weight=300), [load("b")]) == 0.75
    assert rate(load("a", priority=7), [load("b"), load("c")]) == 1.0


@given(s=st.floats(0.001, 1.0), z=st.floats(0.0, 1.0), speed=st.floats(0.05, 1.0))
def test_what_is_wanted_can_be_seen(s: float, z: float, speed: float) -> None:
    """The program computes for s seconds and does something else for z, however slow others make it."""
    period = s / speed + z
    assert want(s / period, (s / speed) / period) == pytest.approx(s / (s + z), rel=1e-6)


def seen_again(seconds: int, now: Callable[[int], list[Seen]]) -> dict[str, Load]:
    """Return the loads after one look per second."""
    demand, loads = Demand(4.0), []
    for at in range(seconds):
        loads = demand.look(float(at), now(at))
    return {one.name: one for one in loads}


def test_what_is_seen_of_programs() -> None:
    found = seen_again(
        10,
        lambda at: [
            Seen("busy", 0, at * 500_000, True),
            Seen("light", 0, at * 300_000, at % 2 == 0),
            Seen("frozen", 0, 0, True, frozen=True),
            Seen("kept off", 0, at * 10_000, False, throttled_us=at),
            Seen("new", 0, 7_000_000, True) if at == 9 else Seen("gone", 0, at * 1000, True),
        ],
    )
    assert found["busy"].want == 1.0
    assert found["busy"].use == pytest.approx(0.5)
    assert 0.3 <= found["light"].want <= 0.5
    assert found["frozen"].want == 0.0
    assert found["kept off"].want == 1.0
    assert found["new"].use == 0.0
    assert "gone" not in found


def test_a_program_wants_no_more_than_its_quota() -> None:
    """It is stopped most of the time, as it would be on any other GPU."""
    found = seen_again(
        10,
        lambda at: [
            Seen("busy", 0, at * 300_000, True, throttled_us=at * 700_000, ceiling=0.3),
            Seen("less", 0, at * 100_000, False, ceiling=0.3),
        ],
    )
    assert found["busy"].want == 0.3
    assert found["less"].want == pytest.approx(0.1, rel=0.01)


def test_where_nobody_tells_who_waits() -> None:
    """A program that uses as much as its part if all wanted all may well want more, unless the GPU has time left."""
    for of, wanted in ((10, [1.0, 1.0, 0.1]), (5, [0.225, 0.225, 0.05])):
        found = seen_again(
            5,
            lambda at, of=of: [
                Seen("a", 0, at * of * 45_000, None),
                Seen("b", 0, at * of * 45_000, None),
                Seen("c", 0, at * of * 10_000, None),
            ],
        )
        assert [found[name].want for name in "abc"] == pytest.approx(wanted)


def test_counters_that_begin_anew() -> None:
    found = seen_again(5, lambda at: [Seen("a", 0, 5_000_000 + at if at < 3 else at * 100_000, False)])
    assert 0 <= found["a"].use <= 0.11


# The history


def test_a_minute_and_ever_longer() -> None:
    history, now, rests = History(REST_S, 0.0), 0.0, []
    for _ in range(9):
        history.moved(now, "a", 0, 1)
        rests.append(next(t for t in range(1, 10_000) if history.may(now + t, "a", 1, 0)))
        now += rests[-1]
    assert rests == [60 * min(PATIENCE_MOST, 1 << n) for n in range(9)]
    now += SOON * REST_S * PATIENCE_MOST
    history.moved(now, "a", 0, 1)
    assert history.may(now + REST_S, "a", 1, 0), "long ago"


@pytest.mark.parametrize(
    ("code", "there", "elsewhere", "later"),
    [
        (errno.EOPNOTSUPP, False, False, False),
        (errno.EPERM, False, False, False),
        (errno.EXDEV, False, True, False),
        (errno.ENOSPC, False, True, True),
        (errno.EBUSY, False, False, True),
        (errno.ETIMEDOUT, False, False, True),
        (errno.ENODEV, True, True, True),
    ],
)
def test_what_an_errno_means(code: int, there: bool, elsewhere: bool, later: bool) -> None:
    history = History(REST_S, 5.0)
    history.refused(0.0, "a", 0, 1, code)
    assert not history.may(1.0, "a", 0, 1)
    assert history.may(6.0, "a", 0, 1) == there
    assert history.may(6.0, "a", 0, 2) == elsewhere
    assert history.may(6.0, "b", 0, 1)
    assert history.may(REST_S + 1, "a", 0, 1) == later
    history.keep(["b"])
    assert history.may(6.0, "a", 0, 1), "who comes by that name is another one"


def test_the_minute_outlives_the_group() -> None:
    history = History(REST_S, 5.0)
    history.moved(0.0, "a", 0, 1)
    history.keep([])
    assert not history.may(30.0, "a", 1, 0)


# The core

PACE = Pace(window=3, silence=60.0, rest=REST_S, cooldown=5.0)


def test_a_window_of_misses_is_needed() -> None:
    seen, core = picture(critical(), load("n")), Core(PACE)
    for at, latency in enumerate([0.1, 0.1, 0.03], 1):
        core.sample(at, "c", latency)
        assert not core.decide(at, seen), "not full, and then a backlog that shrinks"
    core.sample(4, "c", 0.1)
    assert [type(one) for one in core.decide(4, seen)] == [Plan]


def fed(core: Core, seen: Picture, since: int, until: int, latency: float | None) -> list[object]:
    """Return the decisions, with a latency each second. Plans are not carried out."""
    made: list[object] = []
    for at in range(since, until):
        if latency is not None:
            core.sample(at, "c", latency)
        made += core.decide(at, seen)
    return made


def test_what_nothing_helps_is_said_once_and_taken_back() -> None:
    core, seen = Core(PACE), picture(critical(), load("n", movable=False), load("m", 1, movable=False))
    made = fed(core, seen, 0, 30, 0.1)
    assert made == [Short("c", 0, pytest.approx(0.1))]
    assert fed(core, seen, 30, 40, 0.0405 * 0.95) == [], "not yet clearly"
    assert fed(core, seen, 40, 50, 0.02) == [Met("c")]
    fed(core, seen, 50, 80, 0.1)
    assert fed(core, seen, 80, 150, None) == [Met("c")], "it is silent"


def test_a_least_share() -> None:
    """A program that wants more than it has gets its least share; one that wants no more has nothing to gain."""
    neighbours = [load("n", held=2), load("m", held=1)]
    for wanted, got, moved in ((1.0, 0.33, True), (0.33, 0.33, False), (1.0, 0.5, False)):
        c = attrs.evolve(load("c", want=wanted, bound=Bound(least=0.5)), use=got)
        made = fed(Core(attrs.evolve(PACE, overload=10.0)), picture(c, *neighbours), 0, 10, None)
        assert bool(made) == moved
        if moved:
            assert isinstance(made[0], Plan)
            assert len(made[0].moves) == 2, "half of it is just at the bound, and not clearly within"


def test_what_was_measured_before_a_move_counts_no_more() -> None:
    core, seen = Core(attrs.evolve(PACE, cooldown=0.0)), picture(critical(), load("n"), load("m", held=2))
    (plan,) = fed(core, seen, 0, 3, 0.1)
    assert isinstance(plan, Plan)
    assert names(plan) == [("n", 1), ("m", 1)]
    core.moved(3.0, seen, plan.moves[0])
    seen = seen.after(plan.moves[0])
    assert fed(core, seen, 4, 6, 0.1) == [], "two of the three"
    (plan,) = fed(core, seen, 6, 7, 0.1)
    assert isinstance(plan, Plan)


def test_how_slow_it_was_beside_others_is_kept_in_mind() -> None:
    """Beside a neighbour the latency grew to five times the latency alone, where the model says twice."""
    core, seen = Core(attrs.evolve(PACE, overload=1.0)), picture(critical(want=0.1), load("n"), load("m", 1))
    (plan,) = fed(core, seen, 0, 3, 0.1)
    assert isinstance(plan, Plan)
    core.moved(3.0, seen, plan.moves[0])
    seen = seen.after(plan.moves[0])
    assert not fed(core, seen, 4, 500, 0.01), "alone it is fast, and two programs share the other GPU"
    last = int(HOLD_S) + 10
    assert fed(core, seen, 500, last, 0.01), "it is tried again after a while"


class World:
    """GPUs with groups of constant or changing demand; latencies differ from the model's."""

    def __init__(self, loads: list[Load], power: float, gpus: int = 3) -> None:
        self.core = Core(PACE)
        self.loads = {one.name: one for one in loads}
        self.moves: list[tuple[float, Move]] = []
        self._power, self._gpus, self._now = power, gpus, 0.0

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self._now += 1.0
            seen = picture(*self._used(), gpus=self._gpus)
            for one in seen.loads:
                if one.bound is not None and one.bound.upper is not None and one.alone is not None:
                    self.core.sample(self._now, one.name, one.alone / seen.rate(one.name, one.gpu) ** self._power)
            for made in self.core.decide(self._now, seen):
                for move in made.moves if isinstance(made, Plan) else ():
                    self._now += 1.0
                    self.core.moved(self._now, seen, move)
                    self.moves.append((self._now, move))
                    self.loads[move.load.name] = attrs.evolve(self.loads[move.load.name], gpu=move.to)

    def _used(self) -> list[Load]:
        found = []
        for gpu in range(self._gpus):
            here = [one for one in self.loads.values() if one.gpu == gpu]
            got = parts(here)
            found += [attrs.evolve(one, use=got[one.name]) for one in here]
        return found


@settings(max_examples=60)
@given(loads=LOADS, power=st.sampled_from([0.5, 1.0, 2.0]))
def test_constant_loads_come_to_rest(loads: list[Load], power: float) -> None:
    """No group moves twice in a minute, and in twenty minutes each moves only a few times. Where no group has bounds,
    each moves once at most."""
    world = World(loads, power)
    world.run(1200)
    assert_rested(world.moves)
    bounded = any(one.bound is not None for one in loads)
    counts = [sum(move.load.name == one.name for _, move in world.moves) for one in loads]
    assert sum(counts) <= (3 if bounded else 1) * len(loads)
    assert not [move for at, move in world.moves if at > 120] or bounded


@settings(max_examples=60)
@given(loads=LOADS, changes=st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=7, max_size=7), max_size=30))
def test_whatever_loads_do_nobody_moves_twice_in_a_minute(loads: list[Load], changes: list[list[float]]) -> None:
    """Demand changes arbitrarily every 20 s; a group that moves repeatedly does so ever more rarely."""
    world = World(loads, 1.0)
    for wants in changes:
        for one, wanted in zip(list(world.loads.values()), wants, strict=False):
            world.loads[one.name] = attrs.evolve(one, want=wanted)
        world.run(20)
    assert_rested(world.moves)
    for one in loads:
        times = [at for at, move in world.moves if move.load.name == one.name]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert all(gap >= REST_S * (1 << index) for index, gap in enumerate(gaps))
