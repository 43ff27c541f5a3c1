"""Decides how much of one GPU each latency-critical group gets (Flyt, section 3.3), without a clock or a file.

Flyt watches a sliding window of the last N samples of a group's latency. Above the upper bound the group gets more of
the GPU, below the lower bound less, one step at a time, with a cool-down after each change "to prevent oscillations".
If nothing is left, groups of a worse rank give up part of their share (priority-aware reallocation). If they cannot,
and this lasts for a cool-down ("sustained deviation", section 4.3), the group asks for migration.

A cool-down only slows an oscillation down: where no share puts the latency between the bounds, a group would go up and
down for ever. So after a lowering that left too little, the share that was enough is remembered and kept as a floor for
a while, and for twice as long each time that a lowering proves wrong again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import attrs

WHOLE = 10_000
"""Points of a whole GPU. Shares are counted in points; a point is one of compute.weight (1 to 10000)."""
HOLD = 4
"""Cool-downs for which a share that was too small is not tried again."""
PATIENCE_MOST = 64
"""Largest factor by which HOLD is multiplied."""
STEPS_MOST = 3
"""Most steps in one raise; their number is the ratio of the latency to its upper bound."""
PROBATION = 12
"""Cool-downs after a lowering within which a raise proves that lowering wrong."""


@attrs.frozen
class Bounds:
    """The requirements of a group. Flyt, table 2."""

    upper: float
    """Latency above which the group is too slow, seconds (APP_LATENCY_UPPER)."""
    lower: float
    """Latency below which the group could do with less, seconds (APP_LATENCY_LOWER)."""
    initial: int = 3_000
    """Points given on arrival (APP_SM_CORES)."""
    least: int = 500
    """Smallest share, points."""
    most: int = WHOLE
    """Largest share, points."""
    up: int = 1_000
    """Points added by a raise (SCALE_UP_FACTOR)."""
    down: int = 500
    """Points taken by a lowering (SCALE_DOWN_FACTOR)."""
    rank: int = 0
    """Rank; groups of a larger rank give when nothing is left."""


@attrs.frozen
class Pace:
    """The speed of the policy, the same for all groups."""

    window: int = 5
    """Number of samples for a decision (METRIC_SAMPLE_COUNT)."""
    cooldown: float = 5.0
    """Seconds after a change of a group in which that group is not changed again."""
    silence: float = 60.0
    """Seconds without a report after which a group needs no more than its smallest share."""


@attrs.frozen
class Change:
    """A group has another share from now on."""

    group: str
    """Name of the group."""
    share: int
    """New share, points."""
    was: int
    """Previous share, points; 0 for a group that has just come."""
    latency: float | None
    """Mean latency of the window that decided, seconds; None if no latency was the reason."""


@attrs.frozen
class Migrate:
    """A group should go to another GPU, because this one has nothing left for it. Emitted once, until withdrawn."""

    group: str
    """Name of the group."""
    share: int
    """Present share, points."""
    missing: int
    """Points missing from the share, an estimate: it assumes that latency and share are in inverse proportion."""
    latency: float | None
    """Mean latency of the window, seconds; None for a group that came when not even its smallest share was left."""


@attrs.frozen
class Withdraw:
    """A group may stay after all: its latency is within its bounds again, or the group is gone."""

    group: str
    """Name of the group."""


Decision = Change | Migrate | Withdraw


@attrs.define
class Member:
    """A group that is present."""

    bounds: Bounds
    """Requirements of the group."""
    share: int
    """Present share, points."""
    samples: deque[float]
    """Latencies since the share changed, seconds: the last ones, up to a window."""
    heard: float
    """Time of the last sample, or of arrival, seconds."""
    changed: float
    """Time of the last change of the share, or of arrival, seconds."""
    lowered: float = -math.inf
    """Time of the last change if it lowered the share for its latency, seconds; else -inf."""
    before: int = 0
    """Share before the last such lowering, points."""
    floor: int = 0
    """Share that was too small at the last raise, points."""
    enough: int = 0
    """Share below which the group does not go until `held`, points, because less was too little."""
    held: float = -math.inf
    """Time until which `enough` holds, seconds."""
    patience: int = 1
    """Factor by which HOLD cool-downs are multiplied."""
    short: float | None = None
    """Time since which the group needs more and nothing is left, seconds; None while that is not so."""
    asked: bool = False
    """Whether the group's migration was asked for."""

    @property
    def latency(self) -> float | None:
        """The mean of a full window, seconds; None while the window is not full."""
        full = len(self.samples) == self.samples.maxlen
        return sum(self.samples) / len(self.samples) if full else None

    @property
    def is_high(self) -> bool:
        """Whether the group needs more: it is too slow, or has less than its smallest share.

        Too slow means on average and in the last sample, since a shrinking backlog needs nothing.
        """
        latency = self.latency
        slow = latency is not None and min(latency, self.samples[-1]) > self.bounds.upper
        return slow or self.share < self.bounds.least

    @property
    def is_low(self) -> bool:
        """Whether the group could do with less: every sample of a full window is below the lower bound."""
        return self.latency is not None and max(self.samples) < self.bounds.lower

    @property
    def spare(self) -> int:
        """Points above the smallest share."""
        return max(0, self.share - self.bounds.least)


