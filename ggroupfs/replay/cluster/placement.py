"""Placement: the decisions of a policy about one GPU.

The search over all GPUs is the same for all policies (`fleet.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import attrs

from ggroupfs.replay.cluster.jobs import ClusterJob

State = Hashable
"""Knowledge of a policy about one GPU; equal for GPUs that it treats alike."""


@attrs.frozen
class Taken:
    """The place of a job on one GPU."""

    state: State
    """State of the GPU with the job on it."""
    place: int
    """Information with which the policy frees the place, and computes the pace."""


class Placement(Protocol):
    """A policy of placement."""

    name: str
    """Name in the table and on the command line."""
    empty: State
    """State of a GPU without a job."""

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return the job's place on a GPU of that state, or None if it does not fit."""

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return the state of that GPU once the job has left."""

    def full(self, state: State) -> int:
        """Return how full such a GPU is, percent: the fullest one that has room is taken."""

    def need(self, job: ClusterJob) -> int:
        """Return a lower bound of what a job adds to `full`, percent; the job does not fit if that would exceed 100."""

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return the pace of each job on one GPU, given its place; 1 as if alone."""
