"""What is pure of tests/bench/papers: requests and SLOs, digests, clocks; and the verdict on a ratio."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.core import record
from tests.bench.core.check import compare
from tests.bench.core.figures import KINDS
from tests.bench.core.record import Absence, Cell, Record, Run, Sample
from tests.bench.core.spread import percentile
from tests.bench.core.verdict import ENOUGH, QUANTILES, Verdict, judged
from tests.bench.machine import ROOT
from tests.bench.papers import clocks, headlines, kept, requests
from tests.bench.papers.clocks import Look
from tests.bench.papers.digest import COMMON, MEASURING, digest, measuring
from tests.bench.papers.requests import Answer, Slo, figures, planned, slo_of, times

# Requests


@given(
    kind=st.sampled_from(requests.KINDS), rate=st.floats(1, 50), seconds=st.floats(2, 60), seed=st.integers(0, 1 << 32)
)
def test_as_many_requests_come_as_the_rate_wants(kind: str, rate: float, seconds: float, seed: int) -> None:
    found = times(kind, rate, seconds, seed)
    assert len(found) == round(rate * seconds)
    assert found == sorted(found)
    assert found[0] >= 0
    assert found[-1] <= seconds + 1e-6


def test_requests_that_come_and_go_do() -> None:
    period = requests.ON_S + requests.OFF_S
    found = times("onoff", 10, 10 * period, 3)
    assert all(one % period <= requests.ON_S for one in found)
    counts = [sum(one // period == number for one in found) for number in range(10)]
    assert min(counts) > 0.6 * 10 * period, "each time as many, by chance"
    gaps = [later - one for one, later in itertools.pairwise(found) if later - one < requests.OFF_S]
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(1, rel=0.1)


def test_the_plan_of_a_seed() -> None:
    plan = planned("gamma", 10, 24, 5)
    assert plan == planned("gamma", 10, 24, 5) != planned("gamma", 10, 24, 6)
    assert all(requests.PROMPT[0] <= one.prompt <= requests.PROMPT[1] for one in plan)
    assert all(requests.OUTPUT[0] <= one.output <= requests.OUTPUT[1] for one in plan)
    many = planned("gamma", 100, 24, 5)
    assert statistics.median(one.prompt for one in many) == pytest.approx(requests.PROMPT_MEDIAN, rel=0.1)
    assert statistics.fmean(one.prompt for one in many) > 1.2 * requests.PROMPT_MEDIAN, "a few are far longer"
    small = planned("gamma", 10, 24, 5, scale=0.1)
    assert [one.at for one in small] == [one.at for one in plan]
    assert max(one.prompt for one in small) <= 0.1 * requests.PROMPT[1] + 1


def test_other_arrivals_are_none() -> None:
    with pytest.raises(ValueError, match="gamma or onoff"):
        times("uniform", 1, 10, 1)


# What came of them


def answered(seed: int, count: int = 400, factor: float = 1.0) -> list[Answer]:
    chance = random.Random(seed)

    def took(ms: float) -> float:
        return factor * ms * chance.lognormvariate(0, 0.3)

    return [Answer(took(50), [took(10) for _ in range(20)]) for _ in range(count)]


def test_the_figures_of_a_round() -> None:
    found = answered(1)
    told = figures(found, 1e5)
    first = [one.ttft_ms for one in found if one.ttft_ms is not None]
    assert told["ttft_p50_ms"] == percentile(first, 0.5)
    assert told["ttft_p99_ms"] == percentile(first, 0.99)
    assert told["itl_p99_ms"] == percentile([gap for one in found for gap in one.itl_ms], 0.99)
    assert (told["requests"], told["given_up"]) == (400, 0)
    assert "attained" not in told


def test_a_request_without_a_token_has_waited_for_all_of_the_time() -> None:
    found = [*answered(1, 380), *([Answer(None, [])] * 20)]
    told = figures(found, 1e5)
    assert told["ttft_p99_ms"] == 1e5
    assert told["given_up"] == 20
    assert told["itl_p99_ms"] < 100
    assert figures(found, 1e5, Slo(1e9, 1e9))["attained"] == 380 / 400


def test_a_p99_of_a_few_is_none() -> None:
    told = figures(answered(1, requests.ENOUGH - 1), 1e5)
    assert "ttft_p99_ms" not in told
    assert "ttft_p99_ms" in figures(answered(1, requests.ENOUGH), 1e5)
    assert "itl_p99_ms" not in figures(answered(1, 4), 1e5), "eighty gaps"
    with pytest.raises(ValueError, match="no request"):
        figures([], 1.0)


def test_the_slo_is_what_a_server_has_alone() -> None:
    alone = answered(1)
    slo = slo_of(alone)
    assert slo.ttft_ms == figures(alone, 1e5)["ttft_p99_ms"]
    attained = [
        figures(answered(seed, factor=factor), 1e5, slo)["attained"] for seed, factor in ((1, 1), (2, 1), (2, 2))
    ]
    assert 0.98 <= attained[0] <= 0.995
    assert attained[1] >= 0.96
    assert attained[2] < 0.1
    late = attrs.evolve(alone[0], itl_ms=[1e3] * 20)
    assert not slo.attained(late), "its first token is in time"
    with pytest.raises(ValueError, match="no values"):
        slo_of([Answer(None, [])])


# The verdict

ROUNDS = 6


def ratios(seed: int, spread: float, factor: float = 1.0, count: int = ROUNDS) -> list[float]:
    chance = random.Random(seed)
    return [1.3 * factor * chance.lognormvariate(0, spread) for _ in range(count)]


def verdicts(spread: float, factor: float, lower: bool = True, count: int = 1000) -> dict[Verdict, float]:
    """Parts of many comparisons."""
    found = [judged(ratios(2 * n, spread), ratios(2 * n + 1, spread, factor), lower).verdict for n in range(count)]
    return {one: found.count(one) / count for one in Verdict}


@pytest.mark.parametrize("spread", [0.0, 0.005, 0.015])
def test_a_planted_slowdown_is_found_on_a_quiet_machine(spread: float) -> None:
    """Of 15 %, in latency and in throughput."""
    assert verdicts(spread, 1.15)[Verdict.WORSE] >= 0.95
    assert verdicts(spread, 1 / 1.15, lower=False)[Verdict.WORSE] >= 0.95
    assert verdicts(spread, 1 / 1.15)[Verdict.BETTER] >= 0.95
    assert verdicts(spread, 1.0)[Verdict.SAME] >= 0.95


@pytest.mark.parametrize(("spread", "least"), [(0.05, 0.8), (0.1, 0.97), (0.3, 0.99)])
def test_a_noisy_one_is_too_noisy_to_tell(spread: float, least: float) -> None:
    """Six repetitions of 5 % are close together by chance now and then: what is said then is right."""
    assert verdicts(spread, 1.0)[Verdict.NOISY] >= least
    slow = verdicts(spread, 1.15)
    assert slow[Verdict.NOISY] >= 0.4
    assert slow[Verdict.NOISY] + slow[Verdict.WORSE] >= 0.96


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.03, 0.05, 0.1, 0.3])
def test_chance_alone_is_seldom_a_change(spread: float) -> None:
    found = verdicts(spread, 1.0, count=3000)
    assert found[Verdict.WORSE] + found[Verdict.BETTER] <= 0.003


@pytest.mark.parametrize("spread", [0.005, 0.02, 0.03, 0.05])
def test_what_is_called_the_same_hides_no_slowdown(spread: float) -> None:
    assert verdicts(spread, 1.15, count=2000)[Verdict.SAME] <= 0.04


def test_a_large_change_is_found_though_it_is_noisy() -> None:
    assert verdicts(0.1, 3.0)[Verdict.WORSE] >= 0.99


def test_what_would_be_found_is_told() -> None:
    quiet, noisy = (judged(ratios(1, spread), ratios(2, spread), True) for spread in (0.001, 0.2))
    assert quiet.least_found < 0.11
    assert noisy.least_found > 0.5
    with pytest.raises(ValueError, match=f"fewer than {ENOUGH}"):
        judged([1.0] * 3, [1.0] * 9, True)


def test_quantiles_are_those_of_students_distribution() -> None:
    """Each has 0.0005 above it: the density, put on an angle so that all of it is between two numbers, is summed."""
    for freedom, quantile in enumerate(QUANTILES, 1):
        scale = math.gamma((freedom + 1) / 2) / (math.sqrt(math.pi) * math.gamma(freedom / 2))
        begin, steps = math.atan(quantile / math.sqrt(freedom)), 2000
        width = (math.pi / 2 - begin) / steps
        above = sum(scale * math.cos(begin + (n + 0.5) * width) ** (freedom - 1) * width for n in range(steps))
        assert above == pytest.approx(0.0005, rel=0.003), freedom


def interleaved(seed: int, slow: float = 1.0, drift: float = 1.0, spread: float = 0.01) -> Record:
    """Two systems in rounds: what drifts is in both, such as a GPU that grows warm; `slow` is ours alone."""
    chance = random.Random(seed)
    samples: dict[str, list[Sample]] = {"exclusive": [], "ggroupfs": []}
    for number in range(ROUNDS):
        warm = drift ** (number / (ROUNDS - 1))
        for system, ms in (("exclusive", 20.0), ("ggroupfs", 22.0 * slow)):
            figures = {"ttft_p99_ms": ms * warm * chance.lognormvariate(0, spread)}
            samples[system].append(Sample(number, float(number), figures))
    cells = [Cell(system, {}, found) for system, found in samples.items()]
    return Record({"pairs": Run("pairs", "exclusive", {}, {}, 1.0, cells)})


@pytest.mark.parametrize("drift", [1.0, 1.5, 3.0])
def test_a_check_finds_a_planted_slowdown_in_interleaved_rounds(drift: float) -> None:
    """A machine that grows half or three times as slow meanwhile is no change, and hides none."""
    for seed in range(20):
        before = interleaved(seed)
        same = compare(before, interleaved(seed + 1000, drift=drift))
        assert (same.moved, same.noisy) == ((), ())
        slow = compare(before, interleaved(seed + 1000, 1.15, drift))
        assert [one.worse for one in slow.moved] == [True], seed
        assert slow.failed
        assert not same.failed


def test_a_check_says_what_is_too_noisy_to_tell() -> None:
    report = compare(interleaved(1, spread=0.1), interleaved(2, 1.15, spread=0.1))
    assert report.moved == ()
    (line,) = map(str, report.noisy)
    assert line.startswith("noisy  pairs : ggroupfs, TTFT p99: too noisy to tell")
    assert not report.failed
    assert report.compared == 1


# Digests


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {"ggroupfs/a.py": "1", "backend/x/b.c": "2", "pyproject.toml": "3", "docs/c.md": "4"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_digest_is_of_the_code(tree: Path) -> None:
    first = digest(tree)
    assert first == digest(tree)
    for name in ("docs/c.md", "ggroupfs/__pycache__/a.pyc", "backend/build/y.c", "ggroupfs/README.md", "tests/t.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("other")
    (tree / "backend" / "lib.so").write_bytes(b"\x7fELF")
    (tree / "backend" / "program").write_bytes(b"\x7fELFmore")
    assert digest(tree) == first
    (tree / "backend" / "x" / "b.c").write_text("3")
    assert digest(tree) != first


def test_a_name_and_a_new_file_are_of_the_code_too(tree: Path) -> None:
    found = {digest(tree)}
    (tree / "ggroupfs" / "a.py").rename(tree / "ggroupfs" / "b.py")
    found.add(digest(tree))
    (tree / "ggroupfs" / "empty.py").touch()
    found.add(digest(tree))
    assert len(found) == 3
    with pytest.raises(FileNotFoundError, match="no code"):
        digest(tree / "docs")


def test_each_scenario_has_a_digest_of_what_measures_it() -> None:
    """What is named is there, and all programs are named; a mend of one scenario leaves the cells of others valid."""
    names = [*COMMON, *(name for several in MEASURING.values() for name in several)]
    assert all((ROOT / name).exists() for name in names)
    programs = {path.name for path in (ROOT / "tests/bench/papers/programs").iterdir() if path.is_file()}
    assert programs == {Path(name).name for name in names if "papers/programs/" in name}
    assert len({measuring(ROOT, name) for name in ("pairs", "salus-trace", "flyt", "scale-gpu")}) == 4
    assert measuring(ROOT, "salus-packing") == measuring(ROOT, "salus-trace")
    with pytest.raises(KeyError):
        measuring(ROOT, "other")


# Clocks


def test_clocks_are_summed() -> None:
    looks = [Look(1980 - 10 * n, 3201, 500 + n, 60, 0x4 if n == 9 else 0) for n in range(10)]
    told = clocks.summed(looks)
    assert told["sm_mhz"] == {"median": 1935, "least": 1890, "most": 1980}
    assert told["slowed"] == {"power cap": 0.1}
    assert told["looks"] == 10
    assert set(clocks.NAMES) < set(told)
    assert clocks.summed([]) == {"slowed": {}, "looks": 0}


def test_clocks_of_all_gpus_are_looked_at_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that says nothing for a while is looked at again."""
    monkeypatch.setattr(clocks, "EVERY_S", 0.01)
    enough, seen = threading.Event(), itertools.count()

    def look(gpu: int) -> Look | None:
        number = next(seen)
        if number >= 12:
            enough.set()
        return None if number % 3 == 2 else Look(1000 * (gpu + 1), 1, 1, 1, 0)

    with clocks.watched([lambda: look(0), lambda: look(1)]) as told:
        assert enough.wait(60)
        assert told == {}
    assert told["sm_mhz"]["median"] == 1000
    assert [one["sm_mhz"]["median"] for one in told["others"]] == [2000]
    assert told["looks"] >= 3
    with clocks.watched([]) as nothing:
        pass
    assert nothing == {}


