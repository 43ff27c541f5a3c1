"""Salus' trace of 100 jobs (its table 2) and its searches of 300 equal jobs (5.2), in virtual time.

Each repetition is another trace, by its seed. ggroupfs/replay/workloads.py says how much of a trace was published, and
docs/policies/replay.md what is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ggroupfs.policies.lanes import Lanes, Order
from ggroupfs.replay.simulator import Machine, Simulator
from ggroupfs.replay.trace import TraceJob
from ggroupfs.replay.workloads import equal, salus
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario

REFERENCE = "FIFO"
SEARCHES = ("superres_128", "resnet50_50")


def replayed(trace: Sequence[TraceJob], order: Order) -> Figures:
    """Return the figures of table 2."""
    machine = Machine()
    summary = Simulator(trace, Lanes(machine.capacity, order), machine).run().summary()
    return {
        "makespan_min": summary.makespan_s / 60,
        "completion_min": summary.completion_mean_s / 60,
        "completion_p95_min": summary.completion_p95_s / 60,
    }


@attrs.define
class Ordered:
    """The policy lanes, with one of its orders."""

    order: Order
    seed: int
    jobs: int
    """Number of jobs of the trace; a search has three times as many."""

    @property
    def name(self) -> str:
        """Name in the paper."""
        return self.order.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject. The searches are deterministic, and replayed once."""
        yield {"trace": "table 2"}, replayed(salus(self.seed + repetition, self.jobs), self.order)
        if repetition == 0 and self.order in (Order.FIFO, Order.PACK):
            for name in SEARCHES:
                yield {"trace": f"{3 * self.jobs} x {name}"}, replayed(equal(name, 3 * self.jobs), self.order)


def make(seed: int, jobs: int = 100) -> Scenario:
    """Return the scenario."""
    subjects = [Ordered(order, seed, jobs) for order in Order]
    return Scenario("salus", REFERENCE, subjects, parameters={"seed": seed, "jobs": jobs})
