"""The papers' pairs over a fake GPU in virtual time: their cells, what is merged of them, and the page."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from tests.bench.core import record
from tests.bench.core.check import compare
from tests.bench.core.runner import Unavailable
from tests.bench.gpu.faces import Part
from tests.bench.gpu.systems import Mps, Plain
from tests.bench.papers import __main__ as papers
from tests.bench.papers import actions, cells, flyt, gangs, kept, merging, page, pairs, salus, scale, sharing
from tests.bench.papers import lab as lab_module
from tests.bench.papers.bounds import Overdue
from tests.bench.papers.cells import FIRST, LATER, Cell, Measured, Wanted
from tests.bench.papers.merging import Mixed
from tests.bench.papers.requests import planned
from tests.support.fake_bench import FakeLab, FakeSystem
from tests.support.fake_papers import (
    CARD_MIB,
    FIRST_MS,
    LOOP_MIB,
    SERVER_MIB,
    STEPS,
    FakeAlone,
    FakeBandWay,
    FakePapersLab,
    FakeSharing,
    FakeSite,
    FakeStage,
)

ON: Mapping[str, Any] = {"product": "aa", "programs": "bb", "gpu": "NVIDIA Fake", "date": "2026-01-01 00:00"}
SIZE = pairs.Size(rate=10.0, seconds=12.0)


def nothing(cell: Cell) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
    return contextlib.nullcontext({})


def ways() -> tuple[list[FakeSharing], list[FakeSharing]]:
    both = [FakeSharing("time slicing"), FakeSharing("ggroupfs", (1.0, 0.6))]
    less = [FakeSharing("time slicing", refuses="out of memory"), FakeSharing("ggroupfs, static", (1.0, 0.5))]
    return both, less


def pair_cells(lab: FakePapersLab) -> list[Cell]:
    points = [
        ("ggroupfs, static", duty, FakeSharing("ggroupfs, static", (1.0, 0.5 * duty / 100))) for duty in pairs.DUTIES
    ]
    return list(pairs.cells(lab, 9, SIZE, ways(), points, FakeAlone()))


def run(lab: FakePapersLab, chosen: Sequence[Cell], out: Path, numbers: Sequence[int] = (0, 1), **more: Any) -> int:
    on = more.pop("on", ON)
    left = cells.run(chosen, numbers, out, on, watch=nothing, clock=lab.now, **more)
    assert not lab.running, "something still runs"
    return left


# How cells are run


@attrs.define
class Counted:
    """Cells that count how often they are measured."""

    lab: FakePapersLab
    order: list[str] = attrs.field(factory=list)
    takes: float = 10.0

    def cell(self, name: str, fails: Exception | None = None, **case: Any) -> Cell:
        def measure(number: int) -> Measured:
            self.order.append(f"{name}{number}")
            self.lab.sleep(self.takes)
            if fails is not None:
                print("the log of a program")
                raise fails
            return Measured({"p99_ms": 1.0 + number})

        return Cell("s", name, case, 10.0, measure)


def test_rounds_are_interleaved_and_each_is_begun_by_another(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    run(counted.lab, [counted.cell(name) for name in "abc"], tmp_path, (0, 1, 2))
    assert counted.order == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]


def test_what_is_there_is_not_measured_again_unless_the_code_is_another(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    every = [counted.cell("a"), counted.cell("b")]
    assert run(counted.lab, every, tmp_path, (0,)) == 0
    assert run(counted.lab, every, tmp_path, (0,)) == 0
    assert counted.order == ["a0", "b0"]
    run(counted.lab, every, tmp_path, (0,), on={**ON, "load_average": 3.0})
    assert counted.order == ["a0", "b0"], "what else is told of a machine is no code"
    for key in cells.SAME:
        run(counted.lab, every, tmp_path, (0,), on={**ON, key: "other"})
    assert len(counted.order) == 2 + 2 * len(cells.SAME)


def test_no_cell_is_begun_that_would_not_end_in_time(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    every = [counted.cell(name) for name in "abcde"]
    assert run(counted.lab, every, tmp_path, (0,), budget=35.0) == 2
    assert counted.order == ["a0", "b0", "c0"]
    assert run(counted.lab, every, tmp_path, (0,), budget=35.0) == 0
    assert counted.order == ["a0", "b0", "c0", "d0", "e0"], "the next session goes on"


def test_a_cell_that_takes_longer_than_planned_counts_so(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab(), takes=30.0)
    assert run(counted.lab, [counted.cell("a")], tmp_path, (0, 1), budget=55.0) == 1
    assert counted.order == ["a0"]


@pytest.mark.parametrize(
    ("error", "reason"), [(Unavailable("out of memory"), "out of memory"), (KeyError("x"), "failed: KeyError: 'x'")]
)
def test_what_cannot_be_measured_says_why_and_others_go_on(tmp_path: Path, error: Exception, reason: str) -> None:
    counted = Counted(FakePapersLab())
    run(counted.lab, [counted.cell("a", error), counted.cell("b")], tmp_path, (0,))
    made = merging.merged(merging.read(tmp_path.glob("*.json")), {"s": "b"})
    (absence,) = made.runs["s"].absences
    assert (absence.system, absence.reason) == ("a", reason)
    told = (tmp_path / cells.FAILURES).read_text()
    assert told.startswith(f"== s--a round 0: {reason}\nthe log of a program\n")
    assert ("Traceback" in told) is reason.startswith(cells.FAILED)
    assert [cell.system for cell in made.runs["s"].cells] == ["b"]


def test_the_plan_says_what_is_missing_and_how_long_it_takes(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    every = [counted.cell("a"), counted.cell("b", load=1)]
    run(counted.lab, every[:1], tmp_path, (0,))
    lines = list(cells.plan(every, (0, 1), tmp_path, ON))
    assert [line.split() for line in lines[:3]] == [
        ["0", "s", "10", "s", "s--b--load=1", "round", "0"],
        ["10", "s", "10", "s", "s--b--load=1", "round", "1"],
        ["20", "s", "10", "s", "s--a", "round", "1"],
    ]
    assert lines[3].split()[:6] == ["30", "s", "in", "all,", "for", "3"]
    fewer = list(cells.plan(every, (0, 1), tmp_path, ON, budget=25.0))
    assert fewer[:2] == lines[:2]
    assert fewer[2].split()[:6] == ["20", "s", "in", "all,", "for", "2"]
    assert fewer[3].split()[:5] == ["10", "s", "more,", "for", "1"]


def test_the_plan_is_what_is_run(tmp_path: Path) -> None:
    """In that order, with those cells left; and what was measured is planned by the time that it took."""
    counted = Counted(FakePapersLab())
    every = [counted.cell("a"), attrs.evolve(counted.cell("b"), rank=FIRST), counted.cell("c")]
    lines = list(cells.plan(every, (0, 1), tmp_path, ON, budget=45.0))
    assert run(counted.lab, every, tmp_path, budget=45.0) == 2
    assert [f"{words[4][3:]}{words[6]}" for line in lines[:4] if (words := line.split())] == counted.order
    assert lines[-1].split()[:5] == ["20", "s", "more,", "for", "2"]
    slow = Counted(counted.lab, takes=35.0)
    run(counted.lab, [slow.cell("d")], tmp_path, (0,))
    (line, *_) = cells.plan([slow.cell("d")], (1,), tmp_path, ON)
    assert line.split()[2] == "35"


def test_what_the_first_table_needs_comes_first_in_all_rounds(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    every = [counted.cell("a"), *(attrs.evolve(counted.cell(name), rank=FIRST) for name in "bc"), counted.cell("d")]
    run(counted.lab, every, tmp_path)
    assert counted.order == ["b0", "c0", "c1", "b1", "a0", "d0", "d1", "a1"]
    assert FIRST < LATER
    assert [cell.name for cell in every if Wanted([f"rank={FIRST}"]).takes(cell)] == ["s--b", "s--c"]


# What bounds a cell


@attrs.define
class Bound:
    """Bounds in virtual time: a cell that takes longer is overdue."""

    lab: FakePapersLab
    asked: list[float] = attrs.field(factory=list)

    @contextlib.contextmanager
    def enter(self, seconds: float) -> Iterator[list[str]]:
        self.asked.append(seconds)
        begin = self.lab.now()
        yield ["sleep (7) outlived its cell: ended by SIGTERM"]
        if self.lab.now() - begin > seconds:
            raise Overdue(f"not over after {seconds:.0f} s")


def test_a_cell_that_hangs_is_a_finding_and_the_next_one_runs(tmp_path: Path) -> None:
    slow = Counted(FakePapersLab(), takes=500.0)
    bound = Bound(slow.lab)
    run(slow.lab, [slow.cell("a"), slow.cell("b")], tmp_path, (0,), bound=bound.enter)
    assert bound.asked == [cells.PATIENCE * 10 + cells.PATIENCE_S] * 2
    found = merging.read(tmp_path.glob("*.json"))
    assert [one.absent for one in found] == ["failed: not over after 85 s"] * 2
    assert [one.figures for one in found] == [{}, {}]
    assert found[0].left == ["sleep (7) outlived its cell: ended by SIGTERM"]
    made = merging.merged(found, {"s": "b"}).runs["s"]
    assert "a, round 0: sleep (7) outlived its cell: ended by SIGTERM" in made.parameters["findings"]


def test_what_the_end_of_the_session_broke_off_is_left_for_another_time(tmp_path: Path) -> None:
    slow = Counted(FakePapersLab(), takes=50.0)
    bound = Bound(slow.lab)
    assert run(slow.lab, [slow.cell("a")], tmp_path, (0,), bound=bound.enter, budget=30.0) == 1
    assert bound.asked == [30.0]
    assert not list(tmp_path.glob("*.json"))


def test_a_cell_that_failed_is_measured_again_if_asked_for(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    run(counted.lab, [counted.cell("a", KeyError("x")), counted.cell("b", Unavailable("no MPS"))], tmp_path, (0,))
    mended = [counted.cell("a"), counted.cell("b")]
    run(counted.lab, mended, tmp_path, (0,))
    assert counted.order == ["a0", "b0"]
    run(counted.lab, mended, tmp_path, (0,), again=True)
    assert counted.order == ["a0", "b0", "a0"]
    assert {one.system: one.absent for one in merging.read(tmp_path.glob("*.json"))} == {"a": None, "b": "no MPS"}


def test_what_is_logged_is_a_finding_beside_the_figures(tmp_path: Path) -> None:
    def measure(number: int) -> Measured:
        return Measured({"p99_ms": 1.0}, said=["GPU 0: cannot freeze process 4242"])

    lab = FakePapersLab()
    run(lab, [Cell("s", "a", {"load": 1}, 10.0, measure)], tmp_path, (0,))
    made = merging.merged(merging.read(tmp_path.glob("*.json")), {"s": "a"}).runs["s"]
    assert made.cells[0].values("p99_ms") == [1.0]
    assert made.parameters["findings"] == ["a, load 1, round 0: GPU 0: cannot freeze process 4242"]


def test_a_watch_that_fails_is_no_end_of_the_session(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())

    def broken(cell: Cell) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        raise OSError("no NVML")

    assert cells.run([counted.cell("a"), counted.cell("b")], (0,), tmp_path, ON, watch=broken) == 0
    assert [one.absent for one in merging.read(tmp_path.glob("*.json"))] == ["failed: OSError: no NVML"] * 2


def test_cells_are_asked_for_by_what_they_are() -> None:
    counted = Counted(FakePapersLab())
    cell = counted.cell("a b", low="diffusion", memory=70)
    for words, wanted in (
        ([], True),
        (["low=diffusion"], True),
        (["low=finetune"], False),
        (["low=finetune", "low=diffusion", "memory=70"], True),
        (["system=a b", "scenario=s"], True),
        (["duty=50"], False),
    ):
        assert Wanted(words).takes(cell) is wanted, words
    with pytest.raises(ValueError, match="KEY=VALUE"):
        Wanted(["low"]).takes(cell)
    large = attrs.evolve(cell, gpus=4, system="c")
    assert cells.chosen([cell, large], Wanted(), 1) == ([cell], [large])
    with pytest.raises(ValueError, match="two cells are called s--a-b"):
        cells.chosen([cell, attrs.evolve(cell, system="a-b")], Wanted(), 1)


@pytest.mark.parametrize("key", cells.SAME)
def test_cells_of_other_code_are_not_merged(tmp_path: Path, key: str) -> None:
    counted = Counted(FakePapersLab())
    run(counted.lab, [counted.cell("a")], tmp_path, (0, 1))
    run(counted.lab, [counted.cell("b")], tmp_path, (0,), on={**ON, key: "zz"})
    with pytest.raises(
        Mixed, match=f"not of one {key}: 1 with zz, 2 with {ON[key]}|not of one {key}: 2 with .*, 1 with zz"
    ):
        merging.merged(merging.read(tmp_path.glob("*.json")), {"s": "a"})


def test_what_is_no_cell_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(ValueError, match="no cell of schema 2"):
        merging.read([tmp_path / "a.json"])


# The pairs


def test_every_pair_is_measured(tmp_path: Path) -> None:
    lab = FakePapersLab()
    run(lab, pair_cells(lab), tmp_path)
    found = merging.read(tmp_path.glob("*.json"))
    made = merging.merged(found, papers.REFERENCES, papers.completed).runs["pairs"]
    case = {"low": "diffusion", "memory": 100, "arrivals": "gamma"}

    def value(system: str, figure: str, **more: Any) -> float:
        cell = made.cell(system, {**case, **more})
        assert cell is not None
        (one, other) = cell.values(figure)
        assert one == pytest.approx(other, rel=0.3)
        return one

    alone = made.cell("exclusive", {"arrivals": "gamma"})
    assert alone is not None
    assert alone.values("ttft_p50_ms")[0] == pytest.approx(FIRST_MS, rel=0.02)
    assert min(alone.values("attained")) >= 0.97
    assert value("ggroupfs", "ttft_p50_ms") == pytest.approx(FIRST_MS, rel=0.02)
    assert value("time slicing", "ttft_p50_ms") == pytest.approx(2 * FIRST_MS, rel=0.02)
    assert value("time slicing", "attained") == 0
    assert value("ggroupfs", "attained") >= 0.97
    assert value("ggroupfs", "steps_per_s") == pytest.approx(0.6 * STEPS, rel=0.1)
    pressed = value("ggroupfs, static", "steps_per_s", memory=70)
    assert pressed == pytest.approx(0.5 * 0.7 * STEPS, rel=0.1)
    cell = made.cell("ggroupfs", case)  # type: ignore[arg-type]
    assert made.ratios(cell, "steps_per_s")[0] == pytest.approx(0.6, rel=0.1)
    reasons = {(one.system, one.reason) for one in made.absences}
    assert reasons == {
        ("time slicing", f"low={low} memory=70 arrivals=gamma: out of memory") for low in ("diffusion", "finetune")
    }


def test_every_way_serves_the_same_requests_and_each_round_others(tmp_path: Path) -> None:
    lab = FakePapersLab()
    chosen = [cell for cell in pair_cells(lab) if cell.case.get("arrivals") == "gamma"]
    run(lab, chosen, tmp_path, (0, 1, 2))
    served = {one.rounds[0] for one in lab.started if one.rounds}
    assert len(served) == 3
    assert all(len(one) == SIZE.rate * SIZE.seconds for one in served)
    assert tuple(planned("gamma", 10, 12, 1)) not in served


def test_a_p99_has_hundreds_of_requests_behind_it() -> None:
    """In one round, and more when rounds are pooled."""
    size = pairs.Size()
    assert size.rate * size.seconds >= 200


def test_percentiles_are_pooled_over_rounds(tmp_path: Path) -> None:
    lab = FakePapersLab()
    run(lab, pair_cells(lab), tmp_path, (0, 1, 2))
    found = [one for one in merging.read(tmp_path.glob("*.json")) if one.scenario == "pairs"]
    pooled = {(system, repr(dict(case))): told for system, case, told in pairs.pooled(found)}
    told = pooled["exclusive", repr({"arrivals": "gamma"})]
    assert told["requests"] == 3 * SIZE.rate * SIZE.seconds
    assert 0.975 <= told["attained"] <= 0.995
    beside = pooled["ggroupfs", repr({"low": "diffusion", "memory": 100, "arrivals": "onoff"})]
    assert beside["requests"] == told["requests"]
    assert beside["attained"] >= 0.95


def test_a_program_that_computes_wrong_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = FakePapersLab()
    monkeypatch.setattr("tests.support.fake_papers.FakeProgram.finish", _wrong)
    run(lab, [cell for cell in pair_cells(lab) if "low" in cell.case], tmp_path, (0,))
    found = merging.read(tmp_path.glob("*.json"))
    assert {one.absent for one in found} == {"out of memory", "failed: RuntimeError: it is wrong"}


def _wrong(program: object) -> None:
    raise RuntimeError("it is wrong")


def test_names_of_all_cells_are_unique_and_each_scenario_has_its_reference() -> None:
    lab, gpu = FakePapersLab(), FakeLab()
    every = [
        *(*pairs.cells(lab, 9), *salus.cells(lab, 9), *flyt.cells(lab, gpu), *scale.cells(FakeSite(), 4)),
        *actions.cells([FakeStage(lab, actions.REFERENCE, False), FakeStage(lab, actions.OURS, True)], 9),
        *gangs.cells(lab, bands(lab), 4),
    ]
    chosen, left = cells.chosen(every, Wanted(), 4)
    assert (len(chosen), left) == (len(every), [])
    for name, reference in papers.REFERENCES.items():
        assert any(cell.system == reference for cell in every if cell.scenario == name)
    assert {cell.scenario for cell in every} == set(papers.REFERENCES)
    assert set(page.TITLES) == set(papers.REFERENCES)
    assert all(0 < cell.seconds <= 540 for cell in every), "a command on a lent GPU ends after ten minutes"
    assert {cell.gpus for cell in every} == {1, 2, 4}
    assert sum(cell.seconds for cell in every if cell.rank == FIRST) < 700, "a round of the first table, in a session"
    (planned_, others) = cells.chosen(every, Wanted(), 1)
    assert {cell.scenario for cell in others} == {scale.SPREAD, gangs.NAME, actions.NAME}
    assert not {scale.SPREAD, gangs.NAME} & {cell.scenario for cell in planned_}


def bands(lab: FakePapersLab) -> list[FakeBandWay]:
    speeds = {gangs.ALONE: 1.0, "time slicing": 3.0, "ggroupfs": 1.1, "ggroupfs, turns": 1.2}
    return [FakeBandWay(lab, name, slower) for name, slower in speeds.items()]


# Ways to share


@attrs.define
class FakeWords:
    """MPS, or nothing."""

    caps: bool

    def words(self, part: Part) -> list[str]:
        return [f"0={part.limit}"] if self.caps and part.limit else []


def hold(percent: int, caps: bool) -> sharing.DriverHold:
    return sharing.DriverHold(FakeWords(caps).words, percent, caps)


def test_the_driver_has_memory_for_both_or_not_at_all() -> None:
    lab = FakePapersLab()
    with hold(100, False).both(lab, ["loop"]) as (_, loop):
        assert loop.passes == 0
    assert lab.ballasts == []
    room = (SERVER_MIB + LOOP_MIB) * 70 // 100 - SERVER_MIB
    with (
        pytest.raises(Unavailable, match=f"with {room} of the {LOOP_MIB} MiB that it needs, the program ended"),
        hold(70, False).both(lab, ["loop"]),
    ):
        pass
    assert lab.ballasts == [CARD_MIB - SERVER_MIB - room]
    assert (lab.running, lab.held) == ([], 0)


def test_mps_limits_memory_by_its_own_words() -> None:
    lab = FakePapersLab()
    with pytest.raises(Unavailable, match="out of memory"), hold(70, True).both(lab, ["loop"]):
        pass
    assert lab.ballasts == []
    caps = [word for one in lab.started for word in one.words if word.startswith("0=")]
    assert caps == [], "it did not start"


def test_priorities_and_percentages_of_mps_are_what_was_asked_for() -> None:
    found = {way.name: way.system for way in pairs.roomy() if isinstance(way, sharing.Driver)}
    high, low = Part(critical=True), Part()
    assert isinstance(found["time slicing"], Plain)
    first, capped = found["MPS, priorities"], found["MPS, the other at 30 %"]
    assert isinstance(first, Mps)
    assert isinstance(capped, Mps)
    assert (first.priority(high), first.priority(low)) == (0, 1)
    assert (capped.percentage(high), capped.percentage(low)) == (None, 30)
    assert all(getattr(way, "duty", 100) == 100 for way in (*pairs.roomy(), *pairs.pressed()))
    assert [way.how for way in pairs.pressed() if isinstance(way, sharing.Ggroup)] == [
        "static",
        "dynamic",
        "cooperative",
        "turns",
    ]


@attrs.define
class FakeRoom:
    """A slice whose files are in a folder."""

    path: Path
    limits: list[int | None] = attrs.field(factory=list)
    waits: list[float] = attrs.field(factory=list)
    started: list[list[str]] = attrs.field(factory=list)
    within: str = "a/b"
    ended: int | None = None
    """Exit code of the daemon."""

    @property
    def mount(self) -> Any:
        daemon = SimpleNamespace(poll=lambda: self.ended)
        errors = ["a line of the daemon\n"] if self.ended is None else ["its last line\n"]
        return SimpleNamespace(
            path=self.path, group=lambda pid: self.path / str(pid) / "0", daemon=daemon, errors=errors
        )

    def words(self, *properties: str) -> list[str]:
        self.started.append([*properties])
        return [*properties]

    def held(self) -> int:
        return (SERVER_MIB + LOOP_MIB) << 20

    def limit(self, nbytes: int | None) -> None:
        self.limits.append(nbytes)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


@attrs.define
class FakePolicy:
    """What a policy was started with."""

    mount: Path
    name: str
    config: Path
    told: list[tuple[str, str]]
    pid: int = os.getpid()
    logged: str = ""

    def end(self) -> None:
        if self.logged:
            raise AssertionError(self.logged)

    def __enter__(self) -> FakePolicy:
        self.told.append((self.name, self.config.read_text()))
        return self

    def __exit__(self, *_: object) -> None:
        self.told.append((self.name, "ended"))


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(sharing, "PolicyProgram", lambda mount, name, config: FakePolicy(mount, name, config, told))
    return told


def grouped(
    tmp_path: Path, way: sharing.Ggroup, percent: int, ended: int | None = None
) -> tuple[FakeRoom, dict[str, str], list[str]]:
    """What was written for a way: the slice, the limits of both programs, and the other program's command."""
    lab, room = FakePapersLab(), FakeRoom(tmp_path, ended=ended)
    for pid, mib in ((101, SERVER_MIB), (102, LOOP_MIB)):
        (tmp_path / str(pid) / "0").mkdir(parents=True)
        (tmp_path / str(pid) / "0" / "gmem.current").write_text(f"{mib << 20}\n")
        (tmp_path / str(pid) / "0" / "gmem.limit.high").write_text("max\n")
    made = sharing.GgroupHold(room, way, percent)  # type: ignore[arg-type]
    with made.both(lab, ["loop"]) as (server, loop):
        assert (server.pid, loop.pid) == (101, 102)
        limits = {str(pid): (tmp_path / str(pid) / "0" / "gmem.limit.high").read_text().strip() for pid in (101, 102)}
        command = list(lab.running[-1].words)
    assert made.said[-1:] == ["a line of the daemon"]
    return room, limits, command


