"""The replay of a cluster: invariants of every placement, exact cases, and the published figures of its trace."""

from __future__ import annotations

import collections
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggroupfs.cli import OK, USAGE, main
from ggroupfs.replay.cluster import contention, fractions, mig, published, report
from ggroupfs.replay.cluster.fleet import Fleet
from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob, dump, parse
from ggroupfs.replay.cluster.simulation import Run, Simulation, Use

NAMES = [*report.POLICIES]
NEAR = 1e-6
"""Seconds, and fractions of a GPU, by which sums of floats may differ."""


def job(
    name: str, arrival: float = 0, duration: float = 100, gpus: int = 1, share: int = 100, memory: int = 10, busy=0.5
) -> ClusterJob:
    return ClusterJob(name, arrival, duration, gpus, share, memory, busy)


def simulate(trace: Sequence[ClusterJob], policy: str, nodes: int = 1, per_node: int = 1) -> tuple[list[Run], Use]:
    placement = report.POLICIES[policy]()
    return Simulation(trace, placement, Fleet(placement, nodes, per_node), 1000).run()


def ends(runs: Sequence[Run]) -> dict[str, float]:
    return {run.job.job: pytest.approx(run.ended_s) for run in runs}


JOBS = st.lists(
    st.builds(
        lambda arrival, duration, gpus, share, memory, busy: job(
            "", arrival, duration, gpus, WHOLE if gpus > 1 else share, memory, busy
        ),
        st.integers(0, 300),
        st.integers(1, 200),
        st.sampled_from([1, 1, 1, 1, 2, 4]),
        st.sampled_from([*published.PARTS, WHOLE, 1]),
        st.integers(1, WHOLE),
        st.floats(0, 1),
    ),
    max_size=20,
)


@pytest.mark.parametrize("policy", NAMES)
@settings(deadline=None, max_examples=40)
@given(trace=JOBS, nodes=st.integers(1, 3), grows=st.booleans())
def test_no_gpu_is_overfull_no_job_is_lost_and_work_is_conserved(
    policy: str, trace: list[ClusterJob], nodes: int, grows: bool
) -> None:
    """The figures are kept here independently of the policy's: memory, share and time of each GPU at each change."""
    trace = [ClusterJob(f"j{n}", *[getattr(j, key) for key in FIELDS]) for n, j in enumerate(trace)]
    done: dict[str, float] = collections.defaultdict(float)
    last: dict[int, tuple[float, list[tuple[str, float, int]]]] = {}

    def watch(now: float, gpu: int, runs: Sequence[Run]) -> None:
        since, before = last.get(gpu, (now, []))
        for name, pace, width in before:
            done[name] += (now - since) * pace / width
        last[gpu] = (now, [(run.job.job, run.pace, run.job.gpus) for run in runs])
        assert sum(run.job.memory for run in runs) <= WHOLE
        if policy != "mig":  # instances of MIG compute at the same time
            assert sum(run.job.busy * run.pace for run in runs) <= 1 + NEAR
        assert all(0 < run.pace <= 1 for run in runs)
        if policy in ("whole", "shares"):
            assert sum(run.job.share for run in runs) <= WHOLE
        if any(run.job.gpus > 1 for run in runs) or policy == "whole":
            assert len(runs) <= 1
        if policy == "mig":
            compute = [mig.PROFILES[run.spot.place // mig.MEMORY_SLICES].compute for run in runs]
            assert sum(compute) <= mig.COMPUTE_SLICES
        if policy == "fractions":
            assert sum(run.spot.place for run in runs) <= fractions.SLOTS

    placement = report.POLICIES[policy]()
    fleet = Fleet(placement, 0 if grows else nodes, 4, grows)
    runs, use = Simulation(trace, placement, fleet, 1000, watch).run()
    assert [run.job.job for run in runs] == [j.job for j in sorted(trace, key=lambda j: j.arrival_s)]
    assert fleet.in_use == 0
    assert use.peak <= fleet.gpus
    for run in runs:
        assert run.ended_s is not None
        assert run.started_s >= run.job.arrival_s
        assert len({gpu // 4 for gpu in run.spot.gpus}) == 1, "all GPUs of a job are of one node"
        assert len(set(run.spot.gpus)) == run.job.gpus
        assert run.ended_s - run.started_s >= run.job.duration_s - NEAR
        assert done[run.job.job] == pytest.approx(run.job.duration_s, abs=1e-3)
        if grows:
            assert run.started_s == run.job.arrival_s


FIELDS = ("arrival_s", "duration_s", "gpus", "share", "memory", "busy")


def test_a_job_of_several_gpus_has_them_to_itself_by_memory_alone_too() -> None:
    trace = [job("wide", 0, 100, gpus=2, memory=1), job("a", 1, 10, memory=1, share=1)]
    assert ends(simulate(trace, "memory", per_node=2)[0]) == {"wide": 100, "a": 110}


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 100)), max_size=12))
def test_paces_are_no_more_than_one_engine_has(programs: list[tuple[float, int]]) -> None:
    found = contention.paces(programs)
    assert all(0 < pace <= 1 + NEAR for pace in found)
    assert sum(busy * pace for (busy, _), pace in zip(programs, found, strict=True)) <= 1 + NEAR


