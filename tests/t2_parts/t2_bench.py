"""The scenarios of the comparison on a fake GPU in virtual time, and how they are run."""

from __future__ import annotations

import argparse
import errno
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest

from backend.nvidia.gpu import POLL
from tests.bench import __main__ as bench
from tests.bench.core import record
from tests.bench.core.check import compare
from tests.bench.core.record import Absence, Case, Figures, Record, Run
from tests.bench.core.runner import Scenario, Subject, Unavailable, run
from tests.bench.gpu.faces import Carried, Part
from tests.bench.gpu.lab import GpuLab, carried
from tests.bench.gpu.scenarios import (
    SCENARIOS,
    bandwidth,
    critical,
    fairness,
    latency,
    levers,
    oversubscribed,
    pareto,
    policies,
    pressure,
)
from tests.bench.gpu.systems import LIMIT_AGAIN_S, LIMIT_S, Mps, SliceRoom
from tests.bench.page import documents
from tests.bench.page.sections import SECTIONS
from tests.support.fake_bench import PASSES, PRODUCTS, SERVICE_S, FakeLab, FakeProgram, FakeRooms, FakeSystem

HOUR = 3600.0


def measured(lab: FakeLab, scenario: Scenario, repetitions: int = 2) -> Run:
    """Run a scenario to its end."""
    found = run(scenario, {}, repetitions=repetitions, budget=HOUR, clock=lab.now)
    assert not lab.programs, "something still runs"
    return found


def values(run: Run, system: str, case: Case, figure: str) -> list[float]:
    cell = run.cell(system, case)
    assert cell is not None, (system, case, [(one.system, one.case) for one in run.cells])
    return cell.values(figure)


# How scenarios are run


@attrs.define
class Timed:
    """A system that takes some time for each of its cases."""

    name: str
    lab: FakeLab
    order: list[str]
    takes: float = 1.0
    cases: Sequence[Case] = ({},)
    fails: Exception | None = None

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        self.order.append(f"{self.name}{repetition}")
        for case in self.cases:
            self.lab.sleep(self.takes)
            yield case, {"p99_ms": self.takes}
        if self.fails is not None:
            raise self.fails


def subjects(lab: FakeLab, **changes: object) -> tuple[list[Subject], list[str]]:
    order: list[str] = []
    made: list[Subject] = [Timed(name, lab, order) for name in "abc"]
    return [attrs.evolve(one, **changes) if one.name == "b" else one for one in made], order  # type: ignore[misc]


def test_systems_take_turns_and_another_one_begins_each_time() -> None:
    lab = FakeLab()
    found, order = subjects(lab)
    result = run(Scenario("s", "a", found), {}, repetitions=3, budget=HOUR, clock=lab.now)
    assert order == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]
    assert [(cell.system, [(s.repetition, s.at) for s in cell.samples]) for cell in result.cells] == [
        ("a", [(0, 1.0), (1, 6.0), (2, 8.0)]),
        ("b", [(0, 2.0), (1, 4.0), (2, 9.0)]),
        ("c", [(0, 3.0), (1, 5.0), (2, 7.0)]),
    ]
    assert result.seconds == 9


def test_nothing_is_begun_that_would_not_end_within_the_budget() -> None:
    """After 6 s of 12, b, which takes 4, is reported to have had no time; the others go on."""
    lab = FakeLab()
    found, order = subjects(lab, takes=4.0)
    result = run(Scenario("s", "a", found), {}, repetitions=9, budget=9.5, clock=lab.now)
    assert lab.now() <= 9.5
    assert order[:3] == ["a0", "b0", "c0"]
    assert order.count("b1") == 0
    assert Absence("b", "no time was left for repetition 2") in result.absences
    assert all(len(cell.samples) > 1 for cell in result.cells if cell.system != "b")