# What is made of records


def pairs_record(gpu: str = "NVIDIA H200", product: str = "aa") -> Record:
    """A record whose figures are easy to reckon with."""
    alone = {"ttft_p50_ms": 40.0, "ttft_p99_ms": 100.0, "itl_p50_ms": 10.0, "itl_p99_ms": 20.0, "attained": 0.98}
    slower = {name: 1.5 * value for name, value in alone.items() if name.endswith("_ms")}
    case = [["low", "diffusion"], ["memory", 70], ["arrivals", "gamma"]]
    pooled = [
        ["exclusive", [["arrivals", "gamma"]], {**alone, "requests": 600.0, "given_up": 0.0}],
        ["exclusive", [["low", "diffusion"]], {"steps_per_s": 4.0}],
        ["ggroupfs, static", case, {**slower, "attained": 0.75, "steps_per_s": 1.0}],
        ["ggroupfs, turns", case, {**slower, "attained": 0.5, "steps_per_s": 2.0, "given_up": 3.0}],
        ["ggroupfs", [["low", "diffusion"], ["own", 40]], {"steps_per_s": 1.0}],
    ]
    parameters = {"rounds": [0, 1], "clocks": {"sm_mhz": [1980.0, 1980.0]}, "findings": [], "pooled": pooled}
    on = {"gpu": gpu, "product": product, "programs": "bb", "commit": "0123abc", "torch": "2.11.0"}
    absences = [Absence("time slicing", "low=diffusion memory=70 arrivals=gamma: out of memory")]
    samples = [Sample(number, 1.0, {"ttft_p99_ms": 100.0}) for number in (0, 1)]
    cells = [Cell("exclusive", {"arrivals": "gamma"}, samples)]
    return Record({"pairs": Run("pairs", "exclusive", on, parameters, 60.0, cells, absences)})


