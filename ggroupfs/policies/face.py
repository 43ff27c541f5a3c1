"""The face between a policy and where it runs: events in, decisions out, and the levers that carry them out.

A policy is pure: it has no clock, opens no file and waits for nothing. So the same object runs over a mounted tree
(:mod:`ggroupfs.policies.mounted`) and in the simulator (:mod:`ggroupfs.replay`), and can be tested with neither.
docs/policies/writing.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs

# What a policy is told


@attrs.frozen
class Job:
    """A job as it arrives. All is known beforehand, as Salus assumes (sections 3.3.2 and 4.2)."""

    name: str
    """Its name, unlike any other's."""
    persistent: int
    """Model and framework-internal memory, bytes: P."""
    ephemeral: int
    """Scratch memory of an iteration at its most, bytes: E. It is there only while an iteration runs."""
    duration: int
    """How long it takes with the GPU to itself, nanoseconds."""


@attrs.frozen
class Progress:
    """How far a job is, counted since it arrived."""

    ran: int
    """Time in which an iteration of it was under way, nanoseconds."""
    service: int
    """GPU time that it used, nanoseconds."""


# What a policy decides


@attrs.frozen
class Admit:
    """A job may have memory on the GPU, in a lane; it does not run yet."""

    job: str
    lane: int
    """Number of the lane."""


@attrs.frozen
class Refuse:
    """A job never fits on this GPU, not even alone."""

    job: str


@attrs.frozen
class Move:
    """An admitted job that is between two iterations belongs to another lane from now on."""

    job: str
    lane: int
    """Number of the lane."""


@attrs.frozen
class Run:
    """A job runs from now on, one iteration after the other."""

    job: str


@attrs.frozen
class Pause:
    """A job that is at the end of an iteration does not begin the next one. Its persistent memory stays."""

    job: str


@attrs.frozen
class Withdraw:
    """A paused job waits for admission again, and its persistent memory goes to the host."""

    job: str


Decision = Admit | Refuse | Move | Run | Pause | Withdraw


class Policy(Protocol):
    """Who runs. Each event is answered with what follows from it, to be done in that order.

    A job that was told to run goes on until it is told to pause; that may be told it only where its iteration ended.
    """

    def job_arrive(self, job: Job) -> Sequence[Decision]:
        """A job is there, paused. ValueError for a name that is in use."""
        ...

    def iteration_end(self, name: str, progress: Progress) -> Sequence[Decision]:
        """A running job is between two iterations: its ephemeral memory is free."""
        ...

    def job_finish(self, name: str) -> Sequence[Decision]:
        """A job is gone, whether it ran, was paused, or never was admitted; so is its memory."""
        ...


# Where a policy runs


@attrs.frozen
class Figures:
    """What the files say of a job."""

    resident: int
    """Bytes on the GPU: gmem.current."""
    swapped: int
    """Bytes in the host: gmem.swap.current."""
    service: int
    """GPU time used, nanoseconds: gpu_usec of gcgroup.stat."""
    frozen: bool
    """Whether it is kept off the GPU: compute.freeze."""


class Platform(Protocol):
    """The levers and figures that a policy's decisions come down to: a tree, or the simulator.

    A lever returns once it holds. OSError where it cannot be pulled, ENOENT for a job that is gone.
    """

    @property
    def capacity(self) -> int:
        """Bytes of GPU memory."""
        ...

    def figures(self, job: str) -> Figures:
        """What is known of a job."""
        ...

    def thaw(self, job: str) -> None:
        """Lets a job on the GPU."""
        ...

    def freeze(self, job: str) -> None:
        """Takes a job off the GPU. Its memory stays there."""
        ...

    def reclaim(self, job: str, nbytes: int) -> None:
        """Moves that much of a job's memory to the host; it comes back when the job runs again."""
        ...


def carry_out(decisions: Iterable[Decision], platform: Platform) -> None:
    """Does what was decided, in that order. Admission and lanes are the policy's own: no lever belongs to them."""
    for decision in decisions:
        if isinstance(decision, Run):
            platform.thaw(decision.job)
        elif isinstance(decision, Pause):
            platform.freeze(decision.job)
        elif isinstance(decision, Withdraw):
            platform.reclaim(decision.job, platform.figures(decision.job).resident)
