"""How much of one GPU each latency-critical group has: the decisions of Flyt (section 3.3), without a clock or a file.

Flyt watches a sliding window of the last N samples of a group's latency. Above the upper bound the group has more of
the GPU, below the lower bound less, a step at a time, with a cool-down after each change "to prevent oscillations". If
nothing is left, those of a worse rank give (priority-aware reallocation); if they cannot, and that has been so for a
cool-down ("sustained deviation", section 4.3), it asks for migration.

A cool-down only makes an oscillation slower: where no share has a latency between the bounds, a group would go up and
down for ever. So what was enough before a lowering to too little is remembered, and not gone below for a while; each
time that this proves wrong, for twice as long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import attrs

WHOLE = 10_000
"""Points: what shares are counted in. A GPU has so many, and a point is one of compute.weight (1 to 10000)."""
HOLD = 4
"""For so many cool-downs a share that was too small is not gone back to."""
PATIENCE_MOST = 64
"""... and so many times that at most."""
STEPS_MOST = 3
"""A raise is as many steps as the latency is times its upper bound, and that many at most."""
PROBATION = 12
"""A raise within so many cool-downs after a lowering says that the lowering was wrong."""


@attrs.frozen
class Bounds:
    """What a group asks for. Flyt, table 2."""

    upper: float
    """Seconds above which its latency is too long (APP_LATENCY_UPPER)."""
    lower: float
    """Seconds below which it could do with less (APP_LATENCY_LOWER)."""
    initial: int = 3_000
    """Points that it has when it comes (APP_SM_CORES)."""
    least: int = 500
    """Points that it has in any case."""
    most: int = WHOLE
    """Points that it never has more than."""
    up: int = 1_000
    """Points that a raise adds (SCALE_UP_FACTOR)."""
    down: int = 500
    """Points that a lowering takes (SCALE_DOWN_FACTOR)."""
    rank: int = 0
    """Those of a larger rank give when nothing is left."""


@attrs.frozen
class Pace:
    """How fast things go, the same for all groups."""

    window: int = 5
    """Samples that a decision is made on (METRIC_SAMPLE_COUNT)."""
    cooldown: float = 5.0
    """Seconds after a change of a group in which it is not changed again."""
    silence: float = 60.0
    """A group that says nothing for so many seconds needs no more than its least."""


@attrs.frozen
class Change:
    """A group has another share from now on."""

    group: str
    """Which."""
    share: int
    """Points."""
    was: int
    """Points before; 0 for one that came."""
    latency: float | None
    """Seconds: that of the window it was decided on; None where it was not about a latency."""


@attrs.frozen
class Migrate:
    """A group is to go to another GPU: this one has nothing left for it. Said once, until it is withdrawn."""

    group: str
    """Which."""
    share: int
    """Points that it has."""
    missing: int
    """Points that it would need besides, if latency and share are in inverse proportion: an estimate."""
    latency: float | None
    """Seconds, as above; None for one that came when not even its least was left."""


@attrs.frozen
class Withdraw:
    """It may stay: its latency is within its bounds again, or it is gone."""

    group: str
    """Which."""


Decision = Change | Migrate | Withdraw


@attrs.define
class Member:
    """A group that is there."""

    bounds: Bounds
    """What it asks for."""
    share: int
    """Points that it has."""
    samples: deque[float]
    """Its last samples since its share changed, seconds."""
    heard: float
    """When there was one, or it came, seconds."""
    changed: float
    """When its share changed, or it came, seconds."""
    lowered: float = -math.inf
    """When that was a lowering for its latency, seconds; before all time if another change followed."""
    before: int = 0
    """Points that it had before that."""
    floor: int = 0
    """Points that were too few, when it was raised last."""
    enough: int = 0
    """Points that it does not go below for a while, since fewer were too few."""
    held: float = -math.inf
    """Until when, seconds."""
    patience: int = 1
    """For how many times HOLD cool-downs it was."""
    short: float | None = None
    """Since when it needs more and nothing is left, seconds; None while that is not so."""
    asked: bool = False
    """Whether it was asked to be migrated."""

    @property
    def latency(self) -> float | None:
        """The mean of a full window, seconds; None while it is not full."""
        full = len(self.samples) == self.samples.maxlen
        return sum(self.samples) / len(self.samples) if full else None

    @property
    def is_high(self) -> bool:
        """Whether it needs more: too slow, also in the last sample, for a backlog that shrinks does so by itself."""
        latency = self.latency
        slow = latency is not None and min(latency, self.samples[-1]) > self.bounds.upper
        return slow or self.share < self.bounds.least

    @property
    def is_low(self) -> bool:
        """Whether it could do with less: not a single sample of a full window says otherwise."""
        return self.latency is not None and max(self.samples) < self.bounds.lower

    @property
    def spare(self) -> int:
        """Points above its least."""
        return max(0, self.share - self.bounds.least)


class Core:
    """The shares of one GPU. What is not given to a group is for those that have no bounds."""

    def __init__(self, pace: Pace | None = None, reserve: int = 0) -> None:
        """`reserve` are points that no group is given."""
        self._pace = pace or Pace()
        self._whole = WHOLE - reserve
        self._members: dict[str, Member] = {}

    @property
    def shares(self) -> dict[str, int]:
        """Points of each group that is there."""
        return {name: one.share for name, one in self._members.items()}

    @property
    def left(self) -> int:
        """Points that could still be given."""
        return self._whole - sum(one.share for one in self._members.values())

    # What happens

    def come(self, now: float, name: str, bounds: Bounds) -> list[Decision]:
        """A group is there, and has its initial share, or what is left of the GPU."""
        share = min(bounds.initial, self.left)
        self._members[name] = Member(bounds, share, deque(maxlen=self._pace.window), now, now)
        return [Change(name, share, 0, None)]

    def go(self, name: str) -> list[Decision]:
        """A group is gone; nothing if it was not there."""
        member = self._members.pop(name, None)
        return [Withdraw(name)] if member is not None and member.asked else []

    def sample(self, now: float, name: str, latency: float) -> None:
        """The latency of a group, seconds; of one that is not there it is dropped."""
        member = self._members.get(name)
        if member is not None:
            member.samples.append(latency)
            member.heard = now

    def decide(self, now: float, contended: bool = True) -> list[Decision]:
        """What changes at the time `now`, seconds. Unless it is `contended` nobody is lowered: who is alone on a GPU
        has all of it, so its latency says nothing of its share, and nobody would have what it gave."""
        for one in self._members.values():
            if self._is_silent(now, one):
                one.samples.clear()  # of long ago
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

    # How

    def _lower(self, now: float) -> Iterator[Decision]:
        for name, one in self._members.items():
            step = min(one.bounds.down, one.spare)
            if not step or not self._is_cool(now, one):
                continue
            if self._is_silent(now, one):
                yield self._change(now, name, one.share - step)
            elif one.is_low and self._may_lower(now, one, step):
                if one.share <= one.floor:
                    one.patience = 1  # what was too little is no longer: the load is another one
                one.before = one.share
                yield self._change(now, name, one.share - step)
                one.lowered = now

    def _may_lower(self, now: float, one: Member, step: int) -> bool:
        latency, share = one.latency, one.share - step
        if latency is None or latency * one.share > one.bounds.upper * share:
            return False  # even one that only computes, and never waits, would be too slow
        return share >= one.enough or now >= one.held

    def _raise(self, now: float, name: str) -> Iterator[Decision]:
        one = self._members[name]
        # Far above its bound there is a backlog, which grows until the share is large enough: as many steps at once.
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
            return  # soon there is all of it
        if more > 0:
            one.floor, one.enough = one.share, one.share + 1
            if now - one.lowered <= PROBATION * self._pace.cooldown:
                one.patience = min(PATIENCE_MOST, 2 * one.patience)
                one.enough = one.before  # raises may be no multiple of lowerings: all between would be tried in turn
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
        """Who gives when nothing is left: those of a larger rank, and those that do not need what they have."""
        for other, one in self._members.items():
            if other != name and (one.bounds.rank > self._members[name].bounds.rank or self._has_slack(now, one)):
                yield other

    def _has_slack(self, now: float, one: Member) -> bool:
        has_given = one.lowered == one.changed and not self._is_cool(now, one)  # and so has no full window yet
        return one.is_low or has_given or self._is_silent(now, one)

    def _urgency(self, name: str) -> tuple[int, float]:
        """Who is served first, and gives last: of a small rank, and far above the upper bound."""
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
        one.samples.clear()  # they are of the share that it had
        return change