BUDGET = (SERVER_MIB + LOOP_MIB) * 70 // 100 << 20
NEEDS = (SERVER_MIB << 20) + sharing.SLACK_BYTES


def test_memory_for_both_has_no_limit(tmp_path: Path, policies: list[tuple[str, str]]) -> None:
    room, limits, command = grouped(tmp_path, sharing.Ggroup("ggroupfs"), 100)
    assert (room.limits, limits, policies) == ([], {"101": "max", "102": "max"}, [])
    assert room.started == [["compute.priority=0"], []]
    assert command == ["loop"]


def test_a_static_split_is_one(tmp_path: Path, policies: list[tuple[str, str]]) -> None:
    room, limits, _ = grouped(tmp_path, sharing.Ggroup("s", duty=25), 70)
    assert room.limits == [BUDGET]
    assert limits == {"101": str(NEEDS), "102": str(BUDGET - NEEDS)}
    assert policies == []
    assert room.started == [["compute.priority=0"], ["compute.max=5000 20000"]]


@pytest.mark.parametrize("how", ["dynamic", "cooperative"])
def test_a_policy_has_the_split(tmp_path: Path, policies: list[tuple[str, str]], how: str) -> None:
    room, limits, command = grouped(tmp_path, sharing.Ggroup("s", how), 70)
    assert room.limits == [BUDGET]
    assert limits == {"101": str(NEEDS), "102": "max"}
    (name, config), over = policies
    assert name == how
    assert 'high = "101"\nlow = "102"\nwithin = "/a/b"' in config
    assert over == (how, "ended")
    assert command == (["loop", "--cooperate", str(tmp_path)] if how == "cooperative" else ["loop"])