def test_programs_that_always_compute_have_their_weights() -> None:
    """Weights of benchmarks/README.md: 100, 200 and 400, with 1 % lost."""
    found = contention.paces([(1, 100), (1, 200), (1, 400)])
    assert found == pytest.approx([contention.EFFICIENCY * part / 7 for part in (1, 2, 4)], rel=1e-3)
    document = (Path(__file__).resolve().parents[2] / "benchmarks/README.md").read_text()
    assert "| 100:200:400 | ggroupfs | 0.00938 (0.00826 to 0.0105), 0.007042 x | 1,162, 1.096 x |" in document
    assert "|  | exclusive | 1,173 (1,172 to 1,174) |  |" in document


def test_two_programs_of_which_one_thinks() -> None:
    """Alone it computes for 35 s of 100 s; beside one that always computes it gets half of those, so 70 and 65."""
    always, thinks = contention.paces([(1, 1), (0.35, 1)])
    assert thinks == pytest.approx(1 / 1.35, rel=0.02)
    assert always == pytest.approx(1 - 0.35 / 1.35, rel=0.02)


def test_a_program_that_never_computes_slows_none() -> None:
    assert contention.paces([(0.0, 50), (1.0, 50)]) == [1.0, 1.0]


def test_jobs_wait_in_order_and_a_narrow_one_goes_before_a_wide_one() -> None:
    trace = [job("a", 0, 100), job("wide", 1, 50, gpus=2), job("b", 2, 30), job("c", 3, 30)]
    runs, use = simulate(trace, "whole", nodes=1, per_node=2)
    assert ends(runs) == {"a": 100, "b": 32, "c": 62, "wide": 150}
    assert use.peak == 2


def test_shares_pack_what_whole_gpus_do_not() -> None:
    trace = [job("a", share=47, busy=0), job("b", share=47, busy=0), job("c", share=10, busy=0)]
    assert ends(simulate(trace, "shares")[0]) == {"a": 100, "b": 100, "c": 200}
    assert ends(simulate(trace, "memory")[0]) == {"a": 100, "b": 100, "c": 100}
    assert ends(simulate(trace, "whole")[0]) == {"a": 100, "b": 200, "c": 300}


def test_memory_is_a_bound_where_shares_are_none() -> None:
    trace = [job("a", memory=60, busy=0), job("b", memory=60, busy=0)]
    assert ends(simulate(trace, "memory")[0]) == {"a": 100, "b": 200}


def test_a_fixed_fraction_slows_a_job_that_would_have_more() -> None:
    """Two of four slots give half of the time, even on an idle GPU; by shares the job gets all of it."""
    trace = [job("a", share=50, busy=1.0)]
    assert ends(simulate(trace, "fractions")[0]) == {"a": 200}
    assert ends(simulate(trace, "shares")[0]) == {"a": 100}


@pytest.mark.parametrize(
    ("share", "memory", "profile"),
    [
        *[(14, 12, "1g.10gb"), (11, 13, "1g.20gb"), (22, 20, "2g.20gb"), (47, 40, "3g.40gb"), (50, 50, "4g.40gb")],
        *[(65, 10, "7g.80gb"), (10, 51, "7g.80gb"), (100, 100, "7g.80gb")],
    ],
)
def test_profile_of_a_job(share: int, memory: int, profile: str) -> None:
    assert mig.Mig.profile(job("a", share=share, memory=memory))[1].name == profile


def test_profiles_fit_on_a_card_as_nvidia_has_them() -> None:
    """Seven of the smallest; three of two sevenths with one of one; and one of four beside one of three."""
    for sizes in ([11] * 7, [28] * 3 + [11], [50, 47], [47, 47]):
        state = mig.Mig.empty
        for number, share in enumerate(sizes):
            taken = mig.Mig().take(state, job(f"j{number}", share=share, memory=1))
            assert taken is not None, sizes
            state = taken.state
    taken = mig.Mig().take(mig.Mig.empty, job("a", share=50, memory=1))
    assert taken is not None
    assert mig.Mig().take(taken.state, job("b", share=50, memory=1)) is None, "four sevenths begin at 0 only"


# The published shape


