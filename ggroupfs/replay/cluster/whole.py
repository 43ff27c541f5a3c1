"""Whole GPUs: each job has its GPUs to itself, whatever it asks for.

Use it when jobs fill their GPUs, when a fault of one program may touch no other, or when nothing else is there. It is
the reference of the table: no job is slowed, and every part of a GPU that a job leaves is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import State, Taken


class Whole:
    """See the module. The state is whether a job is there."""

    name = "whole"
    empty: State = False

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return the GPU, where it is free."""
        return None if state else Taken(True, 0)

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return a free GPU."""
        return False

    def full(self, state: State) -> int:
        """Return 100 for one that has a job."""
        return WHOLE if state else 0

    def need(self, job: ClusterJob) -> int:
        """Return all of it."""
        return WHOLE

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return 1: a job is alone."""
        return [1.0] * len(jobs)
