"""The decision of ``dynamic`` and ``cooperative``: the limit of the second one, from what the first one wants.

No clock and no files: figures and the time passed go in, a limit comes out. The policy of GhostFT and GVM-DYN, which
adjusts the limit of the low-priority task by the intensity of the high-priority one's work (Ghost, section 6.3.1); the
papers do not say how.
"""

from __future__ import annotations

import attrs

from ggroupfs.policies.dynamic.demand import Demand, Looking

GRANULE = 2 << 20
"""Limits are multiples of this: memory moves in such pieces."""
GRAINS = 64
"""A limit is raised by that part of the budget at least: less is not worth a write."""
RETRY_S = 1.0
"""After a limit was refused, before less is asked for again."""


@attrs.frozen
class Options:
    """What is decided by, besides how demand is told."""

    looking: Looking
    """See there."""
    floor: int = 0
    """Bytes that the second one may always have, however much the first one wants."""
    early: bool = False
    """Take memory as soon as there is less room than there should be, and not when half of it is gone."""


@attrs.frozen
class Figures:
    """What was seen."""

    seconds: float
    """Since the last figures."""
    budget: int
    """Bytes that both may have together."""
    high: int
    """Bytes that the first one has; what of it is in the host counts, for it wants that back."""
    low: int
    """Bytes that the second one has on the GPU."""
    ceiling: int | None = None
    """Bytes that the first one may have at most, by its own limit."""
    work: int | None = None
    """A number that changes with whatever the first one does on the GPU, if the machine can tell."""
    pending: int = 0
    """Kernels of the first one that have not ended."""


class Core:
    """Says which gmem.limit.high the second one is to have."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._demand: Demand | None = None
        self._now = self._retry = 0.0
        self._aim: int | None = None  # memory is being taken until the limit is that
        self.limit: int | None = None
        """What it has now; None: no limit, or nobody knows."""

    @property
    def growth(self) -> float:
        """Bytes a second that the first one is reckoned with to grow by."""
        return self._demand.growth if self._demand else 0.0

    def decide(self, figures: Figures, step: int) -> int | None:
        """The limit to be set now, or None to leave it as it is. At most `step` bytes are taken at a time, unless the
        first one is at the end of what is free already."""
        grain = max(GRANULE, figures.budget // GRAINS)
        if self._demand is None:
            self._demand = Demand(self._options.looking, grain)
        self._now += figures.seconds
        self._demand.look(figures.seconds, figures.high, figures.work, figures.pending)
        ceiling = figures.budget if figures.ceiling is None else min(figures.ceiling, figures.budget)
        want = self._demand.want(ceiling)
        goal = self._left(figures, want.full)
        most = self._left(figures, want.least)
        if self._options.early:
            most = min(most, goal + grain - 1)
        if self.limit is None or self.limit > most:
            self._aim = goal
        elif self._aim is not None and self.limit <= max(goal, self._aim):
            self._aim = None
        if self._aim is None:
            return goal if self.limit is not None and goal >= self.limit + grain else None
        if self._now < self._retry:
            return None
        limit, base = self._aim, figures.low if self.limit is None else min(figures.low, self.limit)
        if base - limit > step:
            limit = min(max(limit, _whole(base - step)), self._left(figures, figures.high))
        return limit if self.limit is None or limit < self.limit else None

    def accepted(self, limit: int) -> None:
        """That limit holds."""
        self.limit = limit

    def refused(self) -> None:
        """The limit could not be set; the old one holds. It is tried again, but not at once."""
        self._retry = self._now + RETRY_S

    def forget(self) -> None:
        """The second one has gone: whoever comes in its place has no limit."""
        self.limit, self._aim, self._retry = None, None, 0.0

    def _left(self, figures: Figures, wanted: int) -> int:
        return max(self._options.floor, _whole(figures.budget - wanted))


def _whole(nbytes: int) -> int:
    return max(0, nbytes // GRANULE * GRANULE)
