"""The pure parts of the benchmarks: arrivals, spreads, records, changes, and the page."""

from __future__ import annotations

import itertools
import math
import random
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.core import record
from tests.bench.core.arrivals import SHAPE, arrivals, seed_of
from tests.bench.core.check import TOLERANCE, compare
from tests.bench.core.figures import KINDS
from tests.bench.core.record import Absence, Cell, Record, Run, Sample
from tests.bench.core.spread import Spread, percentile
from tests.bench.leak import trend
from tests.bench.machine import ROOT
from tests.bench.page import documents, tables
from tests.bench.page.published import FIGURES
from tests.bench.page.sections import SECTIONS
from tests.bench.report import Report
from tests.bench.soak import Sample as Moment
from tests.bench.soak import growth
from tests.support.measured import Numbers, measured, noisy, of, steady

# Arrivals


@given(rate=st.floats(1, 500), seconds=st.floats(1, 10), seed=st.integers(0, 1 << 32), shape=st.floats(0.1, 4))
def test_as_many_requests_come_as_the_load_wants(rate: float, seconds: float, seed: int, shape: float) -> None:
    found = arrivals(rate, seconds, seed, shape)
    assert len(found) == round(rate * seconds)
    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] <= seconds


@pytest.mark.parametrize("shape", [0.25, SHAPE, 1.0, 4.0])
def test_gaps_are_spread_as_the_gamma_distribution_is(shape: float) -> None:
    """The coefficient of variation is 1 / sqrt(shape), and more of the gaps are below the mean with a smaller shape."""
    times = arrivals(1000, 20, 7, shape)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(1e-3, rel=0.01)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(shape**-0.5, rel=0.05)
    drawn = random.Random(1)
    other = [drawn.gammavariate(shape, 1e-3 / shape) for _ in gaps]
    for part in (0.1, 0.5, 0.9):
        assert percentile(gaps, part) == pytest.approx(percentile(other, part), rel=0.1, abs=2e-6)


def test_the_same_seed_gives_the_same_requests() -> None:
    assert arrivals(50, 2, 3) == arrivals(50, 2, 3) != arrivals(50, 2, 4)
    assert seed_of(9, "decode", 0.1, 0) == 1_565_015_650, "records name it"
    seeds = {seed_of(9, kind, load, n) for kind in ("a", "b") for load in (0.1, 0.35) for n in range(3)}
    assert len(seeds) == 12


def test_no_request_at_all() -> None:
    with pytest.raises(ValueError, match="no request"):
        arrivals(0.1, 1, 1)


# Spreads


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_and_medians(values: list[float], part: float) -> None:
    found = percentile(values, part)
    assert sum(one <= found for one in values) >= part * len(values) - 1e-9
    assert sum(one < found for one in values) <= part * len(values)
    spread = Spread.of(values)
    assert spread == Spread(statistics.median(values), min(values), max(values), len(values))


def test_of_nothing() -> None:
    for act in (lambda: percentile([], 0.5), lambda: Spread.of([])):
        with pytest.raises(ValueError, match="no values"):
            act()


# Records


def test_a_record_is_read_as_it_was_written() -> None:
    run = attrs.evolve(measured(steady), absences=[Absence("MPS", 'there is no "control"')])
    found = of(run, measured(steady, "pareto"))
    assert record.load(record.dump(found)) == found
    assert record.load(record.dump(Record({}))) == Record({})


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"schema": 2, "runs": {}}', '{"schema": 1, "runs": {"a": {}}}', "nothing"]
)
def test_what_is_no_record(text: str) -> None:
    with pytest.raises(ValueError, match=r"record|Expecting"):
        record.load(text)


def test_merging_replaces_whole_scenarios() -> None:
    old = of(measured(steady), measured(steady, "pareto"))
    new = attrs.evolve(measured(lambda *_: 5.0), cells=measured(lambda *_: 5.0).cells[:2])
    found = record.merge(old, of(new))
    assert found.runs == {"latency-decode": new, "pareto": old.runs["pareto"]}


