"""The orders of Salus, section 4: which job's iteration is next in a lane, and which job is admitted first."""

from __future__ import annotations

import enum

from ggroupfs.policies.lanes.region import Lane, Member


class Order(enum.StrEnum):
    """An order of section 4."""

    FIFO = "fifo"
    """First come, first served, each job to its end: what GPUs do without Salus (section 5.1)."""
    SRTF = "srtf"
    """Shortest remaining time first, preemptive (4.2)."""
    PACK = "pack"
    """As many lanes as fit into the memory (4.1)."""
    FAIR = "fair"
    """Equal GPU time for the jobs of a lane (4.3)."""

    @property
    def most_lanes(self) -> int | None:
        """Default limit on the number of lanes: 1 (section 5.1.2), but None for PACK, which is meant to have many."""
        return None if self is Order.PACK else 1

    @property
    def preemptive(self) -> bool:
        """Whether a job may have to stop for another one at the end of an iteration."""
        return self in (Order.SRTF, Order.FAIR)

    @property
    def in_line(self) -> bool:
        """Whether jobs are admitted strictly in order of arrival. Algorithm 1 also tries later jobs, which may fit."""
        return self is Order.FIFO

    def urgency(self, member: Member) -> tuple[int, int]:
        """Sort key of jobs, in a lane and in the queue for admission: the smallest goes first."""
        if self is Order.SRTF:
            return member.remaining, member.arrived
        if self is Order.FAIR and member.lane is not None:
            return fair_service(member), member.arrived
        return 0, member.arrived


def fair_service(member: Member) -> int:
    """Service of a job as FAIR counts it, nanoseconds."""
    return member.progress.service - member.base


def join_fairly(member: Member, lane: Lane) -> None:
    """Start a job that joins a lane level with the job there that had the least service.

    Section 4.3 makes total service equal. If it were counted from each job's arrival, a late job would run alone until
    it had caught up; in the paper's figure 11 the shares are equal as soon as the job arrives.
    """
    others = [fair_service(other) for other in lane.members if other is not member]
    member.base = member.progress.service - min(others, default=0)
