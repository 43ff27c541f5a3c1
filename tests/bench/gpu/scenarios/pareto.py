"""The cost of the critical program's SLO for the batch program: Ghost's figure 14, GVM's figure 15.

As there, the SLO is the p99 of the critical program alone, the batch program's throughput is relative to that alone,
and a system is a curve with one point for each timeslice, or memory limit, of the batch program. The programs differ
from the papers': requests as in `latency`, at a load of 35 %, and a program with 8 GiB, half of which is used only in
one pass of eight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.arrivals import SHAPE
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario
from tests.bench.core.spread import percentile
from tests.bench.gpu.faces import Elastic, Lab, Part, Served, System
from tests.bench.gpu.scenarios.latency import EXCLUSIVE, Bench, waited
from tests.bench.gpu.systems import Ggroupfs, Mps, Plain, nothing, priority, slo

LOAD = 0.35
MIB, PARTS = 8192, 64
SLICES_MS = (0.2, 1.0, 2.0, 5.0, 20.0)
"""Timeslices of the batch program, in milliseconds; the critical one has CRITICAL_MS."""
CRITICAL_MS = 10.0
PERCENTS = (100, 85, 70)
"""Percentages of its footprint that the batch program may have on the GPU."""
SLACK = 1.02
"""Factor by which an SLO may be exceeded: the same requests vary a little each time."""
SETTLE_S, MOVE_S, WINDOW_S = 1.0, 3.0, 2.0
CRITICAL, BATCH = Part(critical=True), Part(memory=True)


@attrs.define
class Curve(Bench):
    """The part that all systems have in common."""

    slo_s: float = 0.0
    """p99 alone in seconds, once measured."""

    def prepare(self) -> Mapping[str, Any]:
        """Measure the duration of a request, and the SLO."""
        found = dict(self.calibrate())
        with self.lab.critical([], self.kind) as critical:
            self.burst(critical, LOAD, 0)
            self.slo_s = SLACK * percentile(self.burst(critical, LOAD, 0).latencies, 0.99)
        return {**found, "slo_ms": 1e3 * self.slo_s}

    def figures(self, burst: Callable[[], Served], batch: Elastic | None) -> Figures:
        """Return the figures of a burst, which always has the same requests, and of the batch program's work
        meanwhile."""
        passes, start = batch.passes if batch is not None else 0, self.lab.now()
        served = burst()
        met = sum(one <= self.slo_s for one in served.latencies) / len(served.latencies)
        figures = {"attained": met, **waited(served)}
        if batch is not None:
            figures["passes_per_s"] = (batch.passes - passes) / (self.lab.now() - start)
        return figures


@attrs.define
class Alone:
    """Each program with the GPU to itself."""

    curve: Curve
    name: str = EXCLUSIVE

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        lab = self.curve.lab
        with lab.critical([], self.curve.kind) as critical:
            figures = self.curve.figures(lambda: self.curve.burst(critical, LOAD, 0), None)
        with lab.elastic([], MIB, PARTS) as batch:
            passes, start = batch.passes, lab.now()
            lab.sleep(WINDOW_S)
            yield {}, {**figures, "passes_per_s": (batch.passes - passes) / (lab.now() - start)}


@attrs.frozen
class Point:
    """One setting of a system."""

    timeslice_ms: float | None = None
    """Timeslice of the batch program; None leaves it to the system."""
    percent: int = 100
    """Limit of the batch program, in percent of its footprint."""

    @property
    def case(self) -> Case:
        """The setting as it is recorded."""
        slices: Case = {} if self.timeslice_ms is None else {"timeslice_ms": self.timeslice_ms}
        return {**slices, **({} if self.percent == 100 else {"limit_percent": self.percent})}


@attrs.define
class Points:
    """A system, with one setting after another while both programs run."""

    curve: Curve
    system: System
    points: Sequence[Point] = (Point(),)
    warm: int = 0
    """Number of bursts before those that count, for a system that learns from them."""

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        lab, limited = self.curve.lab, any(point.percent != 100 for point in self.points)
        besides = lab.context_mib() if limited else 0
        with self.system.enter() as stage, contextlib.ExitStack() as stack:
            critical = stack.enter_context(lab.critical(stage.words(CRITICAL), self.curve.kind))
            batch = stack.enter_context(lab.elastic(stage.words(BATCH), MIB, PARTS))
            stage.share([(CRITICAL, critical), (BATCH, batch)])
            for _ in range(self.warm):
                self.curve.burst(critical, LOAD, 0, stage)
            before = Point()
            for point in self.points:
                if point.timeslice_ms is not None and point.timeslice_ms != before.timeslice_ms:
                    stage.write(critical, "compute.timeslice", f"{CRITICAL_MS:g}")
                    stage.write(batch, "compute.timeslice", f"{point.timeslice_ms:g}")
                if point.percent != before.percent:
                    limit = (MIB + besides) * point.percent // 100 << 20
                    stage.write(batch, "gmem.limit.high", "max" if point.percent == 100 else str(limit))
                    lab.sleep(MOVE_S)
                lab.sleep(SETTLE_S)
                yield point.case, self.curve.figures(lambda: self.curve.burst(critical, LOAD, 0, stage), batch)
                before = point


def curves(curve: Curve) -> list[Points]:
    """Return the curves that are compared."""
    limits = [Point(percent=percent) for percent in PERCENTS]
    slices = [Point(timeslice_ms=one) for one in SLICES_MS]
    tight = [Point(timeslice_ms=SLICES_MS[0], percent=percent) for percent in PERCENTS[1:]]
    return [
        Points(curve, Plain("time slicing")),
        Points(curve, Mps("MPS")),
        Points(curve, Mps("MPS, batch at 50 %", lambda part: None if part.critical else 50)),
        Points(curve, Mps("MPS, batch at 25 %", lambda part: None if part.critical else 25)),
        Points(curve, Ggroupfs("ggroupfs", priority), limits),
        Points(curve, Ggroupfs("ggroupfs, timeslices", nothing, ["scheduler=off"]), [*reversed(slices), *tight]),
        Points(curve, Ggroupfs("ggroupfs, slo", slo(lambda: curve.slo_s)), warm=4),
    ]


def make(lab: Lab, seed: int, compared: Callable[[Curve], Sequence[Points]] = curves) -> Scenario:
    """Return the scenario."""
    curve = Curve(lab, "decode", seed)
    fixed = {"seed": seed, "shape": SHAPE, "load": LOAD, "mib": MIB, "critical_ms": CRITICAL_MS}
    return Scenario("pareto", EXCLUSIVE, [Alone(curve), *compared(curve)], curve.prepare, fixed)
