"""Placement: what a policy says of one GPU. The search over all GPUs is the same for each (`fleet.py`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import attrs

from ggroupfs.replay.cluster.jobs import ClusterJob

State = Hashable
"""What a policy knows of one GPU: equal for GPUs that are equal to it."""


@attrs.frozen
class Taken:
    """A place that a job has on one GPU."""

    state: State
    """State of the GPU with the job on it."""
    place: int
    """What the policy needs to know to give it back, and for its pace."""


class Placement(Protocol):
    """A policy."""

    name: str
    """Name in the table and on the command line."""
    empty: State
    """State of a GPU without a job."""

    def take(self, state: State, job: ClusterJob) -> Taken | None:
        """Return where the job goes on a GPU of that state, or None where it has no room."""

    def give(self, state: State, job: ClusterJob, place: int) -> State:
        """Return the state of that GPU once the job has left."""

    def full(self, state: State) -> int:
        """Return how full such a GPU is, percent: the fullest one that has room is taken."""

    def need(self, job: ClusterJob) -> int:
        """Return what a job adds to that, at least: where it is more than what is left to 100 there is no room."""

    def paces(self, jobs: Sequence[tuple[ClusterJob, int]]) -> Sequence[float]:
        """Return how fast each job of one GPU goes, with its place; 1 as if alone."""
