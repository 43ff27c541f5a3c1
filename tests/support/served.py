"""A GPU on which the policy `slo` keeps the latency of services with changing load, in simulated time.

Engine, scheduler and policy are the real ones: the runlist of the software GPU, the daemon's scheduler core, and the
policy's core with the code that turns its points into weights and priorities. Requests arrive at random.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import attrs

from ggroupfs.policies.slo.core import Bounds, Change, Core, Decision, Pace
from ggroupfs.policies.slo.levers import wanted
from ggroupfs.policies.slo.samples import Interval, Statistic
from tests.support.scheduled import Machine, Program

SETTLED_S = 30.0
"""Seconds of six windows with their cool-downs: enough to rise from the smallest share to what the load needs."""

REQUEST_US = 8_600
PRIORITY, DEFAULT_PRIORITY = 7, 8

Load = Callable[[float], float]
"""Fraction of a GPU that the requests need, as a function of the time in seconds."""


def service(pid: int, load: Load, seconds: float, seed: int) -> Program:
    """Return a program that serves requests of 8.6 ms as they arrive."""
    program = Program(pid, request_us=REQUEST_US, kernel_us=REQUEST_US, load=1.0, starts_us=1 << 50)
    chance, at, most = random.Random(seed), 0.0, 1.0
    arrivals = []
    while at < seconds:
        at += chance.expovariate(most / (REQUEST_US / 1e6))
        if chance.random() < load(at) / most:
            arrivals.append(int(at * 1e9))
    program.arrivals = arrivals  # the machine reverses the list
    return program


@attrs.frozen
class Sample:
    """One interval of one service."""

    at: float
    """End of the interval, in seconds."""
    latency: float
    """Latency in seconds."""
    share: int
    """Share in points."""


class Served:
    """The simulation; see the module."""

    def __init__(
        self,
        services: Mapping[str, tuple[Program, Bounds]],
        batch: Sequence[Program],
        pace: Pace,
        *,
        interval: float = 1.0,
        statistic: str = "p90",
        reserve: int = 0,
    ) -> None:
        self.machine = Machine(*[program for program, _ in services.values()], *batch)
        self.core = Core(pace, reserve)
        self.pace = pace
        self.decisions: list[tuple[float, Decision]] = []
        """Decisions, each with its time in seconds."""
        self.samples: dict[str, list[Sample]] = {name: [] for name in services}
        self._programs = {name: program for name, (program, _) in services.items()}
        self._intervals = {name: Interval(Statistic(statistic)) for name in services}
        self._seen = dict.fromkeys(services, 0)
        self._batch = batch
        self._interval = interval
        for name, (_, bounds) in services.items():
            self._note(self.core.come(0.0, name, bounds))
        self._apply()

    @property
    def now(self) -> float:
        """Simulated time in seconds."""
        return self.machine.runlist.now / 1e9

    def run(self, until: float) -> Served:
        """Advance the simulation to the time `until`, in seconds."""
        while self.now < until:
            self.machine.run(self._interval)
            for name, program in self._programs.items():
                fresh = program.latencies[self._seen[name] :]
                self._seen[name] += len(fresh)
                self._intervals[name].add(one / 1e9 for one in fresh)
                sample = self._intervals[name].take()
                if sample is not None:
                    self.core.sample(self.now, name, sample)
                    self.samples[name].append(Sample(self.now, sample, self.core.shares[name]))
            self._note(self.core.decide(self.now))
            self._apply()
        return self

    def changes(self, name: str = "a", since: float = 0.0, until: float = 1e9) -> list[tuple[float, int]]:
        """Return each change of a service's share after the first: its time in seconds and the change in points."""
        return [
            (at, one.share - one.was)
            for at, one in self.decisions
            if isinstance(one, Change) and one.group == name and at > 0 and since <= at < until
        ]

    def turns(self, name: str = "a", since: float = 0.0, until: float = 1e9) -> int:
        """Return how many changes had the opposite direction of the change before."""
        steps = [step for _, step in self.changes(name, since, until)]
        return sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))

    def mean(self, since: float, until: float, name: str = "a") -> float:
        """Return the mean of the samples, in seconds."""
        found = [one.latency for one in self.samples[name] if since < one.at <= until]
        return sum(found) / len(found)

    def _note(self, decisions: Sequence[Decision]) -> None:
        self.decisions += [(self.now, one) for one in decisions]

    def _apply(self) -> None:
        shares, rest = wanted(self.core.shares, len(self._batch), PRIORITY)
        for name, what in shares.items():
            program = self._programs[name]
            assert what.weight is not None
            program.weight = what.weight
            program.priority = DEFAULT_PRIORITY if what.priority is None else what.priority
        for program in self._batch:
            assert rest.weight is not None
            program.weight = rest.weight
