"""Whole GPUs: each job has its GPUs to itself, whatever it requests.

Use it when jobs fill their GPUs, when a fault of one program must not affect another, or when there is nothing else. It
is the reference of the table: no job is slowed down, and whatever a job leaves unused of a GPU is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggroupfs.replay.cluster.jobs import WHOLE, ClusterJob
from ggroupfs.replay.cluster.placement import State, Taken


class Whole:
    """Placement of one job per GPU; the state of a GPU is whether it has one."""

    name = "whole"
    empty: State = False

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return the GPU if it is free."""
        return None if state else Taken(True, 0)

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return a free GPU."""
        return False

    def full(self, state: State) -> int:
        """Return 100 for a GPU with a job."""
        return WHOLE if state else 0

    def need(self, job: ClusterJob) -> int:
        """Return 100: the whole GPU."""
        return WHOLE

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return 1 for each job: it is alone."""
        return [1.0] * len(jobs)