def ours(record: Record, paper: str, what: str) -> str:
    """What a record has of a headline."""
    (found,) = (row for row in headlines.ROWS if row.paper == paper and row.what.startswith(what))
    return found.ours(record)


def test_headlines_are_reckoned_from_a_record() -> None:
    made = pairs_record()
    assert ours(made, "Ghost", "P99 of the times between tokens") == "1.5 (static), 1.5 (turns)"
    assert ours(made, "GVM", "latency beside diffusion") == "1.5 / 1.5 / 1.5 / 1.5 (static)", "a bound is no figure"
    assert ours(made, "Ghost", "SLO attainment, at") == "0.75 at 0.25 (static), 0.5 at 0.5 (turns)"
    assert ours(made, "Ghost, GVM", "diffusion alone with 40 %") == "0.25 with 40 %"
    assert ours(made, "Ghost", "latency beside fine-tuning") == ""


def test_a_row_without_a_record_says_so_and_each_gpu_is_named() -> None:
    none = [text for _, text in headlines.told(headlines.ROWS, [], Record({}))]
    assert set(none) == {headlines.ABSENT}
    both = [pairs_record("NVIDIA H100"), pairs_record()]
    told = {row.what: text for row, text in headlines.told(headlines.ROWS, both, Record({}))}
    row = next(text for what, text in told.items() if what.startswith("diffusion alone with 40 %"))
    assert row == "NVIDIA H100: 0.25 with 40 %; NVIDIA H200: 0.25 with 40 %"
    assert [text for what, text in told.items() if "fine-tuning" in what] == [headlines.ABSENT]
    papers = {name for row in headlines.ROWS for name in row.paper.split(", ")}
    assert papers == {"Ghost", "GVM", "Salus", "Flyt", "MSched"}