def test_a_daemon_that_ends_meanwhile_is_no_result(tmp_path: Path, policies: list[tuple[str, str]]) -> None:
    with pytest.raises(Unavailable, match="the daemon ended with -6: its last line"):
        grouped(tmp_path, sharing.Ggroup("s"), 100, ended=-6)


def test_what_a_policy_logs_is_told_and_its_own_end_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, said = tmp_path / "policy.toml", list[str]()
    config.touch()
    for pid, error in ((os.getpid(), None), (1 << 30, "the policy dynamic ended by itself: a line of it")):
        policy = FakePolicy(tmp_path, "dynamic", config, [], pid, "a line of it")
        monkeypatch.setattr(sharing, "PolicyProgram", lambda *_, it=policy: it)
        with (
            contextlib.nullcontext() if error is None else pytest.raises(Unavailable, match=error),
            sharing.policy(tmp_path, "dynamic", config, said),
        ):
            pass
    assert said == ["policy dynamic: a line of it"]


def test_a_program_alone_with_a_part_of_its_memory(tmp_path: Path) -> None:
    lab, room = FakePapersLab(), FakeRoom(tmp_path)
    group = tmp_path / "101" / "0"
    group.mkdir(parents=True)
    (group / "gmem.current").write_text(f"{LOOP_MIB << 20}\n")
    (group / "gmem.limit.high").touch()
    with sharing.AloneHold(room).one(lab, ["loop"], 40) as loop:  # type: ignore[arg-type]
        assert (group / "gmem.limit.high").read_text() == f"{(LOOP_MIB << 20) * 40 // 100}\n"
        assert loop.pid == 101
    run(lab, [cell for cell in pair_cells(lab) if "own" in cell.case or cell.case == {"low": "diffusion"}], tmp_path)
    made = merging.merged(merging.read(tmp_path.glob("*.json")), papers.REFERENCES).runs["pairs"]
    for percent in pairs.OWN:
        cell = made.cell("ggroupfs", {"low": "diffusion", "own": percent})
        assert cell is not None
        assert made.ratios(cell, "steps_per_s") == pytest.approx([percent / 100] * 2, rel=0.1)