class Core:
    """The shares of one GPU. Points that no group has are for processes without bounds."""

    def __init__(self, pace: Pace | None = None, reserve: int = 0) -> None:
        """`reserve` is the number of points that no group is given."""
        self._pace = pace or Pace()
        self._whole = WHOLE - reserve
        self._members: dict[str, Member] = {}

    @property
    def shares(self) -> dict[str, int]:
        """Points of each group that is present."""
        return {name: one.share for name, one in self._members.items()}

    @property
    def left(self) -> int:
        """Points that can still be given."""
        return self._whole - sum(one.share for one in self._members.values())

    # Events

    def come(self, now: float, name: str, bounds: Bounds) -> list[Decision]:
        """Add a group with its initial share, or with what is left of the GPU."""
        share = min(bounds.initial, self.left)
        self._members[name] = Member(bounds, share, deque(maxlen=self._pace.window), now, now)
        return [Change(name, share, 0, None)]

    def go(self, name: str) -> list[Decision]:
        """Remove a group. A group that is not present is ignored."""
        member = self._members.pop(name, None)
        return [Withdraw(name)] if member is not None and member.asked else []

    def sample(self, now: float, name: str, latency: float) -> None:
        """Record a latency of a group, in seconds. It is dropped if the group is not present."""
        member = self._members.get(name)
        if member is not None:
            member.samples.append(latency)
            member.heard = now

    def decide(self, now: float, contended: bool = True) -> list[Decision]:
        """Return the changes at the time `now`, in seconds.

        Without contention no share is lowered for its latency or its silence: a group alone on a GPU has all of it, so
        its latency says nothing about its share, and nothing would use what it gave up.
        """
        for one in self._members.values():
            if self._is_silent(now, one):
                one.samples.clear()  # from long ago
            if not one.is_high:
                one.short = None
        made: list[Decision] = []
        high = [name for name, one in self._members.items() if one.is_high]
        for name in sorted(high, key=self._urgency):
            if self._is_cool(now, self._members[name]):
                made += self._raise(now, name)
        if contended:
            made += self._lower(now)
        for name, one in self._members.items():
            settled = (one.latency is not None or self._is_silent(now, one)) and not one.is_high
            if one.asked and settled:
                one.asked = False
                made.append(Withdraw(name))
        return made

    # Helpers

    def _lower(self, now: float) -> Iterator[Decision]:
        for name, one in self._members.items():
            step = min(one.bounds.down, one.spare)
            if not step or not self._is_cool(now, one):
                continue
            if self._is_silent(now, one):
                yield self._change(now, name, one.share - step)
            elif one.is_low and self._may_lower(now, one, step):
                if one.share <= one.floor:
                    one.patience = 1  # the load has changed, since a share that was too small is now enough
                one.before = one.share
                yield self._change(now, name, one.share - step)
                one.lowered = now

    def _may_lower(self, now: float, one: Member, step: int) -> bool:
        latency, share = one.latency, one.share - step
        if latency is None or latency * one.share > one.bounds.upper * share:
            return False  # even a program that only computes, and never waits, would be too slow
        return share >= one.enough or now >= one.held

    def _raise(self, now: float, name: str) -> Iterator[Decision]:
        one = self._members[name]
        # Far above the bound there is a backlog, which grows until the share is large enough; hence several steps at
        # once.
        steps = 1 if one.latency is None else max(1, min(STEPS_MOST, int(one.latency / one.bounds.upper)))
        want = max(0, min(max(steps * one.bounds.up, one.bounds.least - one.share), one.bounds.most - one.share))
        waiting = False
        for donor in sorted(self._donors(now, name), key=self._urgency, reverse=True):
            missing = min(want - self.left, self._members[donor].spare)
            if missing <= 0:
                continue
            if self._is_cool(now, self._members[donor]):
                yield self._change(now, donor, self._members[donor].share - missing)
            else:
                waiting = True
        more = min(want, self.left)
        if waiting and more < want:
            return  # all of it will be available soon
        if more > 0:
            one.floor, one.enough = one.share, one.share + 1
            if now - one.lowered <= PROBATION * self._pace.cooldown:
                one.patience = min(PATIENCE_MOST, 2 * one.patience)
                one.enough = one.before  # a raise need not be a multiple of a lowering: each share between is tried
            one.held = now + HOLD * self._pace.cooldown * one.patience
            yield self._change(now, name, one.share + more)
        elif one.short is None:
            one.short = now
        elif not one.asked and now - one.short >= self._pace.cooldown:
            one.asked = True
            latency = one.latency
            need = one.bounds.least if latency is None else math.ceil(round(one.share * latency / one.bounds.upper, 3))
            yield Migrate(name, one.share, max(1, need - one.share), latency)

    def _donors(self, now: float, name: str) -> Iterator[str]:
        """Groups that give when nothing is left: those of a larger rank, and those that do not need what they have."""
        for other, one in self._members.items():
            if other != name and (one.bounds.rank > self._members[name].bounds.rank or self._has_slack(now, one)):
                yield other

    def _has_slack(self, now: float, one: Member) -> bool:
        has_given = one.lowered == one.changed and not self._is_cool(now, one)  # which is why it has no full window yet
        return one.is_low or has_given or self._is_silent(now, one)

    def _urgency(self, name: str) -> tuple[int, float]:
        """Sort key: the first is served first and gives last.

        A small rank comes first, then the latency farthest above its bound.
        """
        one = self._members[name]
        return one.bounds.rank, -(one.latency or 0.0) / one.bounds.upper

    def _is_cool(self, now: float, one: Member) -> bool:
        return now - one.changed >= self._pace.cooldown

    def _is_silent(self, now: float, one: Member) -> bool:
        return now - one.heard >= self._pace.silence

    def _change(self, now: float, name: str, share: int) -> Change:
        one = self._members[name]
        change = Change(name, share, one.share, one.latency)
        one.share, one.changed, one.lowered = share, now, -math.inf
        one.samples.clear()  # measured with the previous share
        return change
