"""Shares, as in ggroupfs: a job gets the memory that it holds, to the percent, and time by its weight.

Use `shares` when jobs state their needs and should get them: a GPU is full once its shares or its memory are. The other
jobs get the time that a job leaves unused. Use `memory` when most jobs compute rarely: shares are only weights, and a
GPU is full once its memory is. That needs the fewest GPUs, and slows down the jobs that do compute. In both, jobs of
several GPUs have theirs whole. Neither isolates faults, and neither runs two kernels at the same time, as MIG does.

Memory is a limit (`gmem.limit.high`) that a job respects: none is moved out to make room.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggroupfs.replay.cluster.contention import paces
from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import State, Taken


class Shares:
    """Placement by share and memory; the state of a GPU is what is taken of both, percent."""

    name = "shares"
    empty: State = (0, 0)

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return room for the job, by share and memory."""
        assert isinstance(state, tuple)
        share, memory = state[0] + self.counted(job), state[1] + job.memory
        return Taken((share, memory), 0) if share <= WHOLE and memory <= WHOLE else None

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return the GPU without the job."""
        assert isinstance(state, tuple)
        return (state[0] - self.counted(job), state[1] - job.memory)

    def full(self, state: State) -> int:
        """Return the share that is taken, percent."""
        assert isinstance(state, tuple)
        return int(state[0])

    def need(self, job: ClusterJob) -> int:
        """Return the share that the job needs, percent."""
        return self.counted(job)

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return the pace of each job by its weight, which is its share."""
        return paces([(job.busy, job.share) for job, _ in jobs])

    def counted(self, job: ClusterJob) -> int:
        """Return the share that is booked for a job, percent."""
        return job.share


class Memory(Shares):
    """Placement by memory alone; shares are weights, and book nothing."""

    name = "memory"

    def counted(self, job: ClusterJob) -> int:
        """Return the smallest share, or all for a job of several GPUs, so that no other joins it."""
        return WHOLE if job.gpus > 1 else 1

    def full(self, state: State) -> int:
        """Return the memory that is taken, percent."""
        assert isinstance(state, tuple)
        return int(state[1])

    def need(self, job: ClusterJob) -> int:
        """Return the memory that the job needs, percent."""
        return job.memory
