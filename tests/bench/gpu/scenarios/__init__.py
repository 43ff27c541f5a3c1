"""The scenarios that need a GPU, by name. Each can be run alone, within its own time budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from tests.bench.core.runner import Scenario
from tests.bench.gpu.faces import Lab
from tests.bench.gpu.scenarios import (
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

Make = Callable[[Lab, int], Scenario]
"""Makes a scenario for a lab and a seed."""


@attrs.frozen
class Entry:
    """A scenario that can be run by name."""

    make: Make
    budget: float
    """Time that it may take unless another is requested, seconds."""
    repetitions: int
    """Largest number of repetitions."""
    by_default: bool = True
    """Whether it is run when no name is given."""


SCENARIOS: Mapping[str, Entry] = {
    "latency-decode": Entry(latency.maker("decode"), 300, 3),
    "latency-convolution": Entry(latency.maker("convolution"), 300, 3),
    "pressure": Entry(pressure.make, 520, 3),
    "pareto": Entry(pareto.make, 280, 3),
    "policies": Entry(policies.make, 190, 3),
    "levers": Entry(levers.make, 35, 3),
    "fairness": Entry(fairness.make, 95, 3),
    "bandwidth": Entry(bandwidth.make, 75, 3),
    critical.NAME: Entry(critical.make, 110, 1, by_default=False),
    **{
        f"oversubscribed-{name}": Entry(oversubscribed.maker(f"oversubscribed-{name}", mixes()), budget, 1, False)
        for name, mixes, budget in (
            ("decode", oversubscribed.decoding, 300),
            ("inference", oversubscribed.inference, 150),
            ("mixed", oversubscribed.mixed, 160),
            ("science", oversubscribed.science, 130),
        )
    },
}