def test_quantiles_are_those_published() -> None:
    """For a day of 40,000 jobs, next to the figures that the module cites."""
    trace = published.day(seed=7, gpus=8, jobs=40_000)
    durations = sorted(j.duration_s for j in trace)
    assert statistics.median(durations) == pytest.approx(23 * 60, rel=0.04)
    assert durations[36_000] == pytest.approx(4.5 * 3600, rel=0.06)
    tasks = 100 - 13.3  # percent, without tasks that use no GPU
    for gpus, percent in ((1, 48.0), (2, 0.2), (4, 0.2), (8, 0.5)):
        found = sum(j.gpus == gpus and j.share == WHOLE for j in trace) / len(trace)
        assert found == pytest.approx(percent / tasks, rel=0.02, abs=0.001)
    parts = [j.share / WHOLE for j in trace if j.share < WHOLE]
    assert len(parts) / len(trace) == pytest.approx(37.8 / tasks, rel=0.02)
    asked = sum(j.gpus * j.share / WHOLE for j in trace)
    assert sum(parts) / asked == pytest.approx(0.285, rel=0.06), "of all requested GPUs, in table 1 of FGD"
    busy = sorted(j.busy for j in trace)
    assert sum(b == 0 for b in busy) / len(busy) == pytest.approx(0.345, rel=0.02)
    assert statistics.median(busy) == pytest.approx(0.015, rel=0.1)
    assert sum(b < 0.1 for b in busy) / len(busy) == pytest.approx(0.754, rel=0.01)
    assert sum(b < 0.5 for b in busy) / len(busy) == pytest.approx(0.95, rel=0.01)
    assert statistics.mean(busy) == pytest.approx(0.105, rel=0.08), "which the quantiles do not fix"
    memory = sorted(j.memory for j in trace if j.gpus == 1 and j.share == WHOLE)
    assert sum(m <= 50 for m in memory) / len(memory) == pytest.approx(0.55, rel=0.03)


def test_the_same_seed_is_the_same_day_and_another_is_not() -> None:
    assert published.day(3, 80) == published.day(3, 80)
    assert published.day(3, 80) != published.day(4, 80)


@given(st.floats(0, 1))
def test_durations_are_within_a_day(part: float) -> None:
    assert 1 <= published.duration(part) <= published.DAY_S


# Text and command


def test_a_trace_is_what_was_written() -> None:
    trace = published.day(1, 8)
    assert parse(dump(trace, "a comment")) == trace


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share": 0}, "'share' is no integer from 1 to 100"),
        ({"memory": 101}, "'memory' is no integer"),
        ({"gpus": 1.5}, "'gpus' is no integer"),
        ({"gpus": True}, "'gpus' is no integer"),
        ({"busy": 1.1}, "'busy' is no number from 0 to 1"),
        ({"arrival_s": math.inf}, "'arrival_s' is no number"),
        ({"arrival_s": math.nan}, "'arrival_s' is no number"),
        ({"duration_s": 0}, "'duration_s' is no number"),
        ({"gpus": 2, "share": 50}, "has them whole"),
        ({"job": ""}, "'job' is no name"),
        ({"other": 1}, "its keys are not"),
    ],
)
def test_what_is_no_job(change: dict[str, object], words: str) -> None:
    (line,) = [line for line in dump([job("a")], "") if line.startswith("{")]
    with pytest.raises(ValueError, match=f"line 1: .*{words}"):
        parse([json.dumps(json.loads(line) | change)])
    with pytest.raises(ValueError, match="line 2: another job is called 'a'"):
        parse([line, line])


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["replay", "--generate", "cluster", "--nodes", "2x4", "--seed", "5"]) == OK
    trace = tmp_path / "trace"
    trace.write_text(capsys.readouterr().out)
    assert main(["replay", "--nodes", "2x4", str(trace)]) == OK
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == NAMES
    assert main(["replay", "--nodes", "2x4", "--place", "shares,whole", "--json", str(trace)]) == OK
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["shares", "whole"]
    assert rows[0]["needed"] <= rows[1]["needed"]
    assert rows[1]["slowed"] == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--generate", "cluster"], "needs --nodes"),
        (["--generate", "cluster", "--nodes", "1x1", "--jobs", "0"], "--jobs is 1 or more"),
        (["--nodes", "1x1", "--place", "best", "TRACE"], "no placement 'best'"),
        (["--nodes", "1x4", "TRACE"], "a0 fits on no node: 8 GPUs"),
        (["--nodes", "1x4", "EMPTY"], "has no job"),
        (["--nodes", "1x4", "BAD"], "line 1: "),
    ],
)
def test_complaints(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {"TRACE": "".join(dump([job("a0", gpus=8)], "")), "EMPTY": "\n", "BAD": "[]\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["replay", *[str(tmp_path / word) if word in files else word for word in words]]) == USAGE
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("word", ["8", "0x8", "8x0", "x8", "8x", "-1x8", "1x65", "100001x1", "٣x1"])
def test_what_is_no_cluster(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", f"--nodes={word}", "trace"])
    assert ended.value.code == USAGE
    assert "--nodes" in capsys.readouterr().err
