"""How much memory the first one is going to want: what it has, how fast it grows, and how far earlier bursts went.

What it holds now says nothing of what it will ask for in a moment, and memory that is in use elsewhere takes a moment
to be free: it goes to the host at some 40 GB/s, once the kernels that use it have ended. So there is always some room
ahead of it, the more the faster it grows. Two things say earlier than growth that more is needed: work that begins
after a pause, and how much the last bursts of work came to hold.
"""

from __future__ import annotations

import math
from collections import deque

import attrs

GROWTH_S = 0.1
"""Growth is what was gained in this time, per second: single allocations are no trend."""
LAG_S = 10.0
"""The longest gap between two looks is forgotten at this rate."""
BURSTS = 2
"""Earlier bursts that are remembered. What all of them came to hold is expected: one that did is no habit, and a kernel
now and then, after many requests, is not the first of as many."""
LONGER = 1.25
"""A burst may take that many times as long to its peak as those before it."""


@attrs.frozen
class Looking:
    """How demand is told from what is seen."""

    headroom: int
    """Bytes that are free ahead of the first one when it does not grow."""
    headroom_most: int
    """... and at most, however fast it grows."""
    lead: float = 0.5
    """Seconds of growth that are to find room, besides."""
    hold: float = 0.5
    """Seconds for which what it wanted is kept for it: the shortest time in which memory goes and comes back."""
    idle: float = 0.2
    """Seconds without work after which it is idle, and its next work is the begin of a burst."""
    expect: float = 10.0
    """Seconds at most for which a burst is expected to grow as large as those before it."""


@attrs.frozen
class Want:
    """Bytes that the first one is to find, those that it has included."""

    least: int
    """With less than this, memory has to be taken from the other one."""
    full: int
    """... and then until there is so much."""


class Demand:
    """What the first one wants. Told of every look in turn."""

    def __init__(self, looking: Looking, grain: int) -> None:
        """A burst is at its peak when it grows by less than `grain` bytes from there."""
        self._looking, self._grain = looking, grain
        self._now = 0.0
        self._samples: deque[tuple[float, int]] = deque()  # of the last GROWTH_S, and one before
        self._wants: deque[tuple[float, int]] = deque()  # of the last `hold`: falling, the first is the largest
        self._room = 0
        self._growth = self._lag = 0.0
        self._work: int | None = None
        self._quiet = math.inf  # seconds without work
        self._began = 0.0  # when the burst did
        self._peak, self._mark, self._peak_after = 0, 0, 0.0  # of this burst
        self._bursts: deque[tuple[int, float]] = deque(maxlen=BURSTS)
        self._expected, self._until = 0, 0.0

    @property
    def awake(self) -> bool:
        """Whether it works."""
        return self._quiet < self._looking.idle

    @property
    def growth(self) -> float:
        """Bytes a second that it is reckoned with to grow by."""
        return self._growth

    def look(self, seconds: float, held: int, work: int | None, pending: int) -> None:
        """It holds so much, `seconds` after the last look. `work` is a number that changes with whatever it does, if
        there is one, and `pending` its kernels that have not ended."""
        self._now += seconds
        self._lag = max(seconds, self._lag * math.exp(-seconds / LAG_S))
        self._grow(seconds, held)
        self._keep(held)
        was_awake, known = self.awake, self._work is not None
        worked = pending > 0 or (known and work != self._work)
        self._work = work
        self._quiet = 0.0 if worked else self._quiet + seconds
        if self.awake and not was_awake:
            self._begin(held)
        elif was_awake and not self.awake:
            self._bursts.append((self._peak, self._peak_after))
            self._until = 0.0
        if self.awake:
            self._peak = max(self._peak, held)
            if held >= self._mark + self._grain:
                self._mark, self._peak_after = held, self._now - self._began

    def _grow(self, seconds: float, held: int) -> None:
        samples = self._samples
        samples.append((self._now, held))
        while len(samples) > 2 and samples[1][0] <= self._now - GROWTH_S:
            samples.popleft()
        least = min(before for _, before in samples)
        growth = (held - least) / max(GROWTH_S, self._now - samples[0][0])
        self._growth = max(growth, self._growth * math.exp(-seconds / self._looking.hold), 0.0)

    def _keep(self, held: int) -> None:
        looking, wants = self._looking, self._wants
        ahead = int(self._growth * max(looking.lead, 2 * self._lag))
        self._room = min(looking.headroom + ahead, max(looking.headroom, looking.headroom_most))
        while wants and wants[-1][1] <= held + self._room:
            wants.pop()
        wants.append((self._now, held + self._room))
        while wants[0][0] < self._now - looking.hold:
            wants.popleft()

    def _begin(self, held: int) -> None:
        self._began, self._peak, self._mark, self._peak_after = self._now, held, held, 0.0
        if self._bursts:
            self._expected = min(peak for peak, _ in self._bursts)
            longest = max(after for _, after in self._bursts)
            self._until = self._now + min(LONGER * longest + self._looking.hold, self._looking.expect)

    def want(self, ceiling: int) -> Want:
        """What it is to find; never more than `ceiling` bytes, unless it has more."""
        held = self._samples[-1][1]
        expected = self._expected if self._now < self._until else 0
        most = max(held, ceiling)
        return Want(
            least=min(max(expected, held + self._room // 2), most), full=min(max(expected, self._wants[0][1]), most)
        )
