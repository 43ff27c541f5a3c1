"""Measurements made up for the tests of tests/bench."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from tests.bench.core.record import Cell, Record, Run, Sample

Numbers = Callable[[str, Mapping[str, object], int], float]


def measured(numbers: Numbers, scenario: str = "latency-decode", repetitions: int = 3) -> Run:
    """Return a run of three systems; p99 and batch throughput follow from the system, the case and the repetition."""
    cells = []
    for load in (0.1, 0.35):
        for batch in (None, 1, 3):
            case = {"load": load} if batch is None else {"load": load, "batch": batch}
            for system in ["exclusive"] if batch is None else ["ggroupfs", "time slicing"]:
                samples = [
                    Sample(n, 1.0 + n, {"p99_ms": numbers(system, case, n), "requests": 100.0})
                    for n in range(repetitions)
                ]
                cells.append(Cell(system, case, samples))
    parameters = {"seed": 9, "shape": 0.5, "seconds": 2.0, "service_ms": 2.0}
    return Run(scenario, "exclusive", {"cpus": 2, "date": "2026-01-01 00:00"}, parameters, 12.5, cells)


def steady(system: str, case: Mapping[str, object], repetition: int) -> float:
    """Figures without noise."""
    return {"exclusive": 10.0, "ggroupfs": 11.0, "time slicing": 40.0}[system]


def of(*runs: Run) -> Record:
    return Record({run.scenario: run for run in runs})


def noisy(seed: int, spread: float, factor: float = 1.0) -> Numbers:
    """Figures with noise of relative size `spread`; `factor` applies to ggroupfs beside three others."""
    chance = random.Random(seed)

    def numbers(system: str, case: Mapping[str, object], repetition: int) -> float:
        planted = factor if (system, case.get("batch")) == ("ggroupfs", 3) else 1.0
        return steady(system, case, repetition) * planted * chance.lognormvariate(0, spread)

    return numbers
