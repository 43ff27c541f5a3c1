"""The simulator: exact times, what packing gains and cannot gain, and the figures of the paper's traces."""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from backend.scheduler.memory.turns import WAIT_US
from backend.soft.runlist import US
from ggroupfs.cli import FAILED, OK, USAGE, main
from ggroupfs.errors import UsageError
from ggroupfs.policies.face import Admit, Decision, Job, Pause, Policy, Progress, Run, carry_out
from ggroupfs.policies.lanes import Lanes, Order
from ggroupfs.replay import plots
from ggroupfs.replay.records import Result, S
from ggroupfs.replay.simulator import Machine, Simulator
from ggroupfs.replay.trace import TraceJob, dump, parse
from ggroupfs.replay.turns import TurnsSimulator
from ggroupfs.replay.workloads import WORKLOADS, day, equal, salus
from tests.support.mounted import SLOW
from tests.support.page import POLICIES, section

GIB = 1 << 30
DAY_S = 30.0
"""Processor time that a day of the cluster may take, seconds."""
FREE = Machine(capacity=100, timeslice_us=10, switch_us=0, lever_us=0)
"""A machine on which only the jobs take time."""


def job(
    name: str, iterations: int = 1, gpu: int = 100, idle: int = 0, arrival: int = 0, memory: tuple[int, int] = (1, 1)
) -> TraceJob:
    return TraceJob(name, arrival, *memory, iterations, gpu, idle)


def replay(trace: Sequence[TraceJob], order: Order, machine: Machine | None = None) -> Result:
    machine = machine or Machine()
    return Simulator(trace, Lanes(machine.capacity, order), machine).run()