def test_a_repetition_has_its_reference() -> None:
    """The other systems may leave no time for the reference in the end, and would have nothing to be compared with."""
    for tenths in range(1, 80):
        lab = FakeLab()
        found, _ = subjects(lab, takes=2.0)
        result = run(Scenario("s", "a", found), {}, repetitions=3, budget=tenths / 5 + 4, clock=lab.now)
        assert lab.now() <= tenths / 5 + 4
        reference, *others = [{sample.repetition for sample in cell.samples} for cell in result.cells]
        assert all(one <= reference for one in others)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Unavailable("there is no daemon"), "there is no daemon"), (KeyError("x"), "failed: KeyError: 'x'")],
)
def test_a_system_that_cannot_be_measured_is_named_once_and_others_go_on(error: Exception, reason: str) -> None:
    lab = FakeLab()
    found, order = subjects(lab, fails=error)
    result = run(Scenario("s", "a", found), {}, repetitions=3, budget=HOUR, clock=lab.now)
    assert result.absences == (Absence("b", reason),)
    assert order == ["a0", "b0", "c0", "c1", "a1", "c2", "a2"]
    assert {cell.system: len(cell.samples) for cell in result.cells} == {"a": 3, "b": 1, "c": 3}


def test_what_there_is_is_saved_after_every_system() -> None:
    lab, saved = FakeLab(), list[Run]()
    found, _ = subjects(lab)
    scenario = Scenario("s", "a", found, lambda: {"service_ms": 2}, {"seed": 1})
    last = run(scenario, {"cpus": 2}, repetitions=2, budget=HOUR, clock=lab.now, save=saved.append)
    assert [sum(len(cell.samples) for cell in one.cells) for one in saved] == [1, 2, 3, 4, 5, 6]
    assert saved[-1] == last
    assert last.parameters == {"seed": 1, "service_ms": 2, "repetitions": 2, "budget_s": HOUR}


# Latency


def first(programs: Sequence[FakeProgram]) -> None:
    """Give the critical program all of the GPU; the others share the rest."""
    others = [one for one in programs if not one.critical]
    for one in programs:
        one.share = 1.0 if one.critical else 0.6 / len(others)


def systems(lab: FakeLab) -> list[FakeSystem]:
    return [FakeSystem(lab, "time slicing"), FakeSystem(lab, "ggroupfs", first)]


def test_latency_beside_others() -> None:
    lab = FakeLab()
    compared = systems(lab)
    found = measured(lab, latency.maker("decode")(lab, 9, compared))
    assert found.parameters["service_ms"] == pytest.approx(1e3 * SERVICE_S)
    assert found.absences == ()
    cases = [{"load": load, "batch": batch} for batch in latency.OTHERS for load in latency.LOADS]
    assert [cell.case for cell in found.cells if cell.system == "ggroupfs"] == cases
    assert [cell.case for cell in found.cells if cell.system == "exclusive"] == [
        *({"load": load} for load in latency.LOADS),
        {},
    ]
    for case in cases:
        alone = {"load": case["load"]}
        for figure in ("p50_ms", "p99_ms", "requests"):
            assert values(found, "ggroupfs", case, figure) == values(found, "exclusive", alone, figure)
        assert min(values(found, "time slicing", case, "p50_ms")) >= 1e3 * SERVICE_S * (1 + int(case["batch"])) * 0.999
        assert values(found, "ggroupfs", case, "batch_per_s") == [pytest.approx(0.6 * PRODUCTS, rel=0.02)] * 2
        assert values(found, "ggroupfs", case, "given_up") == [0, 0]
    assert values(found, "exclusive", {}, "batch_per_s") == [pytest.approx(PRODUCTS, rel=0.01)] * 2
    beside = values(found, "time slicing", {"load": 0.1, "batch": 3}, "batch_per_s")
    assert beside == [pytest.approx(0.75 * PRODUCTS, rel=0.02)] * 2


def test_every_system_serves_the_same_requests_and_each_repetition_others() -> None:
    lab = FakeLab()
    measured(lab, latency.maker("convolution")(lab, 9, systems(lab)), repetitions=3)
    served = [one.bursts for one in lab.started if one.critical][1:]  # the first burst was for calibration
    loads = len(latency.LOADS)
    by_length = {len(bursts) for bursts in served}
    assert by_length == {loads, 2 * loads}, "alone once, and beside one and three"
    for bursts in served:
        assert bursts[:loads] == bursts[loads:] or len(bursts) == loads
    assert len({tuple(bursts[:loads]) for bursts in served}) == 3, "repetitions"
    assert [len(burst) for burst in served[0]] == [round(load / SERVICE_S * latency.SECONDS) for load in latency.LOADS]


