"""The policy of Salus: Algorithm 1 case by case, the orders, and the safety condition at every event."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggroupfs.policies.face import Admit, Decision, Job, Move, Pause, Progress, Refuse, Run, Withdraw
from ggroupfs.policies.lanes import Lanes, Order, make

SECOND = 1_000_000_000


def job(name: str, persistent: int = 1, ephemeral: int = 1, seconds: int = 10) -> Job:
    return Job(name, persistent, ephemeral, seconds * SECOND)


def ran(seconds: float, service: float | None = None) -> Progress:
    return Progress(int(seconds * SECOND), int((seconds if service is None else service) * SECOND))


def sizes(policy: Lanes) -> list[int]:
    return [lane.size for lane in policy.lanes]


# Algorithm 1


def test_each_gets_a_lane_of_its_own_while_there_is_memory() -> None:
    policy = Lanes(16, Order.PACK)
    assert policy.job_arrive(job("a", 1, 6)) == [Admit("a", 1), Run("a")]
    assert policy.job_arrive(job("b", 1, 4)) == [Admit("b", 2), Run("b")]
    assert sizes(policy) == [6, 4]


def test_then_it_joins_the_smallest_that_is_large_enough() -> None:
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 1, 6))
    policy.job_arrive(job("b", 1, 4))
    assert policy.job_arrive(job("c", 1, 4)) == [Admit("c", 2)]
    assert [lane.jobs for lane in policy.lanes] == [("a",), ("b", "c")]


def test_then_one_is_made_as_large() -> None:
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 1, 6))
    policy.job_arrive(job("b", 1, 4))
    assert policy.job_arrive(job("c", 1, 7)) == [Admit("c", 2)]
    assert sizes(policy) == [6, 7]


def test_and_who_fits_nowhere_waits_while_others_pass() -> None:
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 1, 8))
    assert policy.job_arrive(job("b", 1, 15)) == []
    assert policy.job_arrive(job("c", 1, 6)) == [Admit("c", 2), Run("c")]
    assert policy.pending == ["b"]
    assert policy.job_finish("a") == []
    assert policy.job_finish("c") == [Admit("b", 3), Run("b")]


def test_with_fifo_nobody_passes() -> None:
    policy = Lanes(16, Order.FIFO)
    policy.job_arrive(job("a", 8, 8))
    policy.job_arrive(job("b", 1, 15))
    policy.job_arrive(job("c", 0, 1))
    assert policy.pending == ["b", "c"]


def test_who_never_fits_is_refused() -> None:
    policy = Lanes(16)
    assert policy.job_arrive(job("a", 9, 8)) == [Refuse("a")]
    assert policy.pending == []
    assert policy.job_arrive(job("b", 8, 8)) == [Admit("b", 1), Run("b")]


def test_a_lane_shrinks_with_its_largest_and_ends_with_its_last() -> None:
    policy = Lanes(16, Order.FIFO)
    policy.job_arrive(job("a", 1, 6))
    policy.job_arrive(job("b", 1, 4))
    assert sizes(policy) == [6]
    assert policy.job_finish("a") == [Run("b")]
    assert sizes(policy) == [4]
    assert policy.job_finish("b") == []
    assert policy.lanes == []


def test_a_hole_is_closed_at_the_boundary_of_the_lane_above_it() -> None:
    """Auto defragmentation, figure 7: before it there is enough memory, but in two pieces."""
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 0, 6))
    policy.job_arrive(job("b", 0, 6))
    assert policy.job_arrive(job("c", 0, 10)) == [Admit("c", 2)], "b's lane is made larger"
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 0, 6))
    policy.job_arrive(job("b", 1, 6))
    policy.job_finish("a")
    assert [(lane.offset, lane.size) for lane in policy.lanes] == [(6, 6)]
    assert policy.job_arrive(job("c", 1, 8)) == [Admit("c", 2)], "there is no room for c below, nor above"
    policy.job_finish("c")
    assert policy.iteration_end("b", ran(1)) == []
    assert [(lane.offset, lane.size) for lane in policy.lanes] == [(0, 6)]
    assert policy.job_arrive(job("d", 1, 8)) == [Admit("d", 3), Run("d")]


def test_who_waits_is_admitted_when_a_lane_was_moved() -> None:
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 0, 6))
    policy.job_arrive(job("b", 0, 8))
    policy.job_finish("a")
    assert policy.job_arrive(job("c", 4, 1)) == [], "b's lane is where c's persistent memory would be"
    assert policy.iteration_end("b", ran(1)) == [Admit("c", 3), Run("c")]


# Orders


def test_fifo_runs_each_to_its_end() -> None:
    policy = Lanes(16, Order.FIFO)
    policy.job_arrive(job("long", seconds=100))
    policy.job_arrive(job("short", seconds=1))
    assert policy.iteration_end("long", ran(1)) == []
    assert policy.job_finish("long") == [Run("short")]


def test_srtf_switches_at_the_end_of_the_iteration() -> None:
    policy = Lanes(16, Order.SRTF)
    policy.job_arrive(job("long", seconds=100))
    assert policy.job_arrive(job("short", seconds=1)) == [Admit("short", 1)]
    assert policy.iteration_end("long", ran(1)) == [Pause("long"), Run("short")]
    assert policy.job_finish("short") == [Run("long")]


def test_srtf_goes_by_what_remains_and_not_by_the_whole() -> None:
    policy = Lanes(16, Order.SRTF)
    policy.job_arrive(job("long", seconds=100))
    policy.iteration_end("long", ran(95))
    policy.job_arrive(job("other", seconds=6))
    assert policy.iteration_end("long", ran(96)) == []


def test_srtf_has_the_memory_of_a_longer_one_moved_for_a_shorter_one() -> None:
    """Section 4.2: a job is admitted whichever job runs, if it could run alone."""
    policy = Lanes(16, Order.SRTF)
    policy.job_arrive(job("long", 8, 8, seconds=100))
    assert policy.job_arrive(job("short", 1, 8, seconds=1)) == [], "long is in the middle of an iteration"
    boundary = policy.iteration_end("long", ran(1))
    assert boundary == [Pause("long"), Withdraw("long"), Admit("short", 2), Run("short")]
    assert policy.pending == ["long"]
    assert policy.job_finish("short") == [Admit("long", 3), Run("long")]


def test_srtf_admits_again_who_made_room_in_vain() -> None:
    """The longest goes first; if a larger one had to go as well, the longest fits again."""
    policy = Lanes(16, Order.SRTF)
    policy.job_arrive(job("longest", 1, 1, seconds=300))
    policy.job_arrive(job("large", 9, 1, seconds=200))
    policy.iteration_end("longest", ran(1))
    assert policy.job_arrive(job("short", 5, 6, seconds=10)) == []
    boundary = policy.iteration_end("large", ran(1))
    assert boundary[:3] == [Withdraw("longest"), Pause("large"), Withdraw("large")]
    assert boundary[3:] == [Admit("short", 2), Run("short")]
    assert policy.iteration_end("short", ran(1)) == [Admit("longest", 2)]
    assert policy.pending == ["large"]


def test_srtf_moves_no_memory_for_one_that_would_not_be_next() -> None:
    policy = Lanes(16, Order.SRTF)
    policy.job_arrive(job("long", 7, 1, seconds=100))
    policy.job_arrive(job("short", 7, 1, seconds=1))
    policy.iteration_end("long", ran(1))
    assert policy.job_arrive(job("middle", 7, 1, seconds=10)) == []
    assert policy.pending == ["middle"]


def test_pack_moves_who_waits_to_a_lane_of_his_own() -> None:
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 0, 8))
    policy.job_arrive(job("b", 0, 8))
    assert policy.job_arrive(job("c", 0, 8)) == [Admit("c", 1)]
    assert policy.job_finish("b") == [Move("c", 3), Run("c")]


def test_pack_interrupts_nobody_for_one_who_came_before_him() -> None:
    policy = Lanes(16, Order.PACK)
    policy.job_arrive(job("a", 0, 8))
    policy.job_arrive(job("b", 1, 7))
    policy.job_arrive(job("large", 0, 16))
    assert policy.job_arrive(job("small", 0, 8)) == [Admit("small", 1)]
    assert policy.job_finish("a") == [Run("small")]
    assert policy.job_finish("b") == [Admit("large", 1)]
    assert policy.iteration_end("small", ran(1)) == []
    assert policy.job_finish("small") == [Run("large")]


def test_fair_has_the_one_with_the_least_service_run() -> None:
    policy = Lanes(16, Order.FAIR)
    policy.job_arrive(job("a"))
    policy.job_arrive(job("b"))
    assert policy.iteration_end("a", ran(2)) == [Pause("a"), Run("b")]
    assert policy.iteration_end("b", ran(1)) == [], "b has had less yet"
    assert policy.iteration_end("b", ran(3)) == [Pause("b"), Run("a")]


def test_fair_counts_gpu_time_and_not_time() -> None:
    policy = Lanes(16, Order.FAIR)
    policy.job_arrive(job("a"))
    policy.job_arrive(job("b"))
    policy.iteration_end("a", ran(2, service=0.5))
    assert policy.iteration_end("b", ran(1, service=1)) == [Pause("b"), Run("a")]


def test_fair_does_not_have_a_newcomer_catch_up() -> None:
    policy = Lanes(16, Order.FAIR)
    policy.job_arrive(job("old"))
    policy.iteration_end("old", ran(100))
    policy.job_arrive(job("new"))
    assert policy.iteration_end("old", ran(101)) == [Pause("old"), Run("new")]
    assert policy.iteration_end("new", ran(2)) == [Pause("new"), Run("old")]


def test_so_many_lanes_and_no_more() -> None:
    policy = make(100, {"order": "pack", "lanes": "2"})
    for name in "abc":
        policy.job_arrive(job(name))
    assert [lane.jobs for lane in policy.lanes] == [("a", "c"), ("b",)]


@pytest.mark.parametrize("options", [{"order": "best"}, {"lanes": "0"}, {"lanes": "x"}, {"colour": "red"}])
def test_options_that_mean_nothing(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        make(16, options)


def test_what_cannot_be() -> None:
    policy = Lanes(16)
    policy.job_arrive(job("a"))
    policy.job_arrive(job("b"))
    with pytest.raises(ValueError, match="already"):
        policy.job_arrive(job("a"))
    with pytest.raises(ValueError, match="not running"):
        policy.iteration_end("b", ran(1))


# The safety condition, as the paper states it, over what was decided


@attrs.define
class Model:
    """Which jobs hold what memory, and which run, according to the decisions alone."""

    capacity: int
    jobs: dict[str, Job] = attrs.field(factory=dict)
    lane_of: dict[str, int] = attrs.field(factory=dict)
    running: set[str] = attrs.field(factory=set)
    progress: dict[str, int] = attrs.field(factory=dict)

    def obey(self, decisions: Sequence[Decision], boundary: str = "") -> None:
        for decision in decisions:
            name = decision.job
            if isinstance(decision, Admit):
                assert name not in self.lane_of
                self.lane_of[name] = decision.lane
            elif isinstance(decision, Move):
                assert name not in self.running
                assert self.lane_of[name] != decision.lane
                self.lane_of[name] = decision.lane
            elif isinstance(decision, Run):
                assert name in self.lane_of
                assert name not in self.running
                self.running.add(name)
            elif isinstance(decision, Pause):
                assert name == boundary, "only at the end of an iteration"
                self.running.remove(name)
            elif isinstance(decision, Withdraw):
                assert name not in self.running
                del self.lane_of[name]
            else:
                job = self.jobs.pop(name)
                assert job.persistent + job.ephemeral > self.capacity

    def remove(self, name: str) -> None:
        del self.jobs[name]
        self.lane_of.pop(name, None)
        self.running.discard(name)

    def check(self, policy: Lanes, order: Order) -> None:
        lanes: dict[int, list[str]] = {}
        for name, lane in self.lane_of.items():
            lanes.setdefault(lane, []).append(name)
        size = {lane: max(self.jobs[name].ephemeral for name in names) for lane, names in lanes.items()}
        persistent = sum(self.jobs[name].persistent for name in self.lane_of)
        assert persistent + sum(size.values()) <= self.capacity, "the safety condition"

        assert {view.number: view.size for view in policy.lanes} == size
        assert {view.number: sorted(view.jobs) for view in policy.lanes} == {n: sorted(j) for n, j in lanes.items()}
        end = 0
        for view in policy.lanes:
            assert view.offset >= end, "lanes overlap"
            end = view.offset + view.size
        assert end <= self.capacity - persistent, "the regions collide"

        assert sorted(self.running) == sorted(view.current for view in policy.lanes if view.current), "one a lane"
        assert all(view.current in view.jobs for view in policy.lanes)
        assert sorted(policy.pending) == sorted(set(self.jobs) - set(self.lane_of))
        assert self.running or not self.jobs, "somebody runs"
        if order.most_lanes is not None:
            assert len(lanes) <= order.most_lanes


arrival = st.tuples(st.just("arrive"), st.integers(0, 12), st.integers(0, 20), st.integers(1, 50))
event = st.one_of(
    arrival,
    st.tuples(st.just("boundary"), st.integers(0, 99), st.integers(1, 20), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 99), st.booleans(), st.just(0)),
)


@pytest.mark.parametrize("order", Order)
@settings(max_examples=150)
@given(events=st.lists(event, max_size=60))
def test_it_is_safe_at_every_event(order: Order, events: list[tuple[str, int, int, int]]) -> None:
    """All orders, any history. In the end all remaining jobs run to their end, so none waits for ever."""
    model, policy = Model(24), Lanes(24, order)
    for number, (kind, first, second, seconds) in enumerate(events):
        where = {view.number: view.offset for view in policy.lanes}
        boundary, empty = "", -1
        if kind == "arrive":
            new = job(f"job{number}", first, second, seconds)
            model.jobs[new.name] = new
            model.obey(policy.job_arrive(new))
        elif kind == "boundary" and model.running:
            boundary = sorted(model.running)[first % len(model.running)]
            empty = model.lane_of[boundary]
            model.progress[boundary] = model.progress.get(boundary, 0) + second
            model.obey(policy.iteration_end(boundary, ran(model.progress[boundary])), boundary)
        elif kind == "finish" and model.jobs:
            names = sorted(model.running if second else model.jobs)
            boundary = names[first % len(names)]
            empty = model.lane_of[boundary] if boundary in model.running else -1
            model.remove(boundary)
            model.obey(policy.job_finish(boundary))
        model.check(policy, order)
        for view in policy.lanes:
            if view.number != empty:
                assert view.offset == where.get(view.number, view.offset), "moved in the middle of an iteration"
    rounds = 0
    while model.jobs:
        name = min(model.running, key=lambda name: model.lane_of[name])
        for running in sorted(model.running - {name}):  # lanes move only at their boundaries
            if running in model.running:
                model.obey(policy.iteration_end(running, ran(model.progress.get(running, 0))), running)
                model.check(policy, order)
        if name in model.running:
            model.remove(name)
            model.obey(policy.job_finish(name))
        model.check(policy, order)
        rounds += 1
        assert rounds < 1000, "somebody waits for ever"