def test_every_headline_finds_its_figures() -> None:
    """A record in which every figure of every scenario is there has something for each row."""

    def run(name: str, reference: str, cells: Sequence[tuple[str, Mapping[str, Any]]]) -> Run:
        figures = dict.fromkeys(KINDS, 2.0)
        made = [Cell(system, case, [Sample(0, 1.0, figures)]) for system, case in cells]
        return Run(name, reference, {"gpu": "G"}, {}, 1.0, made)

    scenarios = {
        "salus-packing": ("exclusive", [("exclusive", {}), ("ggroupfs", {"models": 42})]),
        "salus-trace": ("FIFO", [("FIFO", {}), ("ggroupfs", {})]),
        "flyt": (
            "native",
            [(name, {"table": table}) for name in ("native", "ggroupfs") for table in (4, 5, 6, 8)],
        ),
        "flyt-actions": ("time slicing", [(name, {"gpus": 1}) for name in ("time slicing", "ggroupfs, slo")]),
        "scale-balance": ("placed by hand", [("ggroupfs balance", {"gpus": 4})]),
    }
    replays = {
        "salus": ("FIFO", [(name, {"trace": trace}) for name in ("FIFO", "PACK") for trace in ("table 2", SUPERRES)]),
        "flyt": ("alone", [("alone", {}), ("ggroupfs, slo", {"others": 1})]),
        "oversubscribed-decode": ("x", [("ggroupfs, turns", {"percent": 150, "programs": 4})]),
    }
    papers, bench = (
        Record({name: run(name, *one) for name, one in several.items()}) for several in (scenarios, replays)
    )
    every = dict.fromkeys((*headlines.LATENCIES, "steps_per_s", "attained"), 1.0)
    beside = {
        (system, memory) for memory, several in ((100, ["ggroupfs"]), (70, headlines.PRESSED)) for system in several
    }
    pooled = [
        ["exclusive", [["arrivals", "gamma"]], every],
        ["exclusive", [["low", "diffusion"]], every],
        ["ggroupfs", [["low", "diffusion"], ["own", 40]], every],
        *(
            [system, [["low", low], ["memory", memory], ["arrivals", "gamma"]], every]
            for system, memory in beside
            for low in ("diffusion", "finetune")
        ),
    ]
    pairs = attrs.evolve(pairs_record("G").runs["pairs"], parameters={"pooled": pooled})
    whole = Record({**papers.runs, "pairs": pairs})
    for row, text in headlines.told(headlines.ROWS, [whole], bench):
        assert text != headlines.ABSENT, row.what