def test_who_is_overloaded_gives_up_in_time() -> None:
    """With three other programs it has a quarter of the GPU, and needs 0.8."""
    lab = FakeLab()
    found = measured(lab, latency.maker("decode")(lab, 9, systems(lab)), repetitions=1)
    case: Case = {"load": 0.8, "batch": 3}
    assert values(found, "time slicing", case, "given_up")[0] > 100
    assert values(found, "time slicing", case, "p99_ms")[0] <= 1e3 * 2 * latency.SECONDS


def test_programs_are_started_by_the_system_and_shared_when_they_work() -> None:
    lab = FakeLab()
    compared = systems(lab)
    measured(lab, latency.maker("decode")(lab, 9, compared), repetitions=1)
    (stage,) = compared[1].stages
    started = [one for one in lab.started if one.words and one.words[0] == "ggroupfs"]
    assert [one.words[1] for one in started] == ["critical", "batch", "batch", "batch"]
    pids = [one.pid for one in started]
    assert stage.shared == [pids[:2], pids]
    assert len(stage.reports) == sum(len(burst) for burst in started[0].bursts)
    assert all(one.words == [] for one in lab.started if one not in started and "time slicing" not in one.words)


def test_an_mps_that_is_not_there_is_named() -> None:
    lab = FakeLab()
    compared = [FakeSystem(lab, "MPS", refuses="there is no nvidia-cuda-mps-control"), *systems(lab)]
    found = measured(lab, latency.maker("decode")(lab, 9, compared), repetitions=1)
    assert found.absences == (Absence("MPS", "there is no nvidia-cuda-mps-control"),)
    assert {cell.system for cell in found.cells} == {"exclusive", "time slicing", "ggroupfs"}


# The curve


def curves(lab: FakeLab) -> list[FakeSystem]:
    return [FakeSystem(lab, "time slicing"), FakeSystem(lab, "set", first)]


