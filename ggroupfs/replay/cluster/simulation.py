"""The simulation: jobs arrive, wait, run at the pace that their neighbours leave them, and end.

There is one queue for each number of GPUs, in order of arrival, and the widest is served first. So a job of one GPU may
overtake one of eight for which there is no room, but never another of one. A job stays in its place to its end. Nothing
is random: the same trace gives the same figures.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

import attrs

from ggroupfs.replay.cluster.fleet import Fleet, Spot
from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import Placement


@attrs.define(eq=False)
class Run:
    """A job that runs, or has run."""

    job: ClusterJob
    number: int
    """Index in the trace."""
    spot: Spot
    started_s: float
    left_s: float
    """Seconds of its run time that remain at `since_s`."""
    pace: float = 0.0
    since_s: float = 0.0
    """Time to which `left_s` refers."""
    ended_s: float | None = None


@attrs.frozen
class Use:
    """The use of the GPUs over the measured time."""

    peak: int
    """Largest number of GPUs with a job."""
    mean: float
    """GPUs with a job, mean over the day."""
    asked: float
    """Shares requested by running jobs, mean over the day, in GPUs."""
    busy: float
    """GPUs at work, mean over the day."""


Watch = Callable[[float, int, Sequence[Run]], None]
"""Called after each change with the time, a GPU, and all jobs on it."""


class Simulation:
    """The simulation of one trace on one fleet."""

    def __init__(
        self,
        trace: Sequence[ClusterJob],
        placement: Placement,
        fleet: Fleet,
        until_s: float,
        watch: Watch | None = None,
    ) -> None:
        """Use is measured until `until_s`. ValueError for a job that fits on no node."""
        for job in trace:
            if not fleet.holds(job):
                raise ValueError(f"{job.job} fits on no node: {job.gpus} GPUs, {job.memory} % of memory")
        self._trace = sorted(trace, key=lambda job: job.arrival_s)
        self._placement = placement
        self._fleet = fleet
        self._until = until_s
        self._watch = watch
        self._on: dict[int, list[Run]] = {}
        self._ends: list[tuple[float, int, float]] = []  # (time, number of the job, its pace at that time)
        self._lines: dict[int, deque[int]] = {}
        self._runs: dict[int, Run] = {}
        self._now = 0.0
        self._asked = self._working = 0.0
        self._peak = 0
        self._integrals = [0.0, 0.0, 0.0]

    def run(self) -> tuple[list[Run], Use]:
        """Run the trace; return the run of each job, by arrival, and the use of the GPUs."""
        arrivals, number = self._trace, 0
        while number < len(arrivals) or self._ends:
            if number < len(arrivals) and (not self._ends or arrivals[number].arrival_s <= self._ends[0][0]):
                self._pass_to(arrivals[number].arrival_s)
                self._arrive(number)
                number += 1
            else:
                when, ended, pace = heapq.heappop(self._ends)
                run = self._runs[ended]
                if run.ended_s is None and run.pace == pace and self._end_of(run) == when:
                    self._pass_to(when)
                    self._end(run)
        if any(self._lines.values()):
            raise RuntimeError("jobs wait on an empty cluster")
        mean, asked, busy = (total / self._until for total in self._integrals)
        return [self._runs[number] for number in range(len(arrivals))], Use(self._peak, mean, asked, busy)

    def _pass_to(self, when: float) -> None:
        passed = max(0.0, min(when, self._until) - self._now)
        for index, value in enumerate((self._fleet.in_use, self._asked, self._working)):
            self._integrals[index] += value * passed
        self._now = when

    def _arrive(self, number: int) -> None:
        line = self._lines.setdefault(self._trace[number].gpus, deque())
        line.append(number)
        if len(line) == 1:
            self._serve(line)

    def _serve(self, line: deque[int]) -> None:
        while line:
            job = self._trace[line[0]]
            spot = self._fleet.place(job)
            if spot is None:
                return
            run = Run(job, line.popleft(), spot, self._now, job.duration_s, since_s=self._now)
            self._runs[run.number] = run
            self._asked += job.gpus * job.share / WHOLE
            for gpu in spot.gpus:
                self._on.setdefault(gpu, []).append(run)
            self._repace(spot.gpus)
            self._peak = max(self._peak, self._fleet.in_use)

    def _end(self, run: Run) -> None:
        run.ended_s, run.left_s = self._now, 0.0
        self._fleet.leave(run.job, run.spot)
        self._asked -= run.job.gpus * run.job.share / WHOLE
        self._working -= run.job.gpus * run.job.busy * run.pace
        for gpu in run.spot.gpus:
            self._on[gpu].remove(run)
        self._repace(run.spot.gpus)
        for width in sorted(self._lines, reverse=True):
            line = self._lines[width]
            # The first job of a queue had no room before, and only these GPUs have more now.
            if line and self._fleet.room(self._trace[line[0]], run.spot.gpus[0]):
                self._serve(line)

    def _repace(self, gpus: Sequence[int]) -> None:
        """Update the pace of all jobs on some GPUs. A job of several is alone on each of them."""
        runs = self._on[gpus[0]]
        paces = self._placement.paces([(run.job, run.spot.place) for run in runs])
        for run, pace in zip(runs, paces, strict=True):
            if pace != run.pace:
                self._working += run.job.gpus * run.job.busy * (pace - run.pace)
                run.left_s -= (self._now - run.since_s) * run.pace
                run.since_s, run.pace = self._now, pace
                heapq.heappush(self._ends, (self._end_of(run), run.number, pace))
        if self._watch is not None:
            for gpu in gpus:
                self._watch(self._now, gpu, self._on[gpu])

    @staticmethod
    def _end_of(run: Run) -> float:
        return run.since_s + max(0.0, run.left_s) / run.pace
