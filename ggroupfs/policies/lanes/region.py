"""The ephemeral region: where the lanes are, and the safety condition (Salus, sections 3.3 to 3.3.2).

GPU memory is divided in two (figure 7): lanes grow from one end, from address 0 here, and persistent memory from the
other. A lane is contiguous. Between two iterations there is nothing in it, so that it can be moved for nothing: that is
the auto defragmentation of section 3.3.1.

The safety condition is that the sum of P over all jobs and the sum of L over all lanes are at most C. What is asked
here is a little more: that the two regions do not meet as they are now, with the holes between lanes that have not slid
down yet. Without holes it is the same.
"""

from __future__ import annotations

import attrs

from ggroupfs.policies.face import Job, Progress

NOTHING = Progress(0, 0)


@attrs.define(eq=False)
class Member:
    """A job, from its arrival to its end."""

    job: Job
    """What was said of it when it came."""
    arrived: int
    """How many came before it."""
    progress: Progress = NOTHING
    """As of its last boundary."""
    lane: Lane | None = None
    """Where it was admitted; None while it waits for that."""
    base: int = 0
    """FAIR: service that it is taken to have missed when it joined, subtracted from its own; may be negative."""

    @property
    def remaining(self) -> int:
        """How long it takes yet, alone, nanoseconds; below 0 for one that takes longer than was said."""
        return self.job.duration - self.progress.ran


@attrs.define(eq=False)
class Lane:
    """A contiguous part of the ephemeral region, in which one iteration runs at a time."""

    number: int
    """Never used again."""
    offset: int
    """Where it begins, bytes."""
    size: int
    """L, bytes: the most ephemeral memory of any of its jobs."""
    members: list[Member] = attrs.field(factory=list)
    """Who shares it; its ref of Algorithm 1 is their number."""
    current: Member | None = None
    """Who runs in it; None only between an event and the decision that answers it."""
    settled: bool = False
    """Whether nobody joined since it was last decided who runs in it."""

    @property
    def end(self) -> int:
        """Where the next one can begin, bytes."""
        return self.offset + self.size


@attrs.frozen
class LaneView:
    """A lane, to look at."""

    number: int
    offset: int
    """Bytes from the begin of the ephemeral region."""
    size: int
    """Bytes."""
    jobs: tuple[str, ...]
    """Who shares it."""
    current: str | None
    """Who runs in it."""


@attrs.frozen
class Snapshot:
    """All that an attempt to admit may have changed."""

    persistent: int
    lanes: tuple[tuple[Lane, int, int, tuple[Member, ...]], ...]
    """Each with its offset, its size and its members."""


class Region:
    """GPU memory with lanes in it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """C, bytes."""
        self.persistent = 0
        """The sum of P over all admitted jobs, bytes."""
        self.lanes: list[Lane] = []
        """By address."""
        self._numbers = 0

    def clear(self, persistent: int) -> bool:
        """Whether no lane, where it is now, is in the way of so much more persistent memory."""
        return self._top <= self.capacity - self.persistent - persistent

    def gap(self, size: int, persistent: int) -> int | None:
        """Where a lane of that size could begin, with so much more persistent memory; None for nowhere, as it is now.

        Lanes that are still to slide down leave holes, so there can be none though the safety condition is met.
        """
        if not self.clear(persistent):
            return None
        begin = 0
        for lane in self.lanes:
            if lane.offset - begin >= size:
                return begin
            begin = lane.end
        return begin if begin + size <= self.capacity - self.persistent - persistent else None

    def room_above(self, lane: Lane, persistent: int) -> int:
        """How large a lane can become where it is, with so much more persistent memory; bytes."""
        if not self.clear(persistent):
            return 0
        index = self.lanes.index(lane)
        limit = self.capacity - self.persistent - persistent
        return (self.lanes[index + 1].offset if index + 1 < len(self.lanes) else limit) - lane.offset

    def open(self, offset: int, size: int) -> Lane:
        """A new lane, in a gap."""
        self._numbers += 1
        lane = Lane(self._numbers, offset, size)
        self.lanes.append(lane)
        self.lanes.sort(key=lambda lane: (lane.offset, lane.end))
        return lane

    def join(self, member: Member, lane: Lane) -> None:
        """A job gets a place in a lane that is large enough, or grows to be so, and its persistent memory."""
        lane.members.append(member)
        lane.settled = False
        lane.size = max(lane.size, member.job.ephemeral)
        member.lane = lane
        self.persistent += member.job.persistent

    def leave(self, member: Member) -> None:
        """A job gives up its place. The lane shrinks to what the others need, and with the last one it is deleted."""
        lane = member.lane
        assert lane is not None
        lane.members.remove(member)
        member.lane = None
        self.persistent -= member.job.persistent
        if lane.current is member:
            lane.current = None
        if lane.members:
            lane.size = max(other.job.ephemeral for other in lane.members)
        else:
            self.lanes.remove(lane)

    def slide(self, lane: Lane) -> bool:
        """A lane with nothing in it moves down to the one below it; whether it moved (section 3.3.1)."""
        index = self.lanes.index(lane)
        offset = self.lanes[index - 1].end if index else 0
        moved = offset != lane.offset
        lane.offset = offset
        return moved

    def save(self) -> Snapshot:
        """What :meth:`restore` takes."""
        return Snapshot(self.persistent, tuple((o, o.offset, o.size, tuple(o.members)) for o in self.lanes))

    def restore(self, snapshot: Snapshot) -> None:
        """As it was. Who runs where is not touched: an attempt takes only those away who do not."""
        self.persistent = snapshot.persistent
        self.lanes = [lane for lane, *_ in snapshot.lanes]
        for lane, offset, size, members in snapshot.lanes:
            lane.offset, lane.size, lane.members = offset, size, list(members)
            for member in members:
                member.lane = lane

    @property
    def _top(self) -> int:
        return self.lanes[-1].end if self.lanes else 0