def test_turns_have_the_slice_alone(tmp_path: Path, policies: list[tuple[str, str]]) -> None:
    room, limits, _ = grouped(tmp_path, sharing.Ggroup("s", "turns"), 70)
    assert (room.limits, room.waits) == ([BUDGET], [sharing.WAIT_S])
    assert (limits, policies) == ({"101": "max", "102": "max"}, [])


def test_a_server_that_leaves_no_room_is_told(tmp_path: Path, policies: list[tuple[str, str]]) -> None:
    with pytest.raises(Unavailable, match="the server alone has"):
        grouped(tmp_path, sharing.Ggroup("s"), 40)


# Salus


def test_42_models_are_14_of_table_3() -> None:
    jobs = salus.packed()
    assert len(jobs) == 42
    assert len(set(salus.MODELS)) == 14
    assert len({one["seed"] for one in jobs}) == 42
    assert [one["model"] for one in salus.alone()] == list(salus.MODELS)


@pytest.mark.parametrize("seed", range(5))
def test_a_trace_has_the_models_of_table_3_in_minutes(seed: int) -> None:
    jobs = salus.traced(seed)
    assert len(jobs) == 100
    assert {one["model"] for one in jobs} <= set(salus.MODELS)
    assert all(one["iterations"] >= 2 and one["batch"] >= 16 for one in jobs)
    assert max(one["at"] for one in jobs) <= 60
    assert jobs == salus.traced(seed) != salus.traced(seed + 1)


