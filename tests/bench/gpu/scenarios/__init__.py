"""The scenarios that need a GPU, by name. Each can be run by itself, within a budget of time of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from tests.bench.core.runner import Scenario
from tests.bench.gpu.faces import Lab
from tests.bench.gpu.scenarios import bandwidth, fairness, latency, levers, pareto, policies, pressure

Make = Callable[[Lab, int], Scenario]
"""Of a lab and a seed."""


@attrs.frozen
class Entry:
    """A scenario that can be asked for."""

    make: Make
    budget: float
    """Seconds that it may take, unless the caller says otherwise."""
    repetitions: int
    """At most."""


SCENARIOS: Mapping[str, Entry] = {
    "latency-decode": Entry(latency.maker("decode"), 300, 3),
    "latency-convolution": Entry(latency.maker("convolution"), 300, 3),
    "pressure": Entry(pressure.make, 520, 3),
    "pareto": Entry(pareto.make, 280, 3),
    "policies": Entry(policies.make, 190, 3),
    "levers": Entry(levers.make, 35, 3),
    "fairness": Entry(fairness.make, 95, 3),
    "bandwidth": Entry(bandwidth.make, 75, 3),
}