SUPERRES = "300 x superres_128"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with the pages that have a part made of records."""
    for name in (kept.README, kept.COMPARISON):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"before\n{kept.BEGIN}\nold\n{kept.END}\nafter\n")
    (tmp_path / kept.FOLDER).mkdir()
    return tmp_path


def test_records_are_kept_by_gpu_and_of_one_product(root: Path) -> None:
    assert kept.keep(pairs_record(), root).name == "papers-nvidia-h200.json"
    assert kept.keep(pairs_record("NVIDIA H100 80GB HBM3"), root).name == "papers-nvidia-h100-80gb-hbm3.json"
    other = pairs_record(product="cc").runs["pairs"]
    with pytest.raises(ValueError, match="of products aa, cc: measure all of it again"):
        kept.keep(Record({"flyt": attrs.evolve(other, scenario="flyt")}), root)
    assert kept.keep(Record({"pairs": other}), root).exists(), "nothing of the other is left"
    with pytest.raises(ValueError, match="a record of nothing"):
        kept.keep(Record({}), root)


def test_pages_have_a_part_made_of_records(root: Path) -> None:
    pytest.importorskip("matplotlib")
    assert list(kept.render(root)) == [root / kept.README, root / kept.COMPARISON]
    assert "Not measured yet" in (root / kept.README).read_text()
    path = kept.keep(pairs_record(), root)
    assert list(kept.render(root)) == [path.with_suffix(".md"), root / kept.README, root / kept.COMPARISON]
    text = (root / kept.README).read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "![" in text
    assert "](benchmarks/papers-nvidia-h200-70.svg)" in text
    assert "benchmarks/papers-nvidia-h200-100.svg" not in text, "there is nothing of it to draw"
    assert "| exclusive |  | 40 | 100 | 10 | 20 | 0.98 |  |" in text
    assert "| ggroupfs, static | 70 % | 60 | 150 | 15 | 30 | 0.75 | 0.25 |" in text
    assert "| ggroupfs, turns | 70 % | ≥ 60 | ≥ 150 | 15 | 30 | 0.5 | 0.5 |" in text
    assert "NVIDIA H200, commit 0123abc" in text
    assert "  - ours: NVIDIA H200: 0.25 with 40 %\n" in (root / kept.COMPARISON).read_text()
    assert all(len(line) <= 120 for line in (root / kept.COMPARISON).read_text().splitlines())
    page = path.with_suffix(".md").read_text()
    assert "- time slicing: low=diffusion memory=70 arrivals=gamma: out of memory" in page
    assert "torch 2.11.0" in page
    before = {one: one.read_bytes() for one in root.rglob("*") if one.is_file()}
    list(kept.render(root))
    assert {one: one.read_bytes() for one in root.rglob("*") if one.is_file()} == before


def test_pages_of_this_tree_are_those_of_its_records() -> None:
    """No figure in them was typed by hand: `make bench-render` writes what is there."""
    found = kept.records(ROOT)
    bench = record.load((ROOT / kept.FOLDER / kept.RECORD).read_text())
    assert kept.part((ROOT / kept.README).read_text()) == kept.summary(found)
    assert kept.part((ROOT / kept.COMPARISON).read_text()) == kept.compared([*found.values()], bench)
    products = {path: {run.on["product"] for run in one.runs.values()} for path, one in found.items()}
    assert all(len(several) == 1 for several in products.values()), products


@settings(deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=ENOUGH, max_size=9), st.lists(st.floats(0.1, 10), min_size=ENOUGH, max_size=9)
)
def test_worse_one_way_is_better_the_other(before: list[float], after: list[float]) -> None:
    there, back = judged(before, after, True), judged(after, before, True)
    opposite = {Verdict.WORSE: Verdict.BETTER, Verdict.BETTER: Verdict.WORSE}
    assert back.verdict is opposite.get(there.verdict, there.verdict)
    assert math.isclose(there.factor * back.factor, 1, rel_tol=1e-9)
