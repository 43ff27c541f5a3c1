"""The policy of Salus: Algorithm 1 (lane assignment), and the job that runs in each lane.

Pure; the names are the paper's.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from ggroupfs.policies.face import Admit, Decision, Job, Move, Pause, Progress, Refuse, Run, Withdraw
from ggroupfs.policies.lanes.orders import Order, join_fairly
from ggroupfs.policies.lanes.region import Lane, LaneView, Member, Region


class Lanes:
    """A :class:`ggroupfs.policies.face.Policy` that shares one GPU in lanes.

    Safety condition: after every event, the persistent memory of all admitted jobs and the sizes of all lanes fit into
    the GPU together, and each lane is as large as the largest ephemeral memory of its jobs.
    """

    def __init__(self, capacity: int, order: Order = Order.FIFO, most_lanes: int | None = None) -> None:
        """Make a policy for a GPU of `capacity` bytes.

        `most_lanes` is the largest number of lanes, by default that of the order.

        ValueError if `most_lanes` is below 1.
        """
        most = order.most_lanes if most_lanes is None else most_lanes
        if most is not None and most < 1:
            raise ValueError("there is at least one lane")
        self.order = order
        """The order of section 4 that is used."""
        self._most = most
        self._region = Region(capacity)
        self._jobs: dict[str, Member] = {}
        self._queue: list[Member] = []  # Q, most urgent first
        self._arrivals = 0
        self._changed = False  # since the last ProcessRequests; if not, its result would be the same

    # Inspection

    @property
    def lanes(self) -> Sequence[LaneView]:
        """All lanes, by address."""
        return [
            LaneView(
                lane.number,
                lane.offset,
                lane.size,
                tuple(member.job.name for member in lane.members),
                lane.current.job.name if lane.current else None,
            )
            for lane in self._region.lanes
        ]

    @property
    def pending(self) -> Sequence[str]:
        """Jobs that wait for admission, most urgent first."""
        return [member.job.name for member in self._queue]

    # Events

    def job_arrive(self, job: Job) -> Sequence[Decision]:
        """JobArrive of Algorithm 1."""
        if job.name in self._jobs:
            raise ValueError(f"there is a job {job.name} already")
        if job.persistent + job.ephemeral > self._region.capacity:
            return [Refuse(job.name)]
        member = self._jobs[job.name] = Member(job, self._arrivals)
        self._arrivals += 1
        self._enqueue(member)
        decisions: list[Decision] = []
        self._process_requests(decisions)
        self._elect(decisions)
        return decisions

    def iteration_end(self, name: str, progress: Progress) -> Sequence[Decision]:
        """The boundary at which a lane can slide down (LaneMoved) and its next job can have a turn."""
        member = self._jobs[name]
        lane = member.lane
        if lane is None or lane.current is not member:
            raise ValueError(f"{name} was not running")
        member.progress = progress
        again = self._region.slide(lane) or self._changed or self._is_overtaken(member)
        if not again and (lane.settled or not self.order.preemptive) and self.order is not Order.FAIR:
            return []  # still the most urgent job, now with less to do
        if self.order.preemptive:
            lane.current = None
        decisions: list[Decision] = []
        if again:
            self._process_requests(decisions, member)
        self._elect(decisions, member)
        return decisions

    def job_finish(self, name: str) -> Sequence[Decision]:
        """JobFinish of Algorithm 1."""
        member = self._jobs.pop(name)
        lane = member.lane
        if lane is None:
            self._queue.remove(member)
        else:
            self._region.leave(member)
            if lane.members and lane.current is None:
                self._region.slide(lane)
        decisions: list[Decision] = []
        self._process_requests(decisions)
        self._elect(decisions)
        return decisions

    # Algorithm 1

    def _process_requests(self, decisions: list[Decision], boundary: Member | None = None) -> None:
        """ProcessRequests: admit every job that fits. `boundary` is the job that has just ended an iteration."""
        self._changed = False
        if self.order is Order.PACK:
            self._spread(decisions)
        for member in list(self._queue):
            lane = self._find_lane(member.job.persistent, member.job.ephemeral)
            if lane is None and self.order is Order.SRTF:
                lane = self._preempt(member, decisions, boundary)
            if lane is not None:
                self._queue.remove(member)
                self._region.join(member, lane)
                join_fairly(member, lane)
                decisions.append(Admit(member.job.name, lane.number))
            elif self.order.in_line:
                break

    def _find_lane(self, persistent: int, ephemeral: int) -> Lane | None:
        """FindLane: a new lane, else one that is large enough, else one that can grow; the smallest of each kind.

        A lane grows only in place, since an iteration may be running in it: that takes free memory above it.
        """
        region = self._region
        if (lane := self._new_lane(persistent, ephemeral)) is not None:
            return lane
        by_size = sorted(region.lanes, key=lambda lane: (lane.size, lane.number))
        for lane in by_size:
            if lane.size >= ephemeral and region.clear(persistent):
                return lane
        for lane in by_size:
            if lane.size < ephemeral <= region.room_above(lane, persistent):
                return lane
        return None

    def _new_lane(self, persistent: int, ephemeral: int) -> Lane | None:
        """Open a new lane, if one more is allowed and safe."""
        region = self._region
        if self._most is not None and len(region.lanes) >= self._most:
            return None
        offset = region.gap(ephemeral, persistent)
        return None if offset is None else region.open(offset, ephemeral)

    # Additions of the orders to Algorithm 1

    def _spread(self, decisions: list[Decision]) -> None:
        """PACK: give a job that shares a lane one of its own as soon as there is memory for it.

        Section 3.3.2 calls reorganizing assignments "an open question". Without it, a job placed behind a long one
        would wait for it next to free memory.
        """
        waiting = [m for lane in self._region.lanes for m in lane.members if len(lane.members) > 1]
        for member in sorted(waiting, key=self.order.urgency):
            old = member.lane
            assert old is not None
            if len(old.members) == 1 or member is (old.current or min(old.members, key=self.order.urgency)):
                continue
            lane = self._new_lane(0, member.job.ephemeral)
            if lane is not None:
                self._region.leave(member)
                self._region.join(member, lane)
                decisions.append(Move(member.job.name, lane.number))

    def _is_overtaken(self, member: Member) -> bool:
        """SRTF: whether a job waits for admission that is more urgent than this one."""
        urgency = self.order.urgency
        return self.order is Order.SRTF and bool(self._queue) and urgency(self._queue[0]) < urgency(member)

    def _preempt(self, member: Member, decisions: list[Decision], boundary: Member | None) -> Lane | None:
        """SRTF: find a lane for a job by moving the persistent memory of less urgent jobs to the host.

        "The higher priority job is admitted as long as its own safety condition is met, i.e., at least, it can run
        alone on the GPU, regardless of other already-running jobs" (section 4.2). The jobs with the longest remaining
        time leave first. A job in the middle of an iteration never leaves, and no job leaves for one that would not run
        next.
        """
        region, urgency = self._region, self.order.urgency
        first = [min(lane.members, key=urgency) for lane in region.lanes]
        if not any(urgency(member) < urgency(other) for other in first):
            return None
        idle = [other for lane in region.lanes for other in lane.members if lane.current is not other]
        before, given = region.save(), list[Member]()
        for other in sorted((o for o in idle if urgency(member) < urgency(o)), key=urgency, reverse=True):
            region.leave(other)
            given.append(other)
            lane = self._find_lane(member.job.persistent, member.job.ephemeral)
            if lane is not None:
                break
        else:
            region.restore(before)
            return None
        for other in given:
            self._enqueue(other)
            if other is boundary:
                decisions.append(Pause(other.job.name))
            decisions.append(Withdraw(other.job.name))
        return lane

    def _elect(self, decisions: list[Decision], before: Member | None = None) -> None:
        """Pick a job for each lane in which none runs.

        `before` is the job that ran until now; it is not told to run again.
        """
        chosen = list[Member]()
        for lane in self._region.lanes:
            if lane.current is None:
                lane.current, lane.settled = min(lane.members, key=self.order.urgency), True
                chosen.append(lane.current)
        if before is not None and before.lane is not None and before.lane.current is not before:
            decisions.append(Pause(before.job.name))
        decisions += [Run(member.job.name) for member in chosen if member is not before]

    def _enqueue(self, member: Member) -> None:
        insort(self._queue, member, key=self.order.urgency)
        self._changed = True