def test_the_curve() -> None:
    lab = FakeLab()
    plain, set_by_us = curves(lab)
    points = [pareto.Point(2.0), pareto.Point(0.2), pareto.Point(0.2, 70)]

    def compared(curve: pareto.Curve) -> list[pareto.Points]:
        return [pareto.Points(curve, plain), pareto.Points(curve, set_by_us, points, warm=2)]

    found = measured(lab, pareto.make(lab, 9, compared))
    alone = values(found, "exclusive", {}, "attained")
    assert min(alone) >= 0.99, "the SLO is the p99"
    assert values(found, "exclusive", {}, "passes_per_s") == [pytest.approx(PASSES, rel=0.01)] * 2
    for point in points:
        assert values(found, "set", point.case, "attained") == alone
        assert values(found, "set", point.case, "passes_per_s") == [pytest.approx(0.6 * PASSES, rel=0.02)] * 2
    assert [dict(point.case) for point in points] == [
        {"timeslice_ms": 2.0},
        {"timeslice_ms": 0.2},
        {"timeslice_ms": 0.2, "limit_percent": 70},
    ]
    assert max(values(found, "time slicing", {}, "attained")) < 0.9
    bursts = {one.words[0]: len(one.bursts) for one in lab.started if one.critical and one.words}
    assert bursts == {"time slicing": 1, "set": 5}, "two of them to warm up"
    limit = str((pareto.MIB + lab.context_mib()) * 70 // 100 << 20)
    once = [("compute.timeslice", "10"), ("compute.timeslice", "2"), ("compute.timeslice", "10")]
    once += [("compute.timeslice", "0.2"), ("gmem.limit.high", limit)]
    assert lab.writes == 2 * [("set", *write) for write in once]


def test_a_curve_that_needs_no_limit_is_measured_without_one() -> None:
    lab = FakeLab()
    system = FakeSystem(lab, "time slicing")
    measured(lab, pareto.make(lab, 9, lambda curve: [pareto.Points(curve, system)]), repetitions=1)
    assert lab.writes == []


def test_the_points_of_ggroupfs_are_distinct() -> None:
    lab = FakeLab()
    for one in pareto.curves(pareto.Curve(lab, "decode", 9)):
        cases = [tuple(point.case.items()) for point in one.points]
        assert len(set(cases)) == len(cases), one.name


# Pressure


def test_memory_pressure() -> None:
    lab = FakeLab()
    plain, limited = FakeSystem(lab, "all of it resident"), FakeSystem(lab, "ggroupfs")
    managed = FakeSystem(lab, "unified memory, page faults")
    compared = [
        pressure.Pressed(lab, plain),
        pressure.Pressed(lab, limited, part=pressure.LIMITED),
        pressure.Pressed(lab, managed, ["managed", "BUDGET", "faults"]),
    ]
    found = measured(lab, pressure.make(lab, 9, compared), repetitions=1)
    for system in (plain, limited, managed):
        for percent in pressure.PERCENTS:
            done = values(found, system.name, {"percent": percent}, "passes_per_s")
            assert done == [pytest.approx(PASSES, rel=0.05)]
            cell = found.cell(system.name, {"percent": percent})
            assert cell is not None
            assert [round(one) for one in cell.values("settled_s")] == ([6] if system is limited else [])
    assert {one.words[0]: one.words[3] for one in lab.started} == {
        "all of it resident": "",
        "ggroupfs": "16G",
        "unified memory, page faults": "",
    }
    options = [one.options for one in lab.started if one.words[0].startswith("unified")]
    budget = str(pressure.BUDGET_MIB - lab.context_mib())
    sizes = [str((16 << 10) * percent // 100) for percent in (120, 150, 200)]
    assert options == [[size, "managed", budget, "faults"] for size in sizes]


@pytest.mark.parametrize("rate", [0.2, 0.9, 5.0, 400.0, 100_000.0])
def test_the_speed_of_any_program_is_found_in_time(rate: float) -> None:
    """For slow programs the time of the last passes counts, 7 of the short kind to 1 of the long one."""
    lab = FakeLab()
    with lab.elastic([], 1, 1) as program:
        program.per_second = rate
        speed = pressure.speed(lab, program)
    assert lab.now() < 30
    expected = 8 / (7 / rate + 3 / rate) if rate < 0.9 else rate
    assert speed == pytest.approx(expected, rel=0.25 if rate == 0.9 else 0.1)


@pytest.mark.parametrize(("until", "seconds"), [(0, 6), (13, 18), (1000, 42)])
def test_a_limited_program_is_measured_once_it_gets_no_faster(until: float, seconds: float) -> None:
    """It gets twice as fast every 6 s up to `until`; the scenario waits for 42 s at most."""
    lab = FakeLab()
    with lab.elastic([], 1, 1) as program:
        start, per_second = lab.now(), program.per_second

        class Warming:
            @property
            def passes(self) -> int:
                elapsed = min(lab.now() - start, until)
                program.per_second = per_second * 2 ** (elapsed // 6)
                return program.passes

        assert pressure.settled(lab, Warming()) == pytest.approx(seconds)  # type: ignore[arg-type]


def test_a_program_that_is_stuck_is_given_up() -> None:
    lab = FakeLab()
    with lab.elastic([], 1, 1) as program:
        program.per_second = 1e-9
        with pytest.raises(TimeoutError, match="within 90 s"):
            pressure.speed(lab, program)


def test_a_program_that_dies_of_a_limit_says_where() -> None:
    lab = FakeLab()
    lab.most_mib = 20 << 10
    compared = [pressure.Pressed(lab, FakeSystem(lab, "MPS"))]
    found = measured(lab, pressure.make(lab, 9, compared))
    assert [cell.case for cell in found.cells] == [{"percent": 120}]
    assert found.absences == (Absence("MPS", "at 150 % of the budget the program ended: out of memory"),)


# More memory than there is room for


def turned(lab: FakeLab, mixes: Sequence[oversubscribed.Mix], told: Mapping[str, int] | None = None) -> list[Subject]:
    """Compare time slicing, turns that keep nine tenths of the speed, and no turns, which keep a fiftieth."""
    return [
        oversubscribed.Bench(lab, mixes, FakeRooms(lab, oversubscribed.DRIVER), pressed=False),
        oversubscribed.Bench(lab, mixes, FakeRooms(lab, oversubscribed.TURNS, 0.9, told or {})),
        oversubscribed.Bench(lab, mixes, FakeRooms(lab, oversubscribed.OFF, 0.02), takes_turns=False),
    ]


def test_what_is_left_where_there_is_less_memory() -> None:
    lab = FakeLab()
    mixes = oversubscribed.decoding()
    told = {"working_set": 1000, "turn_missed_bytes": 30, "turn_over_bytes": 50}
    compared = turned(lab, mixes, told)
    found = measured(lab, oversubscribed.maker("oversubscribed-decode", mixes)(lab, 9, compared), repetitions=1)
    assert found.parameters["bus_in_gb_s"] == 56.0
    assert found.parameters["bus_both_in_gb_s"] == 46.0
    case = {"mix": "decode", "programs": 4, "graphs": 1}
    assert values(found, oversubscribed.DRIVER, case, "passes_per_s") == [pytest.approx(PASSES, rel=0.01)]
    pressed = {**case, "percent": 300, "turn_s": 0.5}
    assert values(found, oversubscribed.TURNS, pressed, "kept") == [pytest.approx(0.9, abs=0.01)]
    assert values(found, oversubscribed.TURNS, pressed, "least_kept") == [pytest.approx(0.9, abs=0.01)]
    assert values(found, oversubscribed.TURNS, pressed, "written_part") == [pytest.approx(0.03, abs=0.005)]
    assert values(found, oversubscribed.TURNS, pressed, "missed_part") == [0.03]
    assert values(found, oversubscribed.TURNS, pressed, "over_part") == [0.05]
    assert values(found, oversubscribed.OFF, pressed, "kept") == [pytest.approx(0.02, abs=0.005)]
    assert [cell.case["turn_s"] for cell in found.cells if "turn_s" in cell.case].count(1.0) == 4
    assert found.cell(
        oversubscribed.TURNS, {"mix": "decode", "programs": 8, "graphs": 1, "percent": 283, "turn_s": 0.5}
    )
    assert not [cell for cell in found.cells if cell.system == oversubscribed.DRIVER and "percent" in cell.case]


def test_requests_beside_programs_with_less_memory() -> None:
    lab = FakeLab()
    rooms = [FakeRooms(lab, oversubscribed.DRIVER), FakeRooms(lab, oversubscribed.TURNS, 0.9)]
    found = measured(lab, critical.make(lab, 9, [*rooms, FakeRooms(lab, oversubscribed.OFF, 0.02)]), repetitions=1)
    first = [one for one in lab.started if one.critical][1:]
    assert [one.words for one in first] == [["compute.priority=0"]] * 3
    case = {"percent": critical.PERCENT}
    (p99,), (alone,) = (values(found, oversubscribed.TURNS, one, "p99_ms") for one in (case, {}))
    assert p99 >= alone
    (turned,) = values(found, oversubscribed.TURNS, case, "passes_per_s")
    (without,) = values(found, oversubscribed.OFF, case, "passes_per_s")
    assert turned > 5 * without
    assert rooms[1].rooms[0].limits == [(40 << 30) * 100 // critical.PERCENT, None]


def test_what_has_no_turns_has_none_of_a_second() -> None:
    driver, turns, off = oversubscribed.subjects(FakeLab(), oversubscribed.science())
    assert [one.turn_s for one in turns.mixes[0].pressures] == [0.5, 0.5, 0.5, 1.0]
    assert [one.percent for one in off.mixes[0].pressures] == [150, 200, 300]
    assert not driver.pressed


def test_the_room_is_a_part_of_what_programs_hold() -> None:
    lab = FakeLab()
    mixes = oversubscribed.science()
    compared = turned(lab, mixes)
    measured(lab, oversubscribed.maker("oversubscribed-science", mixes)(lab, 9, compared), repetitions=1)
    assert isinstance(compared[1], oversubscribed.Bench)
    rooms = compared[1].rooms
    assert isinstance(rooms, FakeRooms)
    (room,) = rooms.rooms
    each = [room.held_bytes * 100 // percent for percent in (150, 200, 300, 300)]
    assert room.limits == [*each, None], "and all at last"
    assert room.waits == [2.0, 1.8, 2.5, 4.0]


def test_single_cells() -> None:
    lab = FakeLab()
    lab.cells = {"percent": 200, "graphs": 0}
    mixes = oversubscribed.decoding()
    scenario = oversubscribed.maker("oversubscribed-decode", mixes)(lab, 9, turned(lab, mixes))
    found = measured(lab, scenario, repetitions=1)
    assert {(cell.case["graphs"], cell.case.get("percent")) for cell in found.cells} == {(0, None), (0, 200)}


def test_a_cell_is_measured_as_soon_as_it_has_settled() -> None:
    """A session that is cut loses one cell at most, and so much time."""
    lab = FakeLab()
    mixes = [*oversubscribed.decoding(), *oversubscribed.mixed()]
    scenario = oversubscribed.maker("oversubscribed-decode", mixes)(lab, 9, turned(lab, mixes))
    found = measured(lab, scenario, repetitions=1)
    ends = [sample.at for cell in found.cells for sample in cell.samples]
    most = oversubscribed.FIRST_SETTLE_S + oversubscribed.SLOW_S + 2 * oversubscribed.ROUND_S
    assert max(later - earlier for earlier, later in itertools.pairwise(sorted(ends))) <= most


def test_programs_that_compute_wrong_are_no_result() -> None:
    lab = FakeLab()
    lab.wrong = "gather"
    mixes = oversubscribed.science()
    scenario = oversubscribed.maker("oversubscribed-science", mixes)(lab, 9, turned(lab, mixes))
    found = measured(lab, scenario, repetitions=1)
    assert [one.reason for one in found.absences] == [
        "failed: RuntimeError: what it computed is wrong: so it said" for _ in range(3)
    ]


def test_a_log_tells_what_was_moved() -> None:
    log = """ggroup: device 0: 64 MiB were clean
ggroup: gpu 0: asked to move 256 MiB, moved 256 MiB in 5000 us
ggroup: gpu 0: asked to prepare 128 MiB, moved 100 MiB in 2500 us
ggroup: gpu 0: asked to move 64 MiB, moved 0 MiB in 3 us
"""
    assert carried(log) == Carried(256 << 20, 64 << 20, 0.005003, 100 << 20, 0.0025)


def test_a_scenario_by_the_beginning_of_its_name() -> None:
    options = argparse.Namespace(only=["oversubscribed", "levers"])
    assert bench.chosen(options, SCENARIOS) == [
        *(f"oversubscribed-{name}" for name in ("critical", "decode", "inference", "mixed", "science")),
        "levers",
    ]
    options.only = []
    assert bench.chosen(options, SCENARIOS) == [name for name in SCENARIOS if not name.startswith("oversubscribed")]
    options.only = ["over"]
    with pytest.raises(SystemExit, match="no scenario over"):
        bench.chosen(options, SCENARIOS)
    options.cell = ["percent=300", "mix=decode"]
    assert bench.cells(options) == {"percent": "300", "mix": "decode"}
    lab = GpuLab(bench.cells(options))
    assert lab.wants({"percent": 300, "mix": "decode", "turn_s": 0.5})
    assert not lab.wants({"percent": 200, "mix": "decode"})
    options.cell = ["percent"]
    with pytest.raises(SystemExit, match="KEY=VALUE"):
        bench.cells(options)


# The others


def test_levers() -> None:
    lab = FakeLab()
    lab.costs = {"compute.freeze": 0.002, "compute.timeslice": 0.001, "gmem.peak": 0.0005}
    found = measured(lab, levers.make(lab, 9, FakeSystem(lab, "ggroupfs")))
    assert found.parameters["seed"] == 9, "a record says what is needed to do it again"
    p50 = {str(cell.case.get("lever")): cell.values("p50_ms") for cell in found.cells}
    assert p50 == {
        "None": [pytest.approx(0.5)] * 2,
        "appears in the tree": [pytest.approx(50)] * 2,
        "freeze": [pytest.approx(2)] * 2,
        "thaw": [pytest.approx(2)] * 2,
        "timeslice": [pytest.approx(1)] * 2,
    }
    frozen = [value for _, name, value in lab.writes if name == "compute.freeze"]
    assert frozen == ["1", "0"] * (2 * levers.TIMES), "and thawed in the end"


def test_a_program_may_appear_before_it_is_ready() -> None:
    lab = FakeLab()
    lab.appears = lab.prepares / 4
    found = measured(lab, levers.make(lab, 9, FakeSystem(lab, "ggroupfs")))
    appeared = values(found, "ggroupfs", {"lever": "appears in the tree"}, "p50_ms")
    assert appeared == [pytest.approx(1e3 * lab.appears)] * 2


@pytest.mark.parametrize("seed", range(20))
def test_programs_begin_at_any_time_between_two_looks(seed: int) -> None:
    """This holds however long one look takes; otherwise the time until they appear would be that of a single moment,
    which differs from run to run. (The first program begins whenever the mount is there.)
    """
    lab = FakeLab()
    lab.looks = POLL
    found = measured(lab, levers.make(lab, seed, FakeSystem(lab, "ggroupfs")), repetitions=3)
    middle = values(found, "ggroupfs", {"lever": "appears in the tree"}, "p50_ms")
    assert middle == [pytest.approx(1e3 * POLL / 2, rel=0.34)] * 3
    worst = values(found, "ggroupfs", {"lever": "appears in the tree"}, "worst_ms")
    assert worst == [pytest.approx(1e3 * POLL, rel=0.17)] * 3
    begun = sorted(one.created % POLL for one in lab.started)
    assert begun[0] < POLL / 4
    assert begun[-1] > POLL * 3 / 4
    assert max(later - earlier for earlier, later in itertools.pairwise(begun)) < POLL / 3


def test_a_lever_beside_strangers_is_left_out() -> None:
    """It is also counted; if no measurement is left, the scenario says so."""
    lab = FakeLab()
    lab.costs = {"gmem.peak": 0.5}
    lab.visits = [(1.2, 1.7), (40.1, 40.2)]
    found = measured(lab, levers.make(lab, 9, FakeSystem(lab, "ggroupfs")))
    (booked,) = (cell for cell in found.cells if cell.system == levers.BOOKED)
    assert booked.values("disturbed") == [3, 0]
    assert booked.values("p50_ms") == [pytest.approx(500)] * 2
    lab.visits = [(0, lab.time * 2)]
    found = measured(lab, levers.make(lab, 9, FakeSystem(lab, "ggroupfs")))
    assert {one.reason for one in found.absences} == {"strangers were on the GPU all the time"}
    assert not found.cells


def by_weight(programs: Sequence[FakeProgram]) -> None:
    total = sum(int(one.words[2]) for one in programs)
    for one in programs:
        one.share = int(one.words[2]) / total


def test_fairness() -> None:
    lab = FakeLab()
    compared = [FakeSystem(lab, "time slicing"), FakeSystem(lab, "ggroupfs", by_weight)]
    found = measured(lab, fairness.make(lab, 9, compared))
    case = {"weights": "100:200:400"}
    assert values(found, "ggroupfs", case, "unfairness") == [pytest.approx(0, abs=0.01)] * 2
    assert values(found, "time slicing", case, "unfairness") == [pytest.approx(4 / 3, abs=0.01)] * 2, "1/3, not 1/7"
    assert values(found, "ggroupfs", case, "batch_per_s") == [pytest.approx(PRODUCTS, rel=0.01)] * 2


def test_unfairness_of_nothing() -> None:
    with pytest.raises(ValueError, match="nobody"):
        fairness.unfairness([0, 0], [1, 1])


def test_bandwidth() -> None:
    lab = FakeLab()
    found = measured(lab, bandwidth.make(lab, 9, FakeSystem(lab, "ggroupfs")))
    assert {cell.system: cell.samples[0].figures for cell in found.cells} == {
        "cudaMemcpy, pinned": {"out_gb_s": 55.0, "in_gb_s": 56.0},
        "unified memory, prefetch": {"out_gb_s": 4.0, "in_gb_s": 50.0},
        "ggroupfs": {"out_gb_s": 40.0, "in_gb_s": 48.0},
    }
    limits = [value for _, _, value in lab.writes]
    assert limits == [str(4 << 30), "max"] * (2 * bandwidth.TIMES)


def test_policies() -> None:
    lab = FakeLab()
    found = measured(lab, policies.make(lab, 9))
    assert {cell.system: cell.values("batch_per_s") for cell in found.cells} == {
        "ggroupfs, static split": [10, 10],
        "ggroupfs, dynamic": [20, 20],
        "ggroupfs, cooperative": [30, 30],
    }


def test_every_scenario_names_a_reference_that_it_measures_and_no_system_twice() -> None:
    for name, entry in SCENARIOS.items():
        scenario = entry.make(FakeLab(), 9)
        names = [one.name for one in scenario.subjects]
        assert scenario.name == name
        assert scenario.reference == names[0]
        assert len(set(names)) == len(names), names


def test_a_page_and_a_check_of_all_of_it(tmp_path: Path) -> None:
    """The steps are those on a GPU: measure, write, read, render with plots, and compare the record with itself."""
    lab = FakeLab()
    compared = systems(lab)
    scenarios = [
        *(latency.maker(kind)(lab, 9, compared) for kind in ("decode", "convolution")),
        pareto.make(lab, 9, lambda curve: [pareto.Points(curve, one) for one in compared]),
        pressure.make(lab, 9, [pressure.Pressed(lab, FakeSystem(lab, pressure.RESIDENT)), *pressed(lab, compared)]),
        levers.make(lab, 9, FakeSystem(lab, "ggroupfs")),
        fairness.make(lab, 9, compared),
        bandwidth.make(lab, 9, FakeSystem(lab, "ggroupfs")),
        policies.make(lab, 9),
        critical.make(
            lab, 9, [FakeRooms(lab, one) for one in (oversubscribed.DRIVER, oversubscribed.TURNS, oversubscribed.OFF)]
        ),
        *(
            oversubscribed.maker(f"oversubscribed-{name}", mixes)(lab, 9, turned(lab, mixes))
            for name, mixes in (
                ("decode", oversubscribed.decoding()),
                ("inference", oversubscribed.inference()),
                ("mixed", oversubscribed.mixed()),
                ("science", oversubscribed.science()),
            )
        ),
    ]
    assert {one.name for one in scenarios} == set(SCENARIOS)
    found = record.load(record.dump(Record({one.name: measured(lab, one) for one in scenarios})))
    pytest.importorskip("matplotlib")
    (tmp_path / documents.FOLDER).mkdir()
    files = {path.name for path in documents.render(found, tmp_path)}
    drawn = ["latency-decode", "latency-convolution", "pareto", "pressure"]
    drawn += [name for name in SCENARIOS if name.startswith("oversubscribed") and name != critical.NAME]
    assert files == {"README.md", *(f"{name}.svg" for name in drawn)}
    text = (tmp_path / documents.FOLDER / "README.md").read_text()
    for name in SCENARIOS:
        assert f"## {SECTIONS[name].title}\n" in text
    assert "| load 35 %, 3 batch | ggroupfs |" in text
    assert "{" not in text.partition("## Published")[0], "something was not filled in"
    report = compare(found, found)
    assert report.moved == ()
    assert report.compared > 50


def pressed(lab: FakeLab, compared: Sequence[FakeSystem]) -> list[pressure.Pressed]:
    return [pressure.Pressed(lab, one) for one in compared]


def test_all_of_it_takes_half_an_hour() -> None:
    """The Makefile says so; and each scenario takes less than ten minutes of it. One that is run by name alone takes
    less.
    """
    budgets = [entry.budget for entry in SCENARIOS.values() if entry.by_default]
    assert max(budgets) <= 540
    assert sum(budgets) <= 1800
    assert sum(entry.budget for entry in SCENARIOS.values() if not entry.by_default) <= 900


def test_percentages_of_mps_are_what_was_asked_for() -> None:
    found = {one.name: one for one in [*latency.systems(), *fairness.systems()] if isinstance(one, Mps)}
    critical, batch = Part(critical=True), Part()
    limited = found["MPS, batch at 30 %"].percentage
    assert (limited(critical), limited(batch)) == (None, 30)
    assert found["MPS"].percentage(batch) is None
    weighed = found["MPS, percentages by weight"].percentage
    assert [weighed(Part(weight=one)) for one in fairness.WEIGHTS] == [14, 29, 57]


@pytest.mark.parametrize(
    ("refusals", "code", "writes"),
    [(3, errno.EAGAIN, 4), (3, errno.EBUSY, 4), (99, errno.EAGAIN, None), (1, errno.EPERM, None)],
)
def test_a_limit_is_written_until_it_holds(
    monkeypatch: pytest.MonkeyPatch, refusals: int, code: int, writes: int | None
) -> None:
    """Programs may not give memory at once. An error other than that, or a limit that never holds, fails."""
    now, seen = [0.0], list[tuple[str, str]]()

    def write(room: SliceRoom, name: str, value: str) -> None:
        seen.append((name, value))
        if len(seen) <= refusals:
            raise OSError(code, os.strerror(code))

    room = SliceRoom(None, "a")  # type: ignore[arg-type]
    monkeypatch.setattr(SliceRoom, "_write", write)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("tests.bench.gpu.systems.time", clock)
    if writes is None:
        with pytest.raises(OSError, match=os.strerror(code)):
            room.limit(4096)
        assert now[0] <= LIMIT_S + LIMIT_AGAIN_S
        assert len(seen) == 1 or code == errno.EAGAIN
    else:
        room.limit(4096)
        assert seen == [("gmem.limit.high", "4096")] * writes
