"""A server of bursts and a batch program in a budget that is less than both could use: three ways to share the memory.

A static split, as MIG would have it; `ggroupfs policy dynamic`, whose limit follows the server's load; and `ggroupfs
policy cooperative`, where the batch program frees what it can recompute. The programs are those of
tests/t7_nvidia/t7_dynamic.py: 16 GiB in a budget of 14. The server has compute.priority 0 in all three.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from tests.bench.core.arrivals import seed_of
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario
from tests.bench.core.spread import percentile
from tests.bench.gpu.faces import Lab

REFERENCE = "ggroupfs, static split"


@attrs.define
class Way:
    """One of the three ways."""

    lab: Lab
    name: str
    how: str
    """Its name for `Lab.shared`."""
    seed: int

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        found = self.lab.shared(self.how, seed_of(self.seed, repetition))
        ms = [1e3 * one for one in found.latencies]
        waited = {"p50_ms": percentile(ms, 0.5), "p99_ms": percentile(ms, 0.99), "requests": float(len(ms))}
        yield {}, {**waited, "batch_per_s": found.throughput}


def make(lab: Lab, seed: int) -> Scenario:
    """Return the scenario."""
    names = {REFERENCE: "static", "ggroupfs, dynamic": "dynamic", "ggroupfs, cooperative": "cooperative"}
    subjects = [Way(lab, name, how, seed) for name, how in names.items()]
    return Scenario("policies", REFERENCE, subjects, parameters={"seed": seed})
