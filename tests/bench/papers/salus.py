"""Salus on a real GPU: 42 models on one (its figure 13), and its trace of 100 jobs (5.1), scaled to minutes.

The 42 are 14 models three times each, as there; which 14 is not said, and these are the 15 of table 3 without overfeat,
of which the authors had no working PyTorch either (figure 16). Latencies are of inferences at a low rate.

The trace is that of `ggroupfs replay` (ggroupfs/replay/workloads.py) with real models: iterations a FACTOR'th and
arrivals a HASTE'th, so that a system takes minutes. FIFO runs one job at a time, all others PLACES at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from ggroupfs.replay.workloads import salus
from tests.bench.core.arrivals import seed_of
from tests.bench.core.runner import Unavailable
from tests.bench.core.spread import percentile
from tests.bench.gpu.systems import Mps, Plain, Turned
from tests.bench.papers.cells import LATER, SECOND, Cell, Measured
from tests.bench.papers.lab import Lab
from tests.bench.papers.sharing import ANY, LINE, LINES, LOW, serving

PACKING, TRACE = "salus-packing", "salus-trace"
FIFO, EXCLUSIVE = "FIFO", "exclusive"
MODELS = (
    *("alexnet", "googlenet", "inception3", "inception4", "resnet50", "resnet101", "resnet152"),
    *("vgg11", "vgg16", "vgg19", "vae", "superres", "speech", "seq2seq"),
)
"""Fourteen of table 3."""
INSTANCES = 3
RATE, SERVE_S = 2.0, 15.0
"""Inferences a second of each model, and seconds of them."""
FACTOR, HASTE, PLACES = 30, 40, 8
JOBS = 100
SIZES = {"small": 16, "medium": 32, "large": 64}
"""Batches of seq2seq, by the paper's names of them."""
SECONDS = {EXCLUSIVE: 120.0, FIFO: 360.0}
"""A cell takes about so long; others: see `cells`."""
LIMIT_S = 560.0


def packed() -> list[dict[str, Any]]:
    """The 42, with requests at other times each."""
    return [
        {"at": 0.0, "model": name, "mode": "infer", "batch": 1, "rate": RATE, "seconds": SERVE_S, "seed": 100 + number}
        for number, name in enumerate(MODELS * INSTANCES)
    ]


def alone() -> list[dict[str, Any]]:
    """One of each, for a third of the time."""
    return [{**one, "seconds": SERVE_S / 3} for one in packed()[: len(MODELS)]]


def traced(seed: int, count: int = JOBS) -> list[dict[str, Any]]:
    """The jobs of a trace, in training."""
    jobs = []
    for number, one in enumerate(salus(seed, count)):
        model, _, batch = one.job.partition("-")[2].rpartition("_")
        iterations = max(2, round(one.iterations / FACTOR))
        size = SIZES.get(batch) or int(batch)
        jobs.append(
            {
                "at": round(one.arrival_us / 1e6 / HASTE, 3),
                "model": "alexnet" if model == "overfeat" else model,
                "mode": "train",
                "batch": size,
                "iterations": iterations,
                "seed": number,
            }
        )
    return jobs


def latencies(told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of inferences; Unavailable where no model ran."""
    ran = [one for one in told if not one.get("error") and one.get("latencies")]
    if not ran:
        raise Unavailable(f"no model ran: {next((one.get('error') for one in told), 'there is none')}")
    ms = [1e3 * latency for one in ran for latency in one["latencies"]]
    return {
        "hosted": float(len(ran)),
        "p50_ms": percentile(ms, 0.5),
        "p99_ms": percentile(ms, 0.99),
        "mean_ms": sum(ms) / len(ms),
    }


def one_by_one(told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The same where each model had the GPU to itself: the GPU hosted one."""
    return {**latencies(told), "hosted": 1.0}


def completions(told: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Figures of table 2, of the jobs that were done; Unavailable where none was."""
    done = [one for one in told if one.get("ended") is not None and not one.get("error")]
    if not done:
        raise Unavailable("no job was done")
    times = [(one["ended"] - one["at"]) / 60 for one in done]
    return {
        "makespan_min": max(one["ended"] for one in done) / 60,
        "completion_min": sum(times) / len(times),
        "completion_p95_min": percentile(times, 0.95),
        "finished": float(len(done)),
    }


@attrs.frozen
class Way:
    """A way to share: the words before the nursery's command, and a list for what the daemon logs."""

    name: str
    enter: Callable[[list[str]], contextlib.AbstractContextManager[Sequence[str]]]


@contextlib.contextmanager
def _driver(system: Plain | Mps) -> Iterator[Sequence[str]]:
    with system.enter() as stage:
        yield stage.words(LOW)


@contextlib.contextmanager
def _ggroup(said: list[str]) -> Iterator[Sequence[str]]:
    with Turned("ggroupfs", ["turns=off"], expected=ANY).enter() as room:
        yield room.words()
        serving(room.mount)
        said += [line.strip()[:LINE] for line in room.mount.errors[:LINES]]


def ways() -> list[Way]:
    """Those that are compared."""
    return [
        Way("time slicing", lambda said: _driver(Plain("time slicing"))),
        Way("MPS", lambda said: _driver(Mps("MPS"))),
        Way("ggroupfs", _ggroup),
    ]


def cells(lab: Lab, seed: int, compared: Sequence[Way] | None = None, jobs: int = JOBS) -> Iterator[Cell]:
    """All of them."""

    def measure(way: Way | None, order: Callable[[int], Mapping[str, Any]], told: Any) -> Callable[[int], Measured]:
        def act(number: int) -> Measured:
            said: list[str] = []
            with way.enter(said) if way else contextlib.nullcontext([]) as words, lab.nursery(words) as nursery:
                found = nursery.serve(order(number), LIMIT_S)
            return Measured(told(found), {"jobs": found}, said)

        return act

    def trace(number: int, most: int) -> Mapping[str, Any]:
        return {"most": most, "together": False, "jobs": traced(seed_of(seed, TRACE, number), jobs)}

    def together(number: int) -> Mapping[str, Any]:
        return {"most": len(MODELS) * INSTANCES, "together": True, "jobs": packed()}

    def apart(number: int) -> Mapping[str, Any]:
        return {"most": 1, "together": False, "jobs": alone()}

    yield Cell(PACKING, EXCLUSIVE, {}, SECONDS[EXCLUSIVE], measure(None, apart, one_by_one), rank=SECOND)
    yield Cell(TRACE, FIFO, {}, SECONDS[FIFO], measure(None, lambda number: trace(number, 1), completions))
    for way in ways() if compared is None else compared:
        rank, case = SECOND if way.name == "ggroupfs" else LATER, {"models": len(MODELS) * INSTANCES}
        yield Cell(PACKING, way.name, case, 90.0, measure(way, together, latencies), rank=rank)
        yield Cell(TRACE, way.name, {}, 240.0, measure(way, lambda number: trace(number, PLACES), completions))