def test_packing_and_the_trace(tmp_path: Path) -> None:
    lab = FakePapersLab()

    @contextlib.contextmanager
    def enter(said: list[str]) -> Iterator[Sequence[str]]:
        yield ["packed"]
        said.append("a line of the daemon")

    run(lab, list(salus.cells(lab, 9, [salus.Way("ggroupfs", enter)], jobs=40)), tmp_path, (0, 1))
    made = merging.merged(merging.read(tmp_path.glob("*.json")), papers.REFERENCES)
    packing, trace = made.runs[salus.PACKING], made.runs[salus.TRACE]
    packed = packing.cell("ggroupfs", {"models": 42})
    assert packed is not None
    assert packed.values("hosted") == [42, 42]
    assert packing.ratios(packed, "hosted") == [42, 42]
    assert packing.parameters["findings"] == [
        f"ggroupfs, models 42, round {number}: a line of the daemon" for number in (0, 1)
    ]
    cell = trace.cell("ggroupfs", {})
    assert cell is not None
    assert max(trace.ratios(cell, "completion_min")) < 0.7
    assert cell.values("finished") == [40, 40]
    assert [one["most"] for one in lab.orders if len(one["jobs"]) == 40].count(1) == 2
    together = [one for one in lab.orders if one["together"]]
    assert all(one["most"] == len(one["jobs"]) == 42 for one in together)