def ends(result: Result) -> dict[str, int]:
    """Return the end of each job, microseconds."""
    return {o.trace.job: o.finished // US for o in result.outcomes if o.finished is not None}


# Exact times


def test_iterations_follow_each_other() -> None:
    result = replay([job("a", iterations=3, gpu=100, idle=50, arrival=7)], Order.FIFO, FREE)
    assert ends(result) == {"a": 457}
    assert [(s.job, s.start // US, s.end // US, s.lane) for s in result.ran] == [("a", 7, 457, 1)]
    assert [(s.job, s.start // US, s.end // US) for s in result.resident] == [("a", 7, 457)]


def test_a_lane_is_taken_while_its_job_is_idle() -> None:
    trace = [job("a", 2, 100, 50), job("b", 2, 100, 50)]
    assert ends(replay(trace, Order.FIFO, FREE)) == {"a": 300, "b": 600}
    assert ends(replay(trace, Order.FAIR, FREE)) == {"a": 450, "b": 600}


def test_packed_jobs_compute_while_others_are_idle_and_never_faster() -> None:
    trace = [job("a", 2, 100, 100), job("b", 2, 100, 100)]
    machine = attrs.evolve(FREE, timeslice_us=1000)
    assert ends(replay(trace, Order.PACK, machine)) == {"a": 400, "b": 500}
    busy = [job("a", 2), job("b", 2)]
    assert max(ends(replay(busy, Order.PACK, machine)).values()) == 400


def test_a_switch_of_the_engine_costs_time() -> None:
    trace = [job("a", 1, 100), job("b", 1, 100)]
    machine = attrs.evolve(FREE, timeslice_us=50, switch_us=5)
    assert ends(replay(trace, Order.PACK, machine)) == {"a": 165, "b": 220}


def test_a_switch_of_jobs_takes_a_freeze_and_a_thaw() -> None:
    trace = [job("a", 2), job("b", 1)]
    machine = attrs.evolve(FREE, lever_us=10)
    assert ends(replay(trace, Order.FAIR, machine)) == {"a": 340, "b": 230}, "thaw, a, freeze and thaw, b, thaw, a"


def test_memory_that_went_to_the_host_comes_back_over_the_bus() -> None:
    trace = [job("long", 2, memory=(60, 40)), job("short", 1, 50, arrival=1, memory=(10, 40))]
    machine = attrs.evolve(FREE, pcie=10_000_000)  # 60 bytes take 6 us
    result = replay(trace, Order.SRTF, machine)
    assert ends(result) == {"long": 100 + 6 + 50 + 6 + 100, "short": 100 + 6 + 50}
    assert [outcome.withdrawals for outcome in result.outcomes] == [1, 0]
    assert [(s.job, s.start // US, s.end // US) for s in result.resident] == [
        ("long", 0, 100),
        ("short", 106, 156),
        ("long", 162, 262),
    ]


def test_who_never_fits_is_refused_and_the_rest_runs() -> None:
    result = replay([job("a", memory=(60, 60)), job("b")], Order.FIFO, FREE)
    assert ends(result) == {"b": 100}
    assert (result.summary().jobs, result.summary().refused) == (1, 1)
    with pytest.raises(RuntimeError, match="no job"):
        replay([job("a", memory=(60, 60))], Order.FIFO, FREE).summary()


def test_the_columns_of_table_2() -> None:
    summary = replay([job("a", gpu=100), job("b", gpu=300, arrival=50)], Order.FIFO, FREE).summary()
    assert summary.makespan_s == pytest.approx(400e-6)
    assert summary.queuing_mean_s == pytest.approx(25e-6)
    assert summary.completion_mean_s == pytest.approx(225e-6)
    assert summary.completion_p95_s == pytest.approx(350e-6)
    assert (summary.gpu_busy, summary.memory_peak) == (1.0, 2)


# Wrong policies are detected


@attrs.define
class Script:
    """Lets all jobs run at once, as scripted, whatever memory there is."""

    arrive: Sequence[type[Run] | type[Pause]]

    def job_arrive(self, job: Job) -> Sequence[Decision]:
        return [decision(job.name) for decision in self.arrive]

    def iteration_end(self, name: str, progress: Progress) -> Sequence[Decision]:
        return []

    def job_finish(self, name: str) -> Sequence[Decision]:
        return []


def test_a_policy_of_ones_own() -> None:
    policy: Policy = Script([Run])
    result = Simulator([job("a"), job("b")], policy, FREE).run()
    assert max(ends(result).values()) == 200


def test_a_policy_that_overcommits() -> None:
    trace = [job("a", memory=(40, 20)), job("b", memory=(40, 20))]
    with pytest.raises(RuntimeError, match="120 bytes in use, of 100"):
        Simulator(trace, Script([Run]), FREE).run()


def test_a_policy_that_forgets_a_job() -> None:
    with pytest.raises(RuntimeError, match="no job run, and a waits"):
        Simulator([job("a")], Script([]), FREE).run()


def test_a_policy_may_pause_what_has_not_begun() -> None:
    with pytest.raises(RuntimeError, match="a waits"):
        Simulator([job("a")], Script([Run, Pause]), FREE).run()


def test_who_is_let_go_again_begins_then_and_not_before() -> None:
    machine = attrs.evolve(FREE, lever_us=10)
    assert ends(Simulator([job("a")], Script([Run, Pause, Run]), machine).run()) == {"a": 130}


def test_levers_on_who_is_not_there() -> None:
    simulator = Simulator([job("a")], Script([Run]), FREE)
    simulator.run()
    with pytest.raises(FileNotFoundError):
        carry_out([Run("a")], simulator)
    carry_out([Admit("a", 1)], simulator)  # no lever belongs to it


@pytest.mark.parametrize("order", Order)
@settings(max_examples=60)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 2000),
            st.integers(0, 60),
            st.integers(0, 60),
            st.integers(1, 6),
            st.integers(1, 300),
            st.integers(0, 300),
        ),
        min_size=1,
        max_size=25,
    ),
    lanes=st.none() | st.integers(1, 4),
)
def test_any_trace_runs_to_its_end(
    order: Order, rows: list[tuple[int, int, int, int, int, int]], lanes: int | None
) -> None:
    """The simulator itself stops a policy that uses more memory than there is. No work is lost, and none is made up."""
    trace = [TraceJob(str(number), *row) for number, row in enumerate(rows)]
    machine = attrs.evolve(FREE, switch_us=3, lever_us=7, pcie=1_000_000)
    policy = Lanes(machine.capacity, order, lanes)
    result = Simulator(trace, policy, machine).run()
    for outcome in result.outcomes:
        one = outcome.trace
        if one.persistent + one.ephemeral > machine.capacity:
            assert outcome.finished is None
            continue
        assert outcome.service == one.iterations * one.gpu_us * US
        assert outcome.queuing >= 0
        assert outcome.completion >= outcome.queuing + one.duration_us * US
        assert sum(s.end - s.start for s in result.ran if s.job == one.job) >= one.duration_us * US
    assert (policy.lanes, policy.pending) == ([], [])


def test_the_policy_in_the_documentation() -> None:
    text = section("An object", POLICIES / "writing.md")
    names: dict[str, Callable[[int, dict[str, str]], Policy]] = {}
    exec(text.partition("```python\n")[2].partition("```")[0], names)
    result = Simulator([job("a"), job("b")], names["policy"](100, {}), FREE).run()
    assert max(ends(result).values()) == 200


# Figures of the paper


@pytest.fixture(scope="module")
def table2() -> dict[Order, Result]:
    """Return the results of the four schedulers on the trace of 100 jobs."""
    trace = salus()
    return {order: replay(trace, order) for order in Order}


def test_every_job_has_all_of_its_iterations(table2: dict[Order, Result]) -> None:
    for result in table2.values():
        for outcome in result.outcomes:
            assert outcome.service == outcome.trace.iterations * outcome.trace.gpu_us * US
            assert outcome.completion >= outcome.trace.duration_us * US
        assert result.memory_peak <= 16 * GIB


def test_the_load_is_that_of_table_2(table2: dict[Order, Result]) -> None:
    """The scheduler is FIFO, by which the trace was made. The paper: makespan 303.4 min, 95 % 251.1 min."""
    summary = table2[Order.FIFO].summary()
    assert summary.makespan_s / 60 == pytest.approx(303.4, rel=0.01)
    assert summary.completion_p95_s / 60 == pytest.approx(251.1, rel=0.06)


def test_srtf_completes_jobs_three_times_sooner_than_fifo(table2: dict[Order, Result]) -> None:
    """The paper: 3.19 times, at the same makespan."""
    fifo, srtf = table2[Order.FIFO].summary(), table2[Order.SRTF].summary()
    assert fifo.completion_mean_s / srtf.completion_mean_s >= 3
    assert srtf.makespan_s == pytest.approx(fifo.makespan_s, rel=0.01)


def test_and_so_it_is_on_other_traces_of_the_same_kind() -> None:
    """One seed is chance: the median of five counts."""
    ratios = []
    for seed in range(1, 6):
        fifo, srtf = (replay(salus(seed), order).summary() for order in (Order.FIFO, Order.SRTF))
        ratios.append(fifo.completion_mean_s / srtf.completion_mean_s)
    assert len(set(ratios)) == 5
    assert statistics.median(ratios) >= 3


def test_pack_shortens_the_makespan_a_little_when_jobs_come_online(table2: dict[Order, Result]) -> None:
    """The paper: 303.4 to 287.4 min. The makespan cannot be less than the GPU time of all jobs, in any combination."""
    fifo, pack = table2[Order.FIFO].summary(), table2[Order.PACK].summary()
    work = sum(outcome.service for outcome in table2[Order.PACK].outcomes) / S
    assert work <= pack.makespan_s < 0.95 * fifo.makespan_s


def test_300_of_superres_are_done_twice_as_fast_when_packed() -> None:
    """The paper: 2.38 times. The idle part of superres was derived from this figure, which is the greatest possible."""
    fifo, pack = (replay(equal("superres_128"), order).summary() for order in (Order.FIFO, Order.PACK))
    workload = WORKLOADS["superres_128"]
    assert 2 <= fifo.makespan_s / pack.makespan_s <= workload.iteration_us / workload.gpu_us


def test_300_of_resnet50_are_hardly_faster() -> None:
    """The paper: 1.07 times, and nothing in the trace was derived from that."""
    fifo, pack = (replay(equal("resnet50_50"), order).summary() for order in (Order.FIFO, Order.PACK))
    assert 1.03 <= fifo.makespan_s / pack.makespan_s <= 1.13


# FAIR


def services(trace: Sequence[TraceJob]) -> list[tuple[int, str, int]]:
    """Return time, job and its service so far, at the end of each iteration under FAIR."""
    seen: list[tuple[int, str, int]] = []

    def watch(now: int, name: str, progress: Progress) -> None:
        seen.append((now, name, progress.service))

    Simulator(trace, Lanes(16 * GIB, Order.FAIR), watch=watch).run()
    return seen


def unevenness(trace: Sequence[TraceJob]) -> list[tuple[float, float, float]]:
    """For every second in which no job came or left: return the seconds since one did, the mean service of a job since
    then, and the greatest difference between two jobs; in seconds.
    """
    seen = services(trace)
    present: dict[str, int] = {}  # jobs, and their service at the last change
    latest: dict[str, int] = {}
    last = {name: now for now, name, _ in seen}
    changed, second, found = 0, 1, []
    for now, name, service in seen:
        while second * S < now:
            since = [latest[one] - present[one] for one in present]
            if len(since) > 1:
                found.append((second - changed / S, sum(since) / len(since) / S, (max(since) - min(since)) / S))
            second += 1
        latest[name] = service
        if name not in present or last[name] == now:
            present[name] = service
            if last[name] == now:
                del present[name]
            present = {one: latest[one] for one in present}
            changed = now
    return found


def test_fair_shares_are_equal_at_every_second_of_figure_11() -> None:
    """Three jobs of inception3_50 come 15 s apart: they are equal within one iteration, and so within 5 % soon."""
    workload = WORKLOADS["inception3_50"]
    trace = [workload.job(f"{n}", n * 15_000_000, 120_000_000) for n in range(3)]
    seen = unevenness(trace)
    iteration = workload.gpu_us / 1e6
    assert len(seen) > 250
    assert all(apart <= 1.001 * iteration for _, _, apart in seen)
    long = [(mean, apart) for _, mean, apart in seen if mean >= 20 * iteration]
    assert len(long) > 200
    assert all(apart <= 0.05 * mean for mean, apart in long)


def test_fair_shares_are_equal_on_the_trace() -> None:
    """At every second they are within 5 %, or two iterations of the longest: no iteration is divided."""
    trace = salus()
    longest = max(job.gpu_us for job in trace) / 1e6
    seen = unevenness(trace)
    assert len(seen) > 10_000
    assert all(apart <= max(0.05 * mean, 2 * longest) for _, mean, apart in seen)


# Repeatable and fast


def test_the_same_trace_gives_the_same_result() -> None:
    trace = salus(seed=3, jobs=20)
    assert salus(seed=3, jobs=20) == trace
    assert replay(trace, Order.FAIR) == replay(trace, Order.FAIR)


def test_table_3_is_complete() -> None:
    assert len(WORKLOADS) == 45
    for workload in WORKLOADS.values():
        assert 0 < workload.persistent <= 822.2 * (1 << 20)
        assert workload.ephemeral > 0
        assert workload.persistent + workload.ephemeral <= 13.8 * GIB, "the largest peak of the paper"
        assert 0 < workload.gpu_us <= workload.iteration_us


def test_a_day_of_the_cluster() -> None:
    """It takes three to five seconds of a processor that no other program uses."""
    trace = day()
    assert len(trace) == 400
    began = time.process_time()
    summary = replay(trace, Order.SRTF).summary()
    assert time.process_time() - began < DAY_S * SLOW
    assert 20 * 3600 < summary.makespan_s < 28 * 3600


# Traces as text


def test_a_trace_is_read_as_it_was_written() -> None:
    trace = salus(jobs=5)
    assert parse(dump(trace, "two\nlines").splitlines()) == trace


def test_lines_come_in_any_order_and_idle_may_be_left_out() -> None:
    line = '{"job": "%s", "arrival_us": %d, "persistent": 1, "ephemeral": 2, "iterations": 3, "gpu_us": 4}'
    found = parse(["", "# words", line % ("b", 9), line % ("a", 5)])
    assert found == [TraceJob("a", 5, 1, 2, 3, 4, 0), TraceJob("b", 9, 1, 2, 3, 4, 0)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"iterations": 0}, "'iterations' is no integer of 1 or more"),
        ({"persistent": -1}, "'persistent' is no integer of 0 or more"),
        ({"gpu_us": 1.5}, "'gpu_us' is no integer"),
        ({"ephemeral": True}, "'ephemeral' is no integer"),
        ({"arrival_us": 1 << 62}, "'arrival_us' is no integer"),
        ({"job": ""}, "'job' is no name"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_what_a_trace_may_not_say(change: dict[str, object], complaint: str) -> None:
    line = json.dumps(attrs.asdict(job("a")) | change)
    with pytest.raises(UsageError, match=complaint) as caught:
        parse(["#", line])
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "", '{"job": "a"}\n'])
def test_what_is_no_trace(text: str) -> None:
    with pytest.raises(UsageError):
        parse(text.splitlines())


