"""A latency-critical program beside one and three batch programs, at four loads: its latency, and their throughput.

Every system serves the same requests, which would keep a critical program alone busy for the load's fraction of the
time. Requests come in bursts (core.arrivals). The batch programs multiply matrices back to back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.arrivals import SHAPE, arrivals, seed_of
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Subject
from tests.bench.core.spread import percentile
from tests.bench.gpu.faces import Critical, Lab, Part, Products, Served, Stage, System
from tests.bench.gpu.systems import Ggroupfs, Mps, Plain, priority, timeslices

LOADS = (0.1, 0.35, 0.6, 0.8)
OTHERS = (1, 3)
SECONDS = 2.0
"""Seconds in which requests come; a system has as long again to serve them."""
SETTLE_S = 1.5
"""Seconds after others came: the scheduler computes timeslices once a second."""
CALIBRATION = 200
"""Number of requests at once that measure the duration of one."""
CRITICAL, BATCH = Part(critical=True), Part()
EXCLUSIVE = "exclusive"


def systems() -> list[System]:
    """Return the systems that are compared."""
    return [
        Plain("time slicing"),
        Mps("MPS"),
        Mps("MPS, batch at 30 %", lambda part: None if part.critical else 30),
        Ggroupfs("ggroupfs", priority),
        Ggroupfs("ggroupfs, timeslices", timeslices(20, 0.2), ["scheduler=off"]),
    ]


def waited(served: Served) -> dict[str, float]:
    """Return the figures of a burst."""
    ms = [1e3 * one for one in served.latencies]
    return {
        "p50_ms": percentile(ms, 0.5),
        "p99_ms": percentile(ms, 0.99),
        "mean_ms": sum(ms) / len(ms),
        "worst_ms": max(ms),
        "requests": len(ms),
        "given_up": served.given_up,
    }


def rate(lab: Lab, programs: Sequence[Products], seconds: float) -> float:
    """Return the products per second of all together, from now on."""
    before, start = sum(one.done for one in programs), lab.now()
    lab.sleep(seconds)
    return (sum(one.done for one in programs) - before) / (lab.now() - start)


@attrs.define
class Bench:
    """The part that all systems have in common."""

    lab: Lab
    kind: str
    """Kind of critical program: decode or convolution."""
    seed: int
    service_s: float = 0.0
    """Seconds that a request takes alone, once measured."""

    def calibrate(self) -> Mapping[str, Any]:
        """Measure requests back to back, alone: the time of all divided by their number."""
        with self.lab.critical([], self.kind) as critical:
            served = critical.serve([0.0] * CALIBRATION, 60.0)
        self.service_s = max(served.latencies) / CALIBRATION
        return {"service_ms": 1e3 * self.service_s}

    def burst(self, critical: Critical, load: float, repetition: int, stage: Stage | None = None) -> Served:
        """Send the requests of that load and repetition, which are the same each time."""
        due = arrivals(load / self.service_s, SECONDS, seed_of(self.seed, self.kind, load, repetition))
        return critical.serve(due, 2 * SECONDS, None if stage is None else stage.report)


@attrs.define
class Alone:
    """The critical program with the GPU to itself; then one batch program."""

    bench: Bench
    name: str = EXCLUSIVE

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        lab = self.bench.lab
        with lab.critical([], self.bench.kind) as critical:
            for load in LOADS:
                yield {"load": load}, waited(self.bench.burst(critical, load, repetition))
        with lab.products([]) as batch:
            batch.work(True)
            yield {}, {"batch_per_s": rate(lab, [batch], SECONDS)}


@attrs.define
class Beside:
    """All of them on one GPU, under some system."""

    bench: Bench
    system: System

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        lab = self.bench.lab
        with self.system.enter() as stage, contextlib.ExitStack() as stack:
            critical = stack.enter_context(lab.critical(stage.words(CRITICAL), self.bench.kind))
            batch = [stack.enter_context(lab.products(stage.words(BATCH))) for _ in range(max(OTHERS))]
            for others in OTHERS:
                for one in batch[:others]:
                    one.work(True)
                stage.share([(CRITICAL, critical), *((BATCH, one) for one in batch[:others])])
                lab.sleep(SETTLE_S)
                for load in LOADS:
                    before, start = sum(one.done for one in batch), lab.now()
                    served = self.bench.burst(critical, load, repetition, stage)
                    done = (sum(one.done for one in batch) - before) / (lab.now() - start)
                    yield {"load": load, "batch": others}, {**waited(served), "batch_per_s": done}
            for one in batch:
                one.work(False)


def maker(kind: str) -> Any:
    """Return a function that makes the scenario for a kind of critical program."""

    def make(lab: Lab, seed: int, compared: Sequence[System] | None = None) -> Scenario:
        bench = Bench(lab, kind, seed)
        subjects: list[Subject] = [
            Alone(bench),
            *(Beside(bench, one) for one in (systems() if compared is None else compared)),
        ]
        fixed = {"seed": seed, "shape": SHAPE, "seconds": SECONDS, "settle_s": SETTLE_S, "kind": kind}
        return Scenario(f"latency-{kind}", EXCLUSIVE, subjects, bench.calibrate, fixed)

    return make
