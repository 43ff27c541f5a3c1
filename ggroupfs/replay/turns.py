"""Simulate memory turns of jobs in a trace, on one GPU in virtual time, with the planner of the daemon. Pure.

Each job runs from its arrival. If the memory that all of them use exceeds the capacity, they take turns (``-o
turns=on``). With turns off, each job keeps the room that it found when it came. A job uses all of its memory in each
iteration, and reads the part in the host over the bus each time. Running jobs share the engine: all slow down by the
factor by which their total need exceeds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from backend.scheduler.memory.claims import Claim, Name, Rates
from backend.scheduler.memory.gangs import Ties
from backend.scheduler.memory.moves import Moves, Share, after
from backend.scheduler.memory.planner import Plan, Planner, Program
from backend.scheduler.memory.turns import OVERHEAD_US, WAIT_US, Waiter
from ggroupfs.replay.records import Change, Outcome, Result, Span
from ggroupfs.replay.simulator import Machine
from ggroupfs.replay.trace import US, TraceJob

PIECE_US = 10_000
"""Time between two looks while memory moves, microseconds."""
LEVERS_US = 150_000
"""Time in which the driver calls of one turn of a job come back into the budget, microseconds: three calls at 20 a
second.
"""
GPU = 0
"""Index of the only GPU."""


@attrs.define(eq=False)
class Running:
    """A job that has arrived and has not ended."""

    trace: TraceJob
    left_us: float
    """Remaining time with the GPU to itself, microseconds."""
    resident: int = 0
    """Bytes of its memory on the GPU."""
    since_us: int | None = None
    """Time since which it has run without a break, microseconds; None while it waits."""
    lane: int = 0
    """Number of its set in that time."""
    service_us: float = 0.0
    """Engine time used, microseconds."""
    withdrawals: int = 0
    """Number of times that a move of its memory to the host began while all of it was on the GPU."""

    @property
    def used(self) -> int:
        """Bytes that one iteration uses."""
        return self.trace.persistent + self.trace.ephemeral

    @property
    def needs(self) -> float:
        """The fraction of the engine that it would use alone."""
        return self.trace.gpu_us / (self.trace.gpu_us + self.trace.idle_us)

    def speed(self, machine: Machine) -> float:
        """Return its speed with its present memory on the GPU, relative to that with all of it."""
        alone_us = self.trace.gpu_us + self.trace.idle_us
        return alone_us / (alone_us + (self.used - self.resident) * 1e6 / machine.pcie)


class TurnsSimulator:
    """The simulation of one trace."""

    def __init__(
        self, trace: Sequence[TraceJob], machine: Machine | None = None, wait_us: int = WAIT_US, is_on: bool = True
    ) -> None:
        """A job waits at most `wait_us` microseconds for its turn. If `is_on` is false there are no turns."""
        self.machine = machine or Machine()
        self._trace = trace
        self._wait_us = wait_us
        self._is_on = is_on
        self._planner = Planner(Rates(self.machine.pcie, self.machine.pcie))
        self._plan = Plan()
        self._now_us = 0
        self._starts_us: int | None = None  # when the next turn begins, once that is decided
        self._coming = sorted(trace, key=lambda job: -job.arrival_us)
        self._jobs: dict[str, Running] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._ran: list[Span] = []
        self._changes: list[Change] = []
        self._switches = 0
        self._peak = 0

    def run(self) -> Result:
        """Simulate up to the end of the last job; return the result."""
        while self._coming or self._jobs:
            self._arrive()
            self._decide()
            self._pass(self._next_us())
        outcomes = [self._outcomes[job.job] for job in self._trace]
        return Result(self.machine.capacity, outcomes, self._ran, (), self._switches, self._peak, self._changes)

    def _arrive(self) -> None:
        while self._coming and self._coming[-1].arrival_us <= self._now_us:
            trace = self._coming.pop()
            job = Running(trace, trace.duration_us)
            if job.used > self.machine.capacity:
                self._outcomes[trace.job] = Outcome(trace, None, None, 0, 0)
                continue
            self._jobs[trace.job] = job
            self._have(job, min(job.used, self._free()))

    def _free(self) -> int:
        return self.machine.capacity - sum(job.resident for job in self._jobs.values())

    def _have(self, job: Running, resident: int) -> None:
        """Set the bytes of a job that are on the GPU from now on."""
        if resident < job.resident == job.used:
            job.withdrawals += 1
        if resident != job.resident:
            self._changes.append(Change(self._now_us * US, job.trace.job, resident - job.resident))
        job.resident = resident
        self._peak = max(self._peak, self.machine.capacity - self._free())

    # Turns

    def _programs(self) -> Mapping[Name, Program]:
        waiter = Waiter(self._wait_us, levers_us=LEVERS_US)
        ties = Ties(frozenset({GPU}), is_known=True)
        return {name: Program({GPU: Claim(job.used, job.resident)}, ties, waiter) for name, job in self._jobs.items()}

    def _decide(self) -> None:
        """Make a plan for the present. End a turn that is over, and begin the next one once it is due."""
        if not self._is_on:
            self._note(Plan())
            return
        programs, rooms, now_us = self._programs(), {GPU: self.machine.capacity}, self._now_us
        plan = self._planner.decide(now_us, programs, rooms)
        if plan.has_turns and not plan.is_over and plan.ends_us is not None and now_us >= plan.ends_us:
            self._planner.end(now_us)
            self._starts_us = None
            plan = self._planner.decide(now_us, programs, rooms)
        if not plan.has_turns or not plan.is_over:
            self._starts_us = None
        elif self._starts_us is None and (now_us >= (plan.ends_us or 0) or not plan.moves[GPU].ins):
            self._starts_us = now_us + OVERHEAD_US
        if self._starts_us is not None and now_us >= self._starts_us:
            self._planner.begin(now_us)
            self._starts_us = None
            self._switches += 1
            plan = self._planner.decide(now_us, programs, rooms)
        self._note(plan)

    def _note(self, plan: Plan) -> None:
        self._plan = plan
        sets = {name: number for number, one in enumerate(plan.sets, 1) for name in one}
        for name, job in self._jobs.items():
            if name in plan.waits:
                self._stop(job)
            elif job.since_us is None:
                job.since_us, job.lane = self._now_us, sets.get(name, 0)

    def _stop(self, job: Running) -> None:
        if job.since_us is not None and job.since_us < self._now_us:
            self._ran.append(Span(job.trace.job, job.since_us * US, self._now_us * US, job.lane))
        job.since_us = None

    # Time

    def _speeds(self) -> Mapping[str, float]:
        """Return the work that each running job does per microsecond."""
        speeds = {n: job.speed(self.machine) for n, job in self._jobs.items() if n not in self._plan.waits}
        needed = sum(self._jobs[name].needs * speed for name, speed in speeds.items())
        return {name: speed / max(1.0, needed) for name, speed in speeds.items()}

    def _next_us(self) -> int:
        """Return the time of the first event that may change the plan."""
        times: list[float] = [self._coming[-1].arrival_us] if self._coming else []
        times += [self._now_us + -(-self._jobs[name].left_us // speed) for name, speed in self._speeds().items()]
        if self._plan.has_turns:
            times += [at for at in (self._plan.ends_us, self._starts_us) if at is not None and at > self._now_us]
        if self._is_on and any(job.resident < job.used for job in self._jobs.values()):
            times.append(self._now_us + PIECE_US)
        return max(self._now_us + 1, round(min(times, default=self._now_us)))

    def _pass(self, until_us: int) -> None:
        usec = until_us - self._now_us
        for name, speed in self._speeds().items():
            job = self._jobs[name]
            job.left_us -= usec * speed
            job.service_us += usec * speed * job.needs
        moves = self._plan.moves.get(GPU, Moves())
        self._now_us = until_us
        self._move(moves, usec)
        for name, job in list(self._jobs.items()):
            if job.left_us <= 1e-6:
                self._depart(name, job)

    def _move(self, moves: Moves, usec: int) -> None:
        """Move memory for `usec` microseconds. Memory that comes needs room that is free, or has become free by
        then.
        """
        most = self._planner.rates.into_in(usec)
        outs = _first(moves.outs, most)
        claims = {name: one.claims[GPU] for name, one in self._programs().items()}
        # What a job still lacks comes in its turn without a plan, also once there are no turns any more, and before
        # what is planned for the next turn.
        runs = [name for name in claims if name not in self._plan.waits and self._is_on]
        wanted = [*(Share(name, claims[name].missing) for name in runs), *moves.ins]
        ins = _first(wanted, min(most, self._free() + sum(share.nbytes for share in outs)))
        made = after(claims, Moves(outs, ins))
        for name in sorted(made, key=lambda name: made[name].resident - claims[name].resident):
            self._have(self._jobs[str(name)], made[name].resident)

    def _depart(self, name: str, job: Running) -> None:
        self._stop(job)
        self._have(job, 0)
        del self._jobs[name]
        arrived, finished = job.trace.arrival_us * US, self._now_us * US
        started = min((span.start for span in self._ran if span.job == name), default=arrived)
        self._outcomes[name] = Outcome(job.trace, started, finished, round(job.service_us * US), job.withdrawals)


def _first(shares: Sequence[Share], most: int) -> Sequence[Share]:
    """Return the first of some shares, up to `most` bytes in total."""
    found = []
    for share in shares:
        nbytes = min(share.nbytes, most)
        most -= nbytes
        if nbytes:
            found.append(Share(share.name, nbytes))
    return found