def test_two_jobs_of_one_name() -> None:
    with pytest.raises(UsageError, match="line 2 of the trace: there is a job 'a' already"):
        parse(dump([job("a"), job("a")]).splitlines())


# The command


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace"
    assert main(["replay", "--generate", "superres_128", "--jobs", "4"]) == OK
    file.write_text(capsys.readouterr().out)
    assert main(["replay", "--order", "pack", str(file)]) == OK
    assert "makespan" in capsys.readouterr().out
    assert main(["replay", "--policy", "lanes", "--order", "pack", "--json", str(file)]) == OK
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["jobs"] == len(told["jobs"]) == 4
    assert told["jobs"][0]["job"] == "0-superres_128"
    assert told["summary"]["makespan_s"] == max(one["finished_s"] for one in told["jobs"])


def test_the_command_with_a_policy_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "from ggroupfs.policies.lanes import Lanes, Order\n"
        "def policy(capacity, options):\n"
        "    assert options == {'depth': '3'}\n"
        "    return Lanes(capacity, Order.PACK)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "trace"
    file.write_text(dump([job("a"), job("b")]))
    assert main(["replay", "--policy", "mine:policy", "--set", "depth=3", str(file)]) == OK
    assert "2 jobs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--order", "best", "TRACE"], USAGE),
        (["--policy", "nobody:policy", "TRACE"], USAGE),
        (["--policy", "json:policy", "TRACE"], USAGE),
        (["--set", "nonsense", "TRACE"], USAGE),
        (["--capacity", "1", "TRACE"], FAILED),
        (["--capacity", "much", "TRACE"], USAGE),
        (["/nowhere/at/all"], FAILED),
        (["--generate", "nothing"], USAGE),
        ([], USAGE),
    ],
)
def test_the_command_complains(words: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace"
    file.write_text(dump([job("a")]))
    assert main(["replay", *(str(file) if word == "TRACE" else word for word in words)]) == code
    assert capsys.readouterr().err.startswith("ggroupfs: ")


# Turns of memory

ROOM = Machine(capacity=20 * GIB, pcie=40_000_000_000)


def oversubscribed(
    trace: Sequence[TraceJob] = (), *, is_on: bool = True, machine: Machine = ROOM, wait_us: int = WAIT_US
) -> Result:
    """Return four jobs that read 8 GiB in each iteration, as fast as GPU memory permits."""
    each = trace or [job(name, 1000, gpu=2000, memory=(8 * GIB, 0)) for name in "abcd"]
    return TurnsSimulator(each, machine, wait_us, is_on=is_on).run()


def held(result: Result) -> list[dict[str, int]]:
    """Return the memory of each job on the GPU after each change."""
    found: dict[str, int] = {}
    return [dict(found := found | {one.job: found.get(one.job, 0) + one.nbytes}) for one in result.changes]


def test_with_room_for_all_jobs_share_the_engine() -> None:
    result = oversubscribed(machine=attrs.evolve(ROOM, capacity=32 * GIB))
    assert ends(result) == dict.fromkeys("abcd", 8_000_000)
    assert (result.switches, result.memory_peak) == (0, 32 * GIB)
    assert result.summary().gpu_busy == pytest.approx(1.0)


def test_idle_time_of_one_is_engine_time_of_another() -> None:
    trace = [job("a", 10, 100, 300), job("b", 10, 100, 100, arrival=500)]
    assert ends(oversubscribed(trace)) == {"a": 4000, "b": 2500}


@pytest.fixture(scope="module")
def turned() -> Result:
    """Return the result of a replay with turns."""
    return oversubscribed()


def test_jobs_that_need_more_memory_than_there_is_have_turns_of_it(turned: Result) -> None:
    result, without = turned, oversubscribed(is_on=False)
    assert result.summary().makespan_s <= 8 / 0.8
    assert without.summary().makespan_s >= 8 / 0.1, "they read over the bus what has no room"
    assert result.switches > 10
    assert not without.switches
    amounts = held(result)
    assert max(sum(each.values()) for each in amounts) == result.memory_peak <= ROOM.capacity
    assert all(0 <= nbytes <= 8 * GIB for each in amounts for nbytes in each.values())
    assert not any(amounts[-1].values()), "what ends has nothing"
    assert all(outcome.withdrawals for outcome in result.outcomes)


@pytest.mark.parametrize(
    ("percent", "wait_s", "least"),
    [(150, 1.0, 0.88), (200, 1.0, 0.88), (300, 1.0, 0.29), (300, 1.5, 0.5), (300, 2.5, 0.7), (300, 4.0, 0.8)],
)
def test_no_turn_begins_without_its_memory(percent: int, wait_s: float, least: float) -> None:
    """Missing memory is read over the bus, at a hundredth of the speed; 34 GB/s each way, as between two processes."""
    machine = Machine(capacity=4 * 8 * GIB * 100 // percent, pcie=34_000_000_000)
    trace = [job(name, 2000, gpu=2000, memory=(8 * GIB, 0)) for name in "abcd"]
    result = oversubscribed(trace, machine=machine, wait_us=round(wait_s * 1e6))
    assert result.summary().gpu_busy >= least


def test_what_is_left_alone_has_its_memory_back() -> None:
    """When there are no more turns, memory in the host is fetched into the free room."""
    trace = [job("a", 100, gpu=2000, memory=(15 * GIB, 0)), job("b", 2000, gpu=2000, memory=(15 * GIB, 0))]
    result = oversubscribed(trace)
    a, b = (outcome.finished or 0 for outcome in result.outcomes)
    assert b - a <= 1.1 * 2000 * 2000 * 1000
    assert held(result)[-2]["b"] == 15 * GIB


def test_a_turn_is_of_one_job_where_two_have_no_room(turned: Result) -> None:
    # Until the first job ends; then there are fewer.
    first = min(one.finished or 0 for one in turned.outcomes)
    spans = sorted((span for span in turned.ran if span.end <= first), key=lambda span: span.start)
    assert len(spans) > 10
    assert all(one.end <= other.start for one, other in itertools.pairwise(spans))


def test_a_job_that_has_no_room_by_itself_has_no_turn() -> None:
    result = oversubscribed([job("a", memory=(30 * GIB, 0)), job("b")])
    assert ends(result) == {"b": 100}
    assert result.summary().refused == 1


def test_turns_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace"
    file.write_text(dump([job(name, 300, gpu=2000, memory=(8 * GIB, 0)) for name in "abcd"]))
    busy = {}
    for words in (("turns=on",), ("turns=off",), ("wait=0.8", "turns=on")):
        options = [word for each in words for word in ("--set", each)]
        assert main(["replay", "--policy", "turns", "--capacity", "20G", *options, "--json", str(file)]) == OK
        busy[words] = json.loads(capsys.readouterr().out)["summary"]["gpu_busy"]
    assert busy["turns=off",] < 0.2 < 0.7 < busy["turns=on",]
    assert busy["wait=0.8", "turns=on"] != busy["turns=on",]


@pytest.mark.parametrize("word", ["wait=0", "wait=inf", "wait=soon", "turns=maybe", "depth=3"])
def test_turns_have_no_other_options(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace"
    file.write_text(dump([job("a")]))
    assert main(["replay", "--policy", "turns", "--set", word, str(file)]) == USAGE
    assert "wait=SECONDS" in capsys.readouterr().err


def test_the_memory_of_turns_is_drawn_as_it_comes_and_goes(turned: Result) -> None:
    axes = Figure().add_subplot()
    plots.memory(turned, axes)
    tops = [max(path.vertices[:, 1]) for collection in axes.collections for path in collection.get_paths()]
    assert max(tops) == pytest.approx(turned.memory_peak / GIB, abs=0.5)


def test_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace"
    file.write_text(dump([job("a", 3), job("b", 2, memory=(3, 2))]))
    assert main(["replay", "--order", "pack", "--plot", str(tmp_path / "plots"), str(file)]) == OK
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["completion.png", "memory.png", "timeline.png"]
    assert all((tmp_path / "plots" / name).read_bytes()[:4] == b"\x89PNG" for name in names)


@pytest.fixture(scope="module")
def drawn() -> Result:
    """Return a result to draw: two lanes, jobs that take turns in one of them, and a refused job."""
    trace = [
        job("a", 3, gpu=4_000_000, idle=3_000_000, memory=(1 * GIB, 3 * GIB)),
        job("b", 2, gpu=5_000_000, idle=9_000_000, arrival=2_000_000, memory=(2 * GIB, 2 * GIB)),
        job("never", memory=(9 * GIB, 9 * GIB)),
        job("c", 2, gpu=6_000_000, idle=1_000_000, arrival=3_000_000, memory=(2 * GIB, 3 * GIB)),
    ]
    machine = attrs.evolve(FREE, capacity=12 * GIB, timeslice_us=20_000)
    result = Simulator(trace, Lanes(machine.capacity, Order.FAIR, 2), machine).run()
    assert len({span.lane for span in result.ran}) == 2
    assert len(result.ran) > 3
    return result


def test_the_timeline_shows_who_ran(drawn: Result) -> None:
    """There is a bar for each span, in the row of its job and the colour of its lane."""
    axes = Figure().add_subplot()
    plots.timeline(drawn, axes)
    rows = [outcome.trace.job for outcome in drawn.outcomes]
    bars = []
    for collection in axes.collections:
        if collection.get_paths()[0].codes is not None:  # a rectangle rather than a line
            colours = collection.get_facecolors()
            for path, colour in zip(collection.get_paths(), colours, strict=True):
                box = path.get_extents()
                bars.append((rows[round((box.y0 + box.y1) / 2)], box.x0, box.x1, tuple(colour)))
    spans = [
        (span.job, span.start / plots.MINUTE, span.end / plots.MINUTE, to_rgba(f"C{span.lane}")) for span in drawn.ran
    ]
    assert [bar[0] for bar in sorted(bars)] == [span[0] for span in sorted(spans)]
    for bar, span in zip(sorted(bars), sorted(spans), strict=True):
        assert bar[1:3] == pytest.approx(span[1:3])
        assert bar[3] == pytest.approx(span[3])


def test_the_picture_of_memory_is_as_high_as_its_peak(drawn: Result) -> None:
    axes = Figure().add_subplot()
    plots.memory(drawn, axes)
    tops = [max(path.get_extents().y1 for path in band.get_paths()) for band in axes.collections]
    assert len(tops) == len(drawn.outcomes)
    assert max(tops) == pytest.approx(drawn.memory_peak / GIB)
    (line,) = axes.lines
    assert set(line.get_ydata()) == {drawn.capacity / GIB}


def test_the_cdf_has_every_completion(drawn: Result) -> None:
    axes = Figure().add_subplot()
    plots.completion(drawn, axes)
    (line,) = axes.lines
    done = sorted(outcome.completion / plots.MINUTE for outcome in drawn.outcomes if outcome.finished is not None)
    assert line.get_drawstyle() == "steps-post"
    assert list(line.get_xdata()) == pytest.approx([0, *done])
    assert list(line.get_ydata()) == pytest.approx([0, 1 / 3, 2 / 3, 1])
