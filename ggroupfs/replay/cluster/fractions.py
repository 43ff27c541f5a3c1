"""Fixed fractions: each GPU is cut into equal slots of memory and time, and a job gets some slots of one GPU.

Use it when limits have to be simple to explain and never change: a limit for each replica of a device plugin, or a
percentage for a container. A job never gets more time than its slots, even if the rest of the GPU is idle, and it also
waits for its turn: it gets the lesser of both. The excess of the slots over the job's needs is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggroupfs.replay.cluster.contention import paces
from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import State, Taken

SLOTS = 4
"""Slots of a GPU; device plugins use four replicas in their examples."""


class Fractions:
    """Placement by slots.

    The state of a GPU is the number of its taken slots; the place of a job is the number of its own.
    """

    name = "fractions"
    empty: State = 0

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return as many slots as the job's memory and share need."""
        assert isinstance(state, int)
        needed = self._slots(job)
        return Taken(state + needed, needed) if state + needed <= SLOTS else None

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return the GPU without the job's slots."""
        assert isinstance(state, int)
        return state - place

    def full(self, state: State) -> int:
        """Return the fraction of the slots that are taken, percent."""
        assert isinstance(state, int)
        return state * WHOLE // SLOTS

    def need(self, job: ClusterJob) -> int:
        """Return the fraction of the slots that the job needs, percent."""
        return self._slots(job) * WHOLE // SLOTS

    @staticmethod
    def _slots(job: ClusterJob) -> int:
        return -(-max(job.share, job.memory) * SLOTS // WHOLE)

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return the pace of each job: that of turns by slots, limited to the time of its slots."""
        turns = paces([(job.busy, slots) for job, slots in jobs])
        return [
            min(pace, slots / SLOTS / job.busy) if job.busy else pace
            for pace, (job, slots) in zip(turns, jobs, strict=True)
        ]