def test_jobs_that_fail_are_not_counted() -> None:
    told = [
        {"at": 0.0, "ended": 60.0, "error": None, "latencies": [0.01]},
        {"at": 0.0, "ended": 6.0, "error": "out of memory", "latencies": []},
        {"at": 30.0, "ended": 120.0, "error": None, "latencies": [0.03]},
    ]
    assert salus.completions(told) == {
        "makespan_min": 2.0,
        "completion_min": 1.25,
        "completion_p95_min": 1.5,
        "finished": 2.0,
    }
    assert salus.latencies(told)["hosted"] == 2
    assert salus.latencies(told)["mean_ms"] == pytest.approx(20)
    with pytest.raises(Unavailable, match="out of memory"):
        salus.latencies(told[1:2])
    with pytest.raises(Unavailable, match="no job"):
        salus.completions(told[1:2])


# Flyt


def test_flyts_tables(tmp_path: Path) -> None:
    lab, gpu = FakePapersLab(), FakeLab()
    gpu.sleep = _both(gpu.sleep, lab)  # type: ignore[method-assign]
    managed = FakeSystem(gpu, "ggroupfs")

    def first(programs: Sequence[Any]) -> None:
        for number, one in enumerate(programs):
            one.share = 1.0 if number == 0 else 0.1

    compared = [FakeSystem(gpu, "time slicing"), FakeSystem(gpu, "ggroupfs", first)]
    chosen = list(flyt.cells(lab, gpu, managed, compared))
    for cell in chosen:
        if cell.system == flyt.NATIVE and cell.case == {"table": 6}:
            native = attrs.evolve(cell, measure=flyt.beside(gpu, FakeSystem(gpu, flyt.NATIVE), 0))
    chosen = [native if cell.system == flyt.NATIVE and cell.case == {"table": 6} else cell for cell in chosen]
    run(lab, chosen, tmp_path, (0,))
    made = merging.merged(merging.read(tmp_path.glob("*.json")), papers.REFERENCES).runs[flyt.NAME]
    assert made.absences == ()
    for others in flyt.OTHERS:
        slow, kept = (made.cell(name, {"table": 6, "others": others}) for name in ("time slicing", "ggroupfs"))
        assert slow is not None
        assert kept is not None
        assert made.ratios(slow, "mean_ms") == [pytest.approx(1 + others, rel=0.05)]
        assert made.ratios(kept, "mean_ms") == [pytest.approx(1, rel=0.05)]
    calls = made.cell("ggroupfs", {"table": 5})
    assert calls is not None
    assert made.ratios(calls, "launch_us") == [pytest.approx(3.0 / 2.8)]
    images = made.cell("native", {"table": 8, "program": "resnet50"})
    assert images is not None
    assert images.values("images_per_s") == [pytest.approx(flyt.BATCH * STEPS, rel=0.05)]


def _both(sleep: Callable[[float], None], other: FakePapersLab) -> Callable[[float], None]:
    def act(seconds: float) -> None:
        sleep(seconds)
        other.sleep(seconds)

    return act


# Flyt's table 7


def test_the_phases_are_those_of_the_table() -> None:
    one, two = actions.phases(1), actions.phases(2)
    assert [phase.row for phase in one] == list(actions.TABLE)
    assert all(actions.LEAST_S <= phase.seconds <= actions.MOST_S for phase in one)
    assert max(phase.load * phase.row.apps for phase in one) < 1 < max(phase.load * phase.row.apps for phase in two)
    assert [round(2 * small.load, 6) for small in one] == [round(large.load, 6) for large in two]
    assert sum(phase.seconds for phase in one) + 15 < actions.SECONDS


def test_a_timeline_is_told_as_the_papers() -> None:
    first, second = actions.TABLE[0], actions.TABLE[2]
    events: list[tuple[float, dict[str, Any]]] = [
        (0.5, {"event": "ready"}),
        (1.0, {"event": "share", "group": "a", "gpu": 0, "share": 0.08, "was": 0.0}),
        (3.0, {"event": "share", "group": "a", "gpu": 0, "share": 0.16, "was": 0.08}),
        (4.0, {"event": "migrate", "group": "a", "gpu": 0, "share": 0.16, "missing": 0.1}),
        (5.0, {"event": "moved", "group": "a", "gpu": 0, "to": 1, "seconds": 0.7}),
        (6.0, {"event": "share", "group": "a", "gpu": 1, "share": 0.16, "was": 0.0}),
        (7.0, {"event": "share", "group": "a", "gpu": 1, "share": 0.08, "was": 0.16}),
    ]
    told = actions.timeline([(0.0, first), (2.0, second)], events, 2)
    assert [(one["at_s"], one["action"], one["apps"], one["shares"]) for one in told] == [
        (0.0, "App ++", 1, [0, 0]),
        (2.0, "App ++", 4, [8, 0]),
        (3.0, "Vertical ++", 4, [16, 0]),
        (4.0, "limit reached", 4, [16, 0]),
        (5.0, "Migrate ++", 4, [0, 0]),
        (7.0, "Vertical --", 4, [0, 8]),
    ]