def test_a_ratio_is_to_the_nearest_case_of_the_reference_in_the_same_repetition() -> None:
    run = measured(lambda system, case, n: (n + 1.0) * (1 if system == "exclusive" else 3) * float(str(case["load"])))
    cell = run.cell("ggroupfs", {"load": 0.35, "batch": 3})
    assert cell is not None
    assert run.ratios(cell, "p99_ms") == [pytest.approx(3)] * 3
    other = run.compared(cell, "p99_ms")
    assert other is not None
    assert other.case == {"load": 0.35}
    assert run.ratios(cell, "batch_per_s") == []
    lonely = attrs.evolve(cell, samples=[attrs.evolve(cell.samples[0], repetition=7)])
    assert run.ratios(lonely, "p99_ms") == []


# What moved


def test_a_planted_regression_is_found_and_named() -> None:
    for seed in range(20):
        report = compare(of(measured(noisy(seed, 0.02))), of(measured(noisy(1000 + seed, 0.02, 1.5))))
        assert {(one.system, one.case["batch"], one.figure, one.worse) for one in report.moved} == {
            ("ggroupfs", 3, "p99_ms", True)
        }
        assert len(report.moved) == 2, "at both loads"
        assert report.failed
        assert "worse" in str(report.moved[0])
        assert "ggroupfs, p99 1." in str(report.moved[0])


def test_what_is_better_is_told_and_fails_nothing() -> None:
    report = compare(of(measured(noisy(1, 0.02))), of(measured(noisy(2, 0.02, 0.6))))
    assert [one.worse for one in report.moved] == [False, False]
    assert not report.failed


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_noise_is_not(spread: float) -> None:
    """With eight ratios in each of 200 pairs of runs that differ by chance alone, at most 1 % are taken for a
    change.
    """
    found = [compare(of(measured(noisy(n, spread))), of(measured(noisy(n + 5000, spread)))) for n in range(200)]
    assert all(report.compared == 8 for report in found)
    assert sum(len(report.moved) for report in found) <= 0.01 * 200 * 8


def test_another_machine_is_no_change() -> None:
    """Every figure is twice as slow."""
    report = compare(of(measured(noisy(1, 0.02))), of(measured(lambda *what: 2 * noisy(2, 0.02)(*what))))
    assert report.moved == ()
    assert report.compared == 8


def test_a_small_change_is_never_told_however_exact() -> None:
    def by(part: float) -> Numbers:
        return lambda system, case, n: steady(system, case, n) * (part if system == "ggroupfs" else 1)

    assert compare(of(measured(steady)), of(measured(by(1 + 0.9 * TOLERANCE)))).moved == ()
    assert len(compare(of(measured(steady)), of(measured(by(1 + 1.1 * TOLERANCE)))).moved) == 4


def test_more_throughput_is_better() -> None:
    def having(throughput: float) -> Record:
        cells = [
            Cell(name, {}, [Sample(n, 0, {"batch_per_s": value}) for n in range(2)])
            for name, value in (("exclusive", 100.0), ("ggroupfs", throughput))
        ]
        return of(attrs.evolve(measured(steady), cells=cells))

    assert [one.worse for one in compare(having(70), having(40)).moved] == [True]
    assert [one.worse for one in compare(having(40), having(70)).moved] == [False]


def test_one_repetition_says_nothing() -> None:
    report = compare(of(measured(steady)), of(measured(noisy(1, 0.01, 9.0), repetitions=1)))
    assert (report.moved, report.compared, report.missing) == ((), 0, ())


def test_what_is_gone_fails_and_a_scenario_that_was_not_measured_does_not() -> None:
    old = of(measured(steady), measured(steady, "pareto"))
    new = attrs.evolve(measured(steady), cells=measured(steady).cells[:-1])
    report = compare(old, of(new))
    assert report.missing == ("latency-decode: time slicing {'load': 0.35, 'batch': 3}",)
    assert report.failed
    assert not compare(old, of(measured(steady))).failed


# The page


def test_every_scenario_has_a_section_and_nothing_else() -> None:
    from tests.bench.gpu import scenarios
    from tests.bench.host import SCENARIOS

    assert set(SECTIONS) == {*scenarios.SCENARIOS, *SCENARIOS}
    assert {name for section in SECTIONS.values() for name in section.figures} <= set(KINDS)


