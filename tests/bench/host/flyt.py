"""Flyt's table 6 in virtual time: the mean latency of a critical program beside none to four of best effort.

That is what there is to replay: the paper publishes no trace, and of the programs of its table 7 neither their
service times nor their bounds. The critical program's requests come at random, for half of the time of a GPU, since in
the paper it has 8 of 16 SMs. Engine, scheduler and policy are the real ones (tests/served.py); with time slicing there
is the runlist alone. A repetition has other requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from ggroupfs.policies.slo.core import Bounds, Pace
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario
from tests.served import Served, service
from tests.t2_scheduler import Machine, Program

REFERENCE = "alone"
OTHERS = (1, 2, 3, 4)
LOAD, SECONDS, BEGUN_S = 0.5, 60.0, 20.0
"""The policy finds the share in the first seconds, which do not count."""
WITHIN = 1.02
"""The paper's bound on how much slower the critical program is beside others."""
PACE = Pace(window=3, cooldown=1.0, silence=60.0)


def critical(seed: int) -> Program:
    """Its requests, the same for the same seed, the last first: the machine takes them from the end."""
    return service(1, lambda _: LOAD, SECONDS, seed)


def mean(program: Program, begun: int) -> float:
    """Seconds, of the requests from that one on."""
    found = program.latencies[begun:]
    return sum(found) / len(found) / 1e9


def sliced(seed: int, others: int, seconds: float) -> tuple[float, float]:
    """Mean latency, and the others' part of the GPU, with equal turns for all."""
    program, batch = critical(seed), [Program(2 + number) for number in range(others)]
    machine = Machine(program, *batch, schedule=False)
    machine.run(BEGUN_S)
    begun, used = len(program.latencies), sum(one.used for one in batch)
    machine.run(seconds - BEGUN_S)
    return mean(program, begun), (sum(one.used for one in batch) - used) / (seconds - BEGUN_S) / 1e9


def kept(seed: int, others: int, seconds: float, upper: float) -> tuple[float, float]:
    """The same, with the policy slo."""
    program, batch = critical(seed), [Program(2 + number) for number in range(others)]
    bounds = Bounds(upper=upper, lower=upper / 2)
    served = Served({"critical": (program, bounds)}, batch, PACE, statistic="mean").run(BEGUN_S)
    begun, used = len(program.latencies), sum(one.used for one in batch)
    served.run(seconds)
    return mean(program, begun), (sum(one.used for one in batch) - used) / (seconds - BEGUN_S) / 1e9


@attrs.define
class Beside:
    """One system, or nobody beside it."""

    name: str
    seed: int
    seconds: float = SECONDS

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """See runner.Subject."""
        seed = self.seed + repetition
        alone, _ = sliced(seed, 0, self.seconds)
        if self.name == REFERENCE:
            yield {}, {"mean_ms": 1e3 * alone}
            return
        for others in OTHERS:
            if self.name == "time slicing":
                latency, part = sliced(seed, others, self.seconds)
            else:
                latency, part = kept(seed, others, self.seconds, WITHIN * alone)
            figures = {"mean_ms": 1e3 * latency, "latency_ratio": latency / alone, "others_part": part}
            yield {"others": others}, figures


def make(seed: int, seconds: float = SECONDS) -> Scenario:
    """The scenario."""
    names: Sequence[str] = (REFERENCE, "time slicing", "ggroupfs, slo")
    fixed = {"seed": seed, "load": LOAD, "seconds": seconds, "begun_s": BEGUN_S}
    return Scenario("flyt", REFERENCE, [Beside(name, seed, seconds) for name in names], parameters=fixed)