def test_applications_that_come_and_go(tmp_path: Path) -> None:
    lab = FakePapersLab()
    stages = [FakeStage(lab, actions.REFERENCE, False), FakeStage(lab, actions.OURS, True)]
    run(lab, list(actions.cells(stages, 9)), tmp_path, (0,))
    found = merging.read(tmp_path.glob("*.json"))
    made = merging.merged(found, papers.REFERENCES, more=papers.told).runs[actions.NAME]
    assert made.absences == ()
    for gpus in (1, 2):
        sliced, ours = (made.cell(name, {"gpus": gpus}) for name in (actions.REFERENCE, actions.OURS))
        assert sliced is not None
        assert ours is not None
        assert ours.values("attained") == [1.0]
        assert sliced.values("attained")[0] < 0.5
        assert ours.values("actions")[0] > 0
        assert sliced.values("actions") == [0]
        assert len(made.parameters["timelines"][str(gpus)]) > 4
    requests = [one.rates for stage in stages for one in stage.made]
    assert [len(phase) for phase in requests[0]] == [row.apps for row in actions.TABLE]
    assert requests[:2] == requests[2:], "the same requests for both"
    assert "| Vertical ++ |" in page.timelines(made)


# Gangs


def test_gangs_beside_fillers_and_beside_each_other(tmp_path: Path) -> None:
    lab = FakePapersLab()
    ways = bands(lab)
    run(lab, list(gangs.cells(lab, ways, 4)), tmp_path, (0,))
    made = merging.merged(merging.read(tmp_path.glob("*.json")), papers.REFERENCES).runs[gangs.NAME]
    for name, slower in (("time slicing", 3.0), ("ggroupfs", 1.1)):
        cell = made.cell(name, {"gpus": 4, "beside": "fillers"})
        assert cell is not None
        assert made.ratios(cell, "steps_per_s") == pytest.approx([1 / slower], rel=0.05)
        assert cell.values("worst_ms") == [pytest.approx(100 * slower)]
        assert cell.values("batch_per_s") == [pytest.approx(50)]
    two = made.cell("ggroupfs, turns", {"gpus": 4, "gangs": 2, "memory": gangs.PERCENT})
    assert two is not None
    assert "batch_per_s" not in two.samples[0].figures
    assert [(band.gangs, band.pressed) for way in ways for band in way.bands] == [(1, 100)] * 3 + [(2, gangs.PERCENT)]
    assert {cell.gpus for cell in gangs.cells(lab, ways, 1)} == {gangs.LEAST_GPUS}


# Scale


def test_scale(tmp_path: Path) -> None:
    lab, site = FakePapersLab(), FakeSite(gpus=4)
    run(lab, list(scale.cells(site, 4)), tmp_path, (0,))
    made = merging.merged(merging.read(tmp_path.glob("*.json")), papers.REFERENCES)
    run_, spread = made.runs[scale.NAME], made.runs[scale.SPREAD]
    assert (run_.absences, spread.absences) == ((), ())
    programs, slices = run_.cell("many", {"programs": 200}), run_.cell("many", {"slices": 1000})
    assert programs is not None
    assert slices is not None
    assert programs.values("daemon_percent") == [pytest.approx(100 * (0.001 + 0.0001 * 200))]
    assert slices.values("daemon_percent") == [pytest.approx(100 * (0.001 + 0.0001 * 1008))]
    assert programs.values("write_p99_us") == [400]
    left, balanced = spread.cell("left on one GPU", {"gpus": 4}), spread.cell("ggroupfs balance", {"gpus": 4})
    assert left is not None
    assert balanced is not None
    assert spread.ratios(left, "batch_per_s") == [pytest.approx(0.25, rel=0.05)]
    assert spread.ratios(balanced, "batch_per_s") == [pytest.approx(1, rel=0.05)]
    assert balanced.values("settled_s") == [pytest.approx(7, abs=0.5)]
    assert balanced.values("migrate_ms") == [700]


def test_a_balance_that_never_comes_is_measured_all_the_same(tmp_path: Path) -> None:
    lab, site = FakePapersLab(), FakeSite(gpus=4, balances_s=1e9)
    run(lab, [cell for cell in scale.cells(site, 4) if cell.system == scale.BALANCE], tmp_path, (0,))
    (found,) = merging.read(tmp_path.glob("*.json"))
    assert found.figures["settled_s"] >= scale.BALANCE_S
    assert found.raw["places"] == [0] * 8


# The page


def test_the_record_the_page_and_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    lab = FakePapersLab()
    run(lab, pair_cells(lab), tmp_path, range(5))
    into = tmp_path / "papers.json"
    assert papers.main(["merge", "--out", str(tmp_path), "--into", str(into)]) == 0
    text = into.with_suffix(".md").read_text()
    assert "product aa, programs bb" in text
    assert kept.write_page(record.load(into.read_text()), into) == ["papers-100.svg", "papers-70.svg"]
    assert into.with_suffix(".md").read_text() == text, "all of it is in the record"
    assert "| low diffusion, memory 70, arrivals gamma, duty 25 | ggroupfs, static |" in text
    assert "- time slicing: low=diffusion memory=70 arrivals=gamma: out of memory" in text
    assert "Flyt, table 8a" in text
    assert (tmp_path / "papers-70.svg").exists()
    assert "![70 % of the memory of both](papers-70.svg)" in text
    assert papers.main(["check", str(into), str(into)]) == 0
    assert "0 moved" in capsys.readouterr().out
    slow = record.load(into.read_text())
    runs = slow.runs["pairs"]
    planted = [
        attrs.evolve(
            cell,
            samples=[
                attrs.evolve(
                    one,
                    figures={key: value * (1.15 if key == "ttft_p50_ms" else 1) for key, value in one.figures.items()},
                )
                for one in cell.samples
            ],
        )
        if cell.system == "ggroupfs"
        else cell
        for cell in runs.cells
    ]
    other = record.Record({"pairs": attrs.evolve(runs, cells=planted)})
    report = compare(slow, other)
    assert {(one.system, one.figure) for one in report.moved} == {("ggroupfs", "ttft_p50_ms")}
    assert len(report.moved) == 3, "diffusion with both arrivals, and fine-tuning"
    (tmp_path / "slow.json").write_text(record.dump(other))
    assert papers.main(["check", str(into), str(tmp_path / "slow.json")]) == 1


