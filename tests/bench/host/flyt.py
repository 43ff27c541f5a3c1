"""Flyt's table 6 in virtual time: the mean latency of a critical program beside none to four of best effort.

That is all that can be replayed: the paper publishes no trace, and for the programs of its table 7 neither service
times nor bounds. The critical program computes half of the time, since in the paper it has 8 of 16 SMs: after a request
it pauses for a random time of about one request. Engine, scheduler and policy are the real ones
(tests/support/served.py); with time slicing there is only the runlist. Each repetition has other pauses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import attrs

from backend.soft.runlist import US, Runlist
from ggroupfs.policies.slo.core import Bounds, Pace
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario
from tests.support.scheduled import Machine, Program
from tests.support.served import REQUEST_US, Served

REFERENCE = "alone"
OTHERS = (1, 2, 3, 4)
SECONDS, BEGUN_S = 60.0, 20.0
"""Seconds of a run, and seconds at its start, in which the policy finds the share, that do not count."""
WITHIN = 1.02
"""Bound of the paper on the slowdown of the critical program beside others."""
PACE = Pace(window=3, cooldown=1.0, silence=60.0)


class Thinking(list[int]):
    """Latencies of a program whose next request comes some time after each one."""

    def __init__(self, program: Program, runlist: Runlist, seed: int) -> None:
        super().__init__()
        self._program, self._runlist, self._chance = program, runlist, random.Random(seed)

    def append(self, latency: int) -> None:
        """Record a finished request, and schedule the next one."""
        super().append(latency)
        think = self._program.request_us * US * self._chance.uniform(0.5, 1.5)
        self._program.arrivals.append(self._runlist.now + int(think))


def programs(others: int) -> list[Program]:
    """Return the critical program, with its first request waiting, and the others."""
    critical = Program(1, request_us=REQUEST_US, kernel_us=REQUEST_US, load=1.0, starts_us=1 << 50)
    critical.arrivals = [0]
    return [critical, *(Program(2 + number) for number in range(others))]


def measured(machine: Machine, run: Callable[[float], object], seed: int, seconds: float) -> tuple[float, float]:
    """Return the mean latency, and the others' fraction of the GPU, after the start. `run` gets an end in seconds."""
    critical, *batch = machine.programs
    critical.latencies = Thinking(critical, machine.runlist, seed)
    run(BEGUN_S)
    begun, used = len(critical.latencies), sum(one.used for one in batch)
    run(seconds)
    found = critical.latencies[begun:]
    part = (sum(one.used for one in batch) - used) / (seconds - BEGUN_S) / 1e9
    return sum(found) / len(found) / 1e9, part


def sliced(seed: int, others: int, seconds: float) -> tuple[float, float]:
    """Measure with equal turns for all."""
    machine = Machine(*programs(others), schedule=False)
    return measured(machine, lambda until: machine.run(until - machine.runlist.now / 1e9), seed, seconds)


def kept(seed: int, others: int, seconds: float, upper: float) -> tuple[float, float]:
    """Measure with the policy slo."""
    critical, *batch = programs(others)
    bounds = Bounds(upper=upper, lower=upper / 2)
    served = Served({"critical": (critical, bounds)}, batch, PACE, statistic="mean")
    return measured(served.machine, served.run, seed, seconds)


@attrs.define
class Beside:
    """One system, or the critical program alone."""

    name: str
    seed: int
    seconds: float = SECONDS

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
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
    """Return the scenario."""
    names: Sequence[str] = (REFERENCE, "time slicing", "ggroupfs, slo")
    fixed = {"seed": seed, "seconds": seconds, "begun_s": BEGUN_S}
    return Scenario("flyt", REFERENCE, [Beside(name, seed, seconds) for name in names], parameters=fixed)
