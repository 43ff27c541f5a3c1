"""Shares: what ggroupfs does. A job has the memory that it holds, to the percent, and time by its weight.

Use `shares` when jobs say what they need and are to have it: a GPU is full once its shares or its memory are. What a
job leaves of its time the others have. Use `memory` when most jobs compute seldom: shares are weights alone, and a GPU
is full once its memory is. That needs the fewest GPUs, and slows those jobs that do compute; jobs of several GPUs have
theirs whole in both. Neither isolates faults, and neither runs two kernels at the same time, as MIG does.

Memory is a limit (`gmem.limit.high`) that a job keeps to: none is moved out to make room.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggroupfs.replay.cluster.contention import paces
from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import State, Taken


class Shares:
    """See the module. The state is the share and the memory that are taken, percent."""

    name = "shares"
    empty: State = (0, 0)

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return the room for the job, by share and memory."""
        assert isinstance(state, tuple)
        share, memory = state[0] + self.counted(job), state[1] + job.memory
        return Taken((share, memory), 0) if share <= WHOLE and memory <= WHOLE else None

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return the GPU without the job."""
        assert isinstance(state, tuple)
        return (state[0] - self.counted(job), state[1] - job.memory)

    def full(self, state: State) -> int:
        """Return the share that is taken."""
        assert isinstance(state, tuple)
        return int(state[0])

    def need(self, job: ClusterJob) -> int:
        """Return its share."""
        return self.counted(job)

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return the pace of each job by its weight, which is its share."""
        return paces([(job.busy, job.share) for job, _ in jobs])

    def counted(self, job: ClusterJob) -> int:
        """Return the share that is booked for a job, percent."""
        return job.share


class Memory(Shares):
    """See the module: shares are weights, and book nothing."""

    name = "memory"

    def counted(self, job: ClusterJob) -> int:
        """Return the least there is, so that none joins a job of several GPUs, which has them whole."""
        return WHOLE if job.gpus > 1 else 1

    def full(self, state: State) -> int:
        """Return the memory that is taken, percent."""
        assert isinstance(state, tuple)
        return int(state[1])

    def need(self, job: ClusterJob) -> int:
        """Return its memory, percent."""
        return job.memory