def test_the_frontier_has_what_nothing_is_better_than() -> None:
    every = {"a": [(0.2, 0.9), (0.5, 0.5)], "b": [(0.3, 0.9), (0.4, 0.4)], "c": [(0.9, 0.1)]}
    assert page.frontier(every) == [("b", 0.3, 0.9), ("a", 0.5, 0.5), ("c", 0.9, 0.1)]
    assert page.point({"steps_per_s": 2.0, "attained": 0.9}, 4.0) == (0.5, 0.9)
    assert page.point({"steps_per_s": 2.0}, 4.0) is None


def test_the_plan_of_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--scenario", "pairs", "--cell", "low=diffusion", "--rounds", "2", "--out", str(tmp_path)]
    assert papers.main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("pairs--exclusive--low=diffusion round 2") for line in lines)
    assert lines[-1].endswith("min)")
    assert papers.main(["plan", "--scenario", "scale", "--rounds", "0", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    name = "scale-gangs--ggroupfs--gpus=4--beside=fillers"
    assert f"left out: {name}: it needs 4 GPUs, and there is 1" in lines
    assert not any(line.endswith(f"{name} round 0") for line in lines)
    assert papers.main(["plan", "--scenario", "scale", "--rounds", "0", "--gpus", "4", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f"{name} round 0") for line in lines)
    assert not any(line.startswith("left out") for line in lines)
    assert papers.rounds("3") == [3]
    assert papers.rounds("1-3") == [1, 2, 3]
    with pytest.raises(ValueError, match="no range"):
        papers.rounds("3-1")


def test_a_scenario_that_was_mended_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    counted = Counted(FakePapersLab())
    one, other = counted.cell("a"), attrs.evolve(counted.cell("b"), scenario="t")
    digests = {"s": "1", "t": "1"}

    def more(cell: Cell) -> dict[str, Any]:
        return {"programs": digests[cell.scenario]}

    run(counted.lab, [one, other], tmp_path, (0,), more=more)
    digests["t"] = "2"
    run(counted.lab, [one, other], tmp_path, (0,), more=more)
    assert counted.order == ["a0", "b0", "b0"]
    made = merging.merged(merging.read(tmp_path.glob("*.json")), {"s": "a", "t": "b"})
    assert [run.on["programs"] for run in made.runs.values()] == ["1", "2"]
    lines = list(cells.plan([one, other], (0, 1), tmp_path, {"product": "aa"}, more))
    assert [line.split()[4:] for line in lines[:-1]] == [["t--b", "round", "1"], ["s--a", "round", "1"]], "of any GPU"


# Programs, as the lab starts and ends them: stubs that speak by the page, without torch

STUB = """
import json, sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from page import GO, OVER, PASSES, READY, WRONG, Page, whole
page, number = Page(sys.argv[1]), 0
if {dies!r}:
    sys.exit("out of memory")
page.set64(READY, 1)
while not page.stop:
    page.set64(PASSES, page.u64(PASSES) + 1)
    if {serves!r} and page.u32(GO) != number:
        number = page.u32(GO)
        folder = Path(sys.argv[2])
        order = json.loads((folder / f"{{number}}.json").read_text())
        told = [dict(one, ttft_s=0.5, itl_s=[0.25]) for one in order.get("requests", order.get("jobs"))]
        whole(folder / f"{{number}}.result.json", json.dumps(told))
        page.set32(OVER, number)
    time.sleep(0.005)
page.set64(WRONG, {wrong})
sys.exit(int({wrong} != 0))
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, more in {
        "llm": {"serves": True},
        "nursery": {"serves": True},
        "diffusion": {},
        "zoo": {"dies": True},
        "finetune": {"wrong": 7},
    }.items():
        words = {"folder": str(lab_module.PROGRAMS), "dies": False, "serves": False, "wrong": 0, **more}
        (tmp_path / f"{name}.py").write_text(STUB.format(**words))
    monkeypatch.setattr(lab_module, "PROGRAMS", tmp_path)
    return tmp_path


def test_a_server_and_a_loop(stubs: Path) -> None:
    lab = lab_module.PapersLab("cpu")
    with lab.both([], [], ["diffusion", "--batch", "1"]) as (server, loop):
        for count in (2, 3):
            answers = server.serve(planned("gamma", count, 1.0, 1), 5.0, 1)
            assert [(one.ttft_ms, list(one.itl_ms)) for one in answers] == [(500.0, [250.0])] * count
        before, until = loop.passes, lab.now() + 30
        while loop.passes == before:
            assert lab.now() < until
            lab.sleep(0.01)
        loop.finish()
        assert loop.ended
    with lab.nursery([]) as nursery:
        assert len(nursery.serve({"jobs": [{"at": 0.0}]}, 5.0)) == 1


def test_a_loop_that_is_wrong_or_ends(stubs: Path) -> None:
    lab = lab_module.PapersLab("cpu")
    with lab.loops([([], ["finetune"])]) as (loop,), pytest.raises(RuntimeError, match="wrong"):
        loop.finish()
    with (
        pytest.raises(Unavailable, match="the program ended: out of memory"),
        lab.loops([([], ["zoo", "vae", "infer"])]),
    ):
        pass


def test_a_server_that_ends_in_a_round_is_told(stubs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_module.json, "dumps", lambda _: "no JSON")
    ended = pytest.raises(Unavailable, match="the program ended: json")
    with lab_module.PapersLab("cpu").server([]) as server, ended:
        server.serve(planned("gamma", 2, 1.0, 1), 5.0, 1)


def test_small_shapes_come_last_so_that_they_hold(stubs: Path) -> None:
    with lab_module.PapersLab("cpu", small=True).loops([([], pairs.LOWS["diffusion"])]) as (loop,):
        words = loop.run.process.args
    assert isinstance(words, list)
    assert [words[number + 1] for number, word in enumerate(words) if word == "--shape"] == ["sdxl", "small"]
    assert words[-2:] == ["--device", "cpu"]
