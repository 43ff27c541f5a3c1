"""Estimates how much memory the high group is going to want: what it holds, its growth, and its earlier bursts.

The memory held now does not tell what is asked for next, and memory in use elsewhere takes time to become free: it goes
to the host at some 40 GB/s once the kernels that use it have ended. So some room is always kept free ahead of the
group, and more of it the faster the group grows. Two signs of demand come earlier than growth: work that begins after a
pause, and the memory that the last bursts of work came to hold.
"""

from __future__ import annotations

import math
from collections import deque

import attrs

GROWTH_S = 0.1
"""Seconds over which growth is measured, so that a single allocation is not taken for a trend."""
LAG_S = 10.0
"""Time constant, in seconds, with which the longest gap between two looks is forgotten."""
BURSTS = 2
"""Earlier bursts that are remembered. The smallest of their peaks is expected again: a single large burst is no habit,
and an occasional kernel after many requests does not begin another large burst."""
LONGER = 1.25
"""Factor by which a burst may take longer to reach its peak than the earlier ones did."""


@attrs.frozen
class Looking:
    """The settings of the estimate."""

    headroom: int
    """Bytes kept free ahead of the group while it does not grow."""
    headroom_most: int
    """Bytes kept free ahead of the group at most, however fast it grows."""
    lead: float = 0.5
    """Seconds of growth that are kept free in addition to `headroom`."""
    hold: float = 0.5
    """Seconds for which demand is remembered: the shortest time in which memory goes away and comes back."""
    idle: float = 0.2
    """Seconds without work after which the group is idle; its next work begins a burst."""
    expect: float = 10.0
    """Seconds for which a burst is expected to grow as large as the earlier ones, at most."""


@attrs.frozen
class Want:
    """The memory that the group should find: bytes, including those that it holds."""

    least: int
    """Threshold: with less than this, memory is taken from the low group."""
    full: int
    """Target: once memory is being taken, it is taken until this much is there."""


class Demand:
    """The estimated demand of the high group. It has to be told of every look, in order."""

    def __init__(self, looking: Looking, grain: int) -> None:
        """A burst has reached its peak once it no longer grows by `grain` bytes."""
        self._looking, self._grain = looking, grain
        self._now = 0.0
        self._samples: deque[tuple[float, int]] = deque()  # of the last GROWTH_S, and one sample before it
        self._wants: deque[tuple[float, int]] = deque()  # of the last `hold` seconds: falling, largest first
        self._room = 0
        self._growth = self._lag = 0.0
        self._work: int | None = None
        self._quiet = math.inf  # seconds without work
        self._began = 0.0  # time at which the burst began
        self._peak, self._mark, self._peak_after = 0, 0, 0.0  # of this burst
        self._bursts: deque[tuple[int, float]] = deque(maxlen=BURSTS)
        self._expected, self._until = 0, 0.0

    @property
    def awake(self) -> bool:
        """Whether the group works, or did so less than `idle` seconds ago."""
        return self._quiet < self._looking.idle

    @property
    def growth(self) -> float:
        """Expected growth, bytes per second."""
        return self._growth

    def look(self, seconds: float, held: int, work: int | None, pending: int) -> None:
        """Take in one look, `seconds` after the previous one, at a group that holds `held` bytes.

        `work` is a number that changes with any work of the group, or None where there is none; `pending` is the number
        of its kernels that have not ended.
        """
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
        """Return the memory that the group should find: at most `ceiling` bytes, unless it already holds more."""
        held = self._samples[-1][1]
        expected = self._expected if self._now < self._until else 0
        most = max(held, ceiling)
        return Want(
            least=min(max(expected, held + self._room // 2), most), full=min(max(expected, self._wants[0][1]), most)
        )
