"""The orders of section 4 of Salus: whose iteration is next in a lane, and who is admitted first."""

from __future__ import annotations

import enum

from ggroupfs.policies.lanes.region import Lane, Member


class Order(enum.StrEnum):
    """Which of the policies of section 4."""

    FIFO = "fifo"
    """In order of arrival, each to its end: what GPUs without Salus do (section 5.1)."""
    SRTF = "srtf"
    """Shortest remaining time first, preemptive (4.2)."""
    PACK = "pack"
    """As many lanes as there is memory for (4.1)."""
    FAIR = "fair"
    """Equal GPU time for the jobs of a lane (4.3)."""

    @property
    def most_lanes(self) -> int | None:
        """Lanes at most, if nobody says otherwise: one (section 5.1.2), but for PACK, which is about having many."""
        return None if self is Order.PACK else 1

    @property
    def preemptive(self) -> bool:
        """Whether a job may have to stop for another one at the end of an iteration."""
        return self in (Order.SRTF, Order.FAIR)

    @property
    def in_line(self) -> bool:
        """Whether nobody is admitted before who came first. Algorithm 1 goes on to those behind that do fit."""
        return self is Order.FIFO

    def urgency(self, member: Member) -> tuple[int, int]:
        """The least of these goes first: in a lane, and among those who wait for one."""
        if self is Order.SRTF:
            return member.remaining, member.arrived
        if self is Order.FAIR and member.lane is not None:
            return fair_service(member), member.arrived
        return 0, member.arrived


def fair_service(member: Member) -> int:
    """Service of a job as FAIR counts it, nanoseconds."""
    return member.progress.service - member.base


def join_fairly(member: Member, lane: Lane) -> None:
    """Who comes anew has had as much as those who had the least.

    Section 4.3 has total service equal. Counted from each one's birth, who comes late would run alone until it has
    caught up; in the paper's figure 11 the shares are equal from its arrival on.
    """
    others = [fair_service(other) for other in lane.members if other is not member]
    member.base = member.progress.service - min(others, default=0)
