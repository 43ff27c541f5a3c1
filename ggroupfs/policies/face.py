"""The interface between a policy and its platform: events in, decisions out, and the levers that carry them out.

A policy is pure: it has no clock, opens no file and waits for nothing. The same object therefore runs over a mounted
tree (:mod:`ggroupfs.policies.mounted`) and in the simulator (:mod:`ggroupfs.replay`), and is tested without either.
docs/policies/writing.md shows how to write one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs

# Events: what a policy is told


@attrs.frozen
class Job:
    """A job as it arrives. All of this is known beforehand, as Salus assumes (sections 3.3.2 and 4.2)."""

    name: str
    """Unique name."""
    persistent: int
    """Model and framework-internal memory, bytes: P."""
    ephemeral: int
    """Peak scratch memory of an iteration, bytes: E. It is allocated only while an iteration runs."""
    duration: int
    """Run time with the GPU to itself, nanoseconds."""


@attrs.frozen
class Progress:
    """The progress of a job since its arrival."""

    ran: int
    """Time during which one of its iterations was under way, nanoseconds."""
    service: int
    """GPU time used, nanoseconds."""


# Decisions of a policy


@attrs.frozen
class Admit:
    """Give a job memory on the GPU, in a lane. The job does not run yet."""

    job: str
    lane: int
    """Number of the lane."""


@attrs.frozen
class Refuse:
    """Turn away a job that can never fit on this GPU, not even alone."""

    job: str


@attrs.frozen
class Move:
    """Move an admitted job, which is between two iterations, to another lane."""

    job: str
    lane: int
    """Number of the lane."""


@attrs.frozen
class Run:
    """Run a job from now on, one iteration after the other."""

    job: str


@attrs.frozen
class Pause:
    """Keep a job that has ended an iteration from beginning the next one. Its persistent memory stays."""

    job: str


@attrs.frozen
class Withdraw:
    """Send a paused job back to wait for admission, and its persistent memory to the host."""

    job: str


Decision = Admit | Refuse | Move | Run | Pause | Withdraw


class Policy(Protocol):
    """Decides which jobs run. Each event returns the decisions that follow from it, to be carried out in order.

    A job that was told to run continues until it is told to pause, which happens only at the end of one of its
    iterations.
    """

    def job_arrive(self, job: Job) -> Sequence[Decision]:
        """A job arrived, paused. ValueError if its name is in use."""
        ...

    def iteration_end(self, name: str, progress: Progress) -> Sequence[Decision]:
        """A running job is between two iterations, so its ephemeral memory is free."""
        ...

    def job_finish(self, name: str) -> Sequence[Decision]:
        """A job is gone, and so is its memory, whether the job was running, paused or never admitted."""
        ...


# Platforms: where a policy runs


@attrs.frozen
class Figures:
    """The figures of a job, as its control files give them."""

    resident: int
    """Bytes on the GPU: gmem.current."""
    swapped: int
    """Bytes in the host: gmem.swap.current."""
    service: int
    """GPU time used, nanoseconds: gpu_usec of gcgroup.stat."""
    frozen: bool
    """Whether the job is kept off the GPU: compute.freeze."""


class Platform(Protocol):
    """The levers and figures on which a policy acts: those of a tree, or of the simulator.

    A lever returns once its effect holds. OSError if it cannot be pulled, with ENOENT for a job that is gone.
    """

    @property
    def capacity(self) -> int:
        """Bytes of GPU memory."""
        ...

    def figures(self, job: str) -> Figures:
        """Return the figures of a job."""
        ...

    def thaw(self, job: str) -> None:
        """Let a job run on the GPU."""
        ...

    def freeze(self, job: str) -> None:
        """Take a job off the GPU. Its memory stays there."""
        ...

    def reclaim(self, job: str, nbytes: int) -> None:
        """Move `nbytes` of a job's memory to the host. The memory returns when the job runs again."""
        ...


def carry_out(decisions: Iterable[Decision], platform: Platform) -> None:
    """Carry out decisions in order. Admission and lanes exist only in the policy, so no lever belongs to them."""
    for decision in decisions:
        if isinstance(decision, Run):
            platform.thaw(decision.job)
        elif isinstance(decision, Pause):
            platform.freeze(decision.job)
        elif isinstance(decision, Withdraw):
            platform.reclaim(decision.job, platform.figures(decision.job).resident)