def rows_of(text: str, title: str) -> list[list[str]]:
    """Return the table below a heading, without the header."""
    below = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[word.strip() for word in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_has_what_is_in_the_record_and_nothing_else() -> None:
    run = attrs.evolve(measured(lambda s, c, n: steady(s, c, n) + n), absences=[Absence("MPS", "there is no daemon")])
    text = documents.page(of(run), set())
    title = SECTIONS["latency-decode"].title
    rows = rows_of(text, title)
    assert len(rows) == len(run.cells)
    assert ["load 35 %, 3 batch", "ggroupfs", "12 (11 to 13), 1.091 x"] in rows
    assert ["load 10 %", "exclusive", "11 (10 to 12)"] in rows
    assert "- MPS: there is no daemon" in text
    assert ".svg)" not in text, "a plot that was not drawn"
    absent = [section.title for name, section in SECTIONS.items() if name != "latency-decode"]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [title, "Not measured yet", "Published by others"]
    missing, _, published = text.partition("## Not measured yet")[2].partition("## Published by others")
    assert re.findall(r"^- (.*)$", missing, re.MULTILINE) == absent
    assert re.findall(r"^- \*\*(.*)\*\*, ", published, re.MULTILINE) == [one.system for one in FIGURES]


def test_a_table_that_is_too_wide_is_several() -> None:
    """Each part has the case and the system, and no row is without figures; without the spread one table is enough."""
    values = {"p50_ms": 1234.0, "p99_ms": 4567.0, "batch_per_s": 7890.0, "given_up": 100.0}
    samples = [Sample(n, 1.0, {name: value + 1000 * n for name, value in values.items()}) for n in range(3)]
    cells = [Cell(system, {"load": 0.35, "batch": 3}, samples) for system in ("exclusive", "MPS, batch at 30 %")]
    cells.append(Cell("time slicing", {}, [Sample(0, 1.0, {"batch_per_s": 5.0})]))
    run = attrs.evolve(measured(steady), cells=cells)
    text = tables.everything(run, tuple(values))
    assert max(map(len, text.splitlines())) <= tables.WIDTH
    first, second = text.split("\n\n")
    assert "p50" in first
    assert "time slicing" not in first
    assert "|  | time slicing | 5 |" in second
    assert "\n\n" not in tables.everything(run, tuple(values), medians=True)


def test_a_bound_is_marked_as_one() -> None:
    figures = {"p99_ms": 900.0, "p50_ms": 4.0, "given_up": 3.0}
    cells = [Cell("time slicing", {"load": 0.8, "batch": 3}, [Sample(0, 1.0, figures)])]
    text = tables.everything(attrs.evolve(measured(steady), cells=cells), ("p50_ms", "p99_ms"))
    assert "| load 80 %, 3 batch | time slicing | 4 | ≥ 900 |" in text


def test_what_one_had_in_several_cases_is_one_row() -> None:
    """A system alone has figures of its requests, by load, and a speed without one, joined by repetition."""
    speed = [Sample(n, 9.0, {"batch_per_s": 100.0 + n, "p99_ms": 0.0}) for n in (0, 1)]
    run = measured(lambda system, case, n: steady(system, case, n) + n)
    run = attrs.evolve(run, cells=[*run.cells, Cell("exclusive", {}, speed)])
    found = tables.only(run, {"load": 0.35, "batch": 3})
    assert found.systems() == ["exclusive", "ggroupfs", "time slicing"]
    assert not any(cell.case for cell in found.cells)
    alone, ours = (found.cell(system, {}) for system in ("exclusive", "ggroupfs"))
    assert alone is not None
    assert ours is not None
    assert (alone.values("p99_ms"), alone.values("batch_per_s")) == ([10, 11, 12], [100, 101])
    assert found.ratios(ours, "p99_ms") == [1.1, pytest.approx(12 / 11), pytest.approx(13 / 12)]
    assert tables.only(run, {"load": 0.6}).systems() == ["exclusive"], "what says less is all there is"


def test_of_an_empty_record() -> None:
    text = documents.page(Record({}), set())
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Not measured yet", "Published by others"]
    assert f"0 of {len(SECTIONS)} scenarios are measured" in documents.summary(Record({}), set())


def test_what_is_committed_is_what_the_record_says() -> None:
    """This holds for the page and the part of the README; the plots are those that exist."""
    folder = ROOT / documents.FOLDER
    committed = record.load((folder / documents.RECORD).read_text())
    there = {name for name in SECTIONS if documents.picture(folder, name).exists()}
    assert there == {name for name in committed.runs if SECTIONS[name].plot}
    assert (folder / "README.md").read_text() == documents.page(committed, there)
    part = (ROOT / "README.md").read_text().partition(documents.BEGIN)[2].partition(documents.END)[0]
    assert part == "\n" + documents.summary(committed, there)


def test_published_figures_say_where_they_are_from() -> None:
    for one in FIGURES:
        assert re.fullmatch(r"(GVM|Ghost), section \d.*", one.source)


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.usefixtures("matplotlib")
def test_rendering_writes_the_page_the_plots_and_the_readme(tmp_path: Path) -> None:
    folder = tmp_path / documents.FOLDER
    folder.mkdir()
    stale = documents.picture(folder, "pareto")
    stale.write_text("of a record that had it")
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{documents.BEGIN}\nold\n{documents.END}\nafter\n")
    picture = documents.picture(folder, "latency-decode")
    found = set(documents.render(of(measured(steady)), tmp_path))
    assert found == {picture, folder / "README.md", readme}
    assert not stale.exists()
    drawn = picture.read_text()
    assert all(system in drawn for system in ("exclusive", "ggroupfs", "time slicing"))
    assert "beside 3 batch programs" in drawn
    assert picture.name in (folder / "README.md").read_text()
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert f"](benchmarks/{picture.name})" in text
    assert "pareto" not in text
    assert "load 10 %" not in text, "of the table only the one case"
    assert [line for line in text.splitlines() if line.startswith("| ")][2:] == [
        "| exclusive | 10 |",
        "| ggroupfs | 11, 1.1 x |",
        "| time slicing | 40, 4 x |",
    ], "a row for each system"
    list(documents.render(of(measured(steady)), tmp_path))
    assert (picture.read_text(), readme.read_text()) == (drawn, text), "the same record gives the same files"


@pytest.mark.usefixtures("matplotlib")
def test_a_system_looks_the_same_in_all_plots_and_like_no_other() -> None:
    from tests.bench.page import plots

    def run(*systems: str) -> Run:
        cells = [Cell(system, {}, [Sample(0, 0.0, {"p99_ms": 1.0})]) for system in ("exclusive", *systems)]
        return attrs.evolve(measured(steady), cells=cells)

    names = ("time slicing", "MPS", "MPS, batch at 50 %", "MPS, batch at 25 %", "ggroupfs", "ggroupfs, slo", "another")
    found = plots.looks(run(*names))
    assert len({look["color"] for look in found.values()}) == 1 + len(names)
    assert plots.looks(run("unified memory, advice", "MPS", "ggroupfs"))["ggroupfs"] == found["ggroupfs"]
    more = plots.looks(run(*(f"MPS at {n} %" for n in range(5))))
    assert len({look["color"] for look in more.values()}) == 6, "more than there are shades of"


@pytest.mark.usefixtures("matplotlib")
@pytest.mark.parametrize(
    ("name", "figures", "case", "seen"),
    [
        ("pareto", {"attained": 0.9, "passes_per_s": 50.0}, {"timeslice_ms": 1.0}, "requests within the SLO"),
        ("pressure", {"passes_per_s": 50.0}, {"percent": 150}, "footprint"),
        ("oversubscribed-decode", {"kept": 0.9}, {"mix": "decode", "percent": 150}, "footprint"),
        ("files", {"pread_us": 50.0, "echo_us": 80.0}, {}, "echo"),
    ],
)
def test_every_plot(
    name: str, figures: Mapping[str, float], case: Mapping[str, float], seen: str, tmp_path: Path
) -> None:
    from tests.bench.page import plots

    cells = [Cell(system, case, [Sample(0, 0.0, figures)]) for system in ("exclusive", "ggroupfs")]
    path = tmp_path / "plot.svg"
    run = attrs.evolve(measured(steady), cells=cells)
    assert plots.draw(run, SECTIONS[name].plot, path)
    assert seen in path.read_text()
    assert "ggroupfs" in path.read_text()
    assert not plots.draw(attrs.evolve(run, cells=[]), SECTIONS[name].plot, path)


@settings(max_examples=50)
@given(st.floats(1e-6, 1e6))
def test_a_number_is_not_far_from_what_it_tells(value: float) -> None:
    assert float(tables.number(value).replace(",", "")) == pytest.approx(value, rel=0.005)


# The soak: whether memory grows


def memory(seed: int, leak: float = 0.0, noise: float = 0.1, memory_s: float = 0.0, step: float = 0.0) -> list[Moment]:
    """Return the memory of a daemon over ten minutes that leaks `leak` MB a minute; its noise is correlated over
    `memory_s` seconds, and it allocates in steps.
    """
    drawn = random.Random(seed)
    stays = math.exp(-1 / memory_s) if memory_s else 0.0
    found, now = [], 0.0
    for second in range(601):
        now = stays * now + drawn.gauss(0, noise) * (1 - stays**2) ** 0.5
        mb = 100 + 0.3 * step + leak * second / 60 + now  # no step at the first moment
        # It fills its caches in the first two minutes.
        warm = 20 * (1 - math.exp(-second / 15))
        found.append(Moment(float(second), (mb // step * step if step else mb) + warm, 10))
    return found


def leaks(**what: float) -> int:
    """Return the number of 50 daemons in which a leak is found."""
    verdicts = [growth(memory(seed, **what)) for seed in range(50)]
    return sum(grown > budget for grown, budget in verdicts)


@pytest.mark.parametrize(
    "what",
    [
        {"leak": 0.5, "noise": 0.3},
        {"leak": 2.0, "noise": 2.0},
        {"leak": 0.1, "noise": 0.01},
        {"leak": 0.5, "noise": 0.3, "memory_s": 20},
        {"leak": 0.5, "noise": 0.05, "step": 1.0},
    ],
)
def test_a_leak_is_found(what: Mapping[str, float]) -> None:
    assert leaks(**what) == 50
    grown, budget = growth(memory(1, **what))
    assert grown == pytest.approx(10 * what["leak"], abs=budget)


@pytest.mark.parametrize(
    "what",
    [
        {"noise": 0.01},
        {"noise": 0.3},
        {"noise": 2.0},
        {"noise": 2.0, "memory_s": 5},
        {"noise": 2.0, "memory_s": 20},
        {"noise": 0.05, "step": 1.0},
        {"leak": -0.5, "noise": 0.3},
        {"leak": 0.03, "noise": 0.05},
    ],
)
def test_what_is_no_leak(what: Mapping[str, float]) -> None:
    assert leaks(**what) <= 1


def test_one_leap_is_no_trend() -> None:
    points = [(float(second), 100.0 + (second > 400)) for second in range(601)]
    grown, budget = growth([Moment(at, mb, 10) for at, mb in points])
    assert grown < budget
    assert trend(points[:395]).error == trend(points[:395]).slope == 0


def test_three_standard_errors_are_three() -> None:
    """The slope of noise is within one standard error in two of three cases, as in a normal distribution."""
    lines = [trend((one.at, one.rss_mb) for one in memory(seed, noise=1.0)[120:]) for seed in range(200)]
    within = statistics.fmean(abs(line.slope) < line.error for line in lines)
    assert 0.6 < within < 0.85


@pytest.mark.parametrize("seconds", [0, 3, 14])
def test_too_few_samples_say_nothing(seconds: int) -> None:
    with pytest.raises(ValueError, match="say nothing"):
        trend([(float(at), 1.0) for at in range(seconds + 1)])


def test_a_figure_has_a_most_or_a_least(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    for value in (0.0, 1.0, 2.0):
        report.add("rounds", value, "", least=1)
        report.add("errors", value, "", 1)
        report.add("reads", value, "")
    assert [one.verdict for one in report.figures] == ["FAIL", "PASS", "", "PASS", "PASS", "", "PASS", "FAIL", ""]
    assert report.fill(lambda _: None, None) == 1
    assert "2 of 6 budgets fail" in capsys.readouterr().out
