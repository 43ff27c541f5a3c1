"""The ephemeral region: the layout of the lanes in GPU memory, and the safety condition (Salus, sections 3.3 to 3.3.2).

GPU memory is divided in two (figure 7): lanes grow from one end, here from address 0, and persistent memory from the
other. A lane is contiguous. Between two iterations it is empty, so it can be moved at no cost: the auto defragmentation
of section 3.3.1.

The safety condition is that the sum of P over all jobs and the sum of L over all lanes together are at most C. This
module requires slightly more: that the two regions do not meet in their present layout, which may have holes between
lanes that have not slid down yet. Without holes the two conditions are the same.
"""

from __future__ import annotations

import attrs

from ggroupfs.policies.face import Job, Progress

NOTHING = Progress(0, 0)


@attrs.define(eq=False)
class Member:
    """A job, from its arrival to its end."""

    job: Job
    """The job as announced on arrival."""
    arrived: int
    """Number of jobs that arrived earlier."""
    progress: Progress = NOTHING
    """Progress at the last boundary."""
    lane: Lane | None = None
    """Lane to which the job is admitted; None while it waits for admission."""
    base: int = 0
    """FAIR: service that the job counts as having missed when it joined, subtracted from its own; may be negative."""

    @property
    def remaining(self) -> int:
        """Remaining run time alone, nanoseconds; negative once the job takes longer than announced."""
        return self.job.duration - self.progress.ran


@attrs.define(eq=False)
class Lane:
    """A contiguous part of the ephemeral region, in which one iteration runs at a time."""

    number: int
    """Number of the lane; never used again."""
    offset: int
    """Start address, bytes."""
    size: int
    """L, bytes: the largest ephemeral memory of its jobs."""
    members: list[Member] = attrs.field(factory=list)
    """Jobs that share the lane; their number is its ref in Algorithm 1."""
    current: Member | None = None
    """Job that runs in the lane; None only between an event and the decisions that answer it."""
    settled: bool = False
    """Whether no job has joined since the running job was chosen."""

    @property
    def end(self) -> int:
        """First address above the lane, bytes."""
        return self.offset + self.size


@attrs.frozen
class LaneView:
    """A lane, as an immutable record."""

    number: int
    offset: int
    """Start address from the beginning of the ephemeral region, bytes."""
    size: int
    """Size, bytes."""
    jobs: tuple[str, ...]
    """Names of the jobs that share the lane."""
    current: str | None
    """Name of the job that runs in the lane."""


@attrs.frozen
class Snapshot:
    """Everything that an attempt to admit a job may change."""

    persistent: int
    lanes: tuple[tuple[Lane, int, int, tuple[Member, ...]], ...]
    """The lanes, each with its offset, its size and its members."""


class Region:
    """GPU memory with lanes in it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """C, bytes."""
        self.persistent = 0
        """The sum of P over all admitted jobs, bytes."""
        self.lanes: list[Lane] = []
        """The lanes, by address."""
        self._numbers = 0

    def clear(self, persistent: int) -> bool:
        """Whether `persistent` more bytes of persistent memory fit without touching a lane in its present place."""
        return self._top <= self.capacity - self.persistent - persistent

    def gap(self, size: int, persistent: int) -> int | None:
        """Return an address for a lane of `size` bytes next to `persistent` more bytes of persistent memory, or None.

        Lanes that have not slid down yet leave holes, so there may be no such address although the safety condition
        holds.
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
        """Bytes to which a lane can grow in place, next to `persistent` more bytes of persistent memory."""
        if not self.clear(persistent):
            return 0
        index = self.lanes.index(lane)
        limit = self.capacity - self.persistent - persistent
        return (self.lanes[index + 1].offset if index + 1 < len(self.lanes) else limit) - lane.offset

    def open(self, offset: int, size: int) -> Lane:
        """Open a new lane in a gap."""
        self._numbers += 1
        lane = Lane(self._numbers, offset, size)
        self.lanes.append(lane)
        self.lanes.sort(key=lambda lane: (lane.offset, lane.end))
        return lane

    def join(self, member: Member, lane: Lane) -> None:
        """Give a job a place in a lane, which grows if it is too small, and its persistent memory."""
        lane.members.append(member)
        lane.settled = False
        lane.size = max(lane.size, member.job.ephemeral)
        member.lane = lane
        self.persistent += member.job.persistent

    def leave(self, member: Member) -> None:
        """Take a job out of its lane. The lane shrinks to what the remaining jobs need; the last job takes it along."""
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
        """Move a lane between two iterations down to the lane below; return whether it moved (section 3.3.1)."""
        index = self.lanes.index(lane)
        offset = self.lanes[index - 1].end if index else 0
        moved = offset != lane.offset
        lane.offset = offset
        return moved

    def save(self) -> Snapshot:
        """Return the state for :meth:`restore`."""
        return Snapshot(self.persistent, tuple((o, o.offset, o.size, tuple(o.members)) for o in self.lanes))

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a saved state. The running jobs stay as they are: an attempt removes only jobs that do not run."""
        self.persistent = snapshot.persistent
        self.lanes = [lane for lane, *_ in snapshot.lanes]
        for lane, offset, size, members in snapshot.lanes:
            lane.offset, lane.size, lane.members = offset, size, list(members)
            for member in members:
                member.lane = lane

    @property
    def _top(self) -> int:
        return self.lanes[-1].end if self.lanes else 0
