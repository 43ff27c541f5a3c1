"""The decision of ``dynamic`` and ``cooperative``: the limit of the low group, from the demand of the high group.

There is no clock and no file here: figures and elapsed time go in, a limit comes out. This is the policy of GhostFT and
GVM-DYN, which adjusts the limit of the low-priority task to the intensity of the high-priority one's work (Ghost,
section 6.3.1); the papers do not say how.
"""

from __future__ import annotations

import attrs

from ggroupfs.policies.dynamic.demand import Demand, Looking

GRANULE = 2 << 20
"""Unit of limits, bytes: memory moves in pieces of this size."""
GRAINS = 64
"""A limit is raised by at least the budget divided by this; a smaller raise is not worth a write."""
RETRY_S = 1.0
"""Seconds after a refused limit before memory is asked for again."""


@attrs.frozen
class Options:
    """The settings of the decision, apart from those of the estimated demand."""

    looking: Looking
    """The settings of the estimated demand."""
    floor: int = 0
    """Bytes that the low group may always have, whatever the high group wants."""
    early: bool = False
    """Whether memory is taken as soon as less than the full room is free, and not only once half of it is gone."""


@attrs.frozen
class Figures:
    """The figures of both groups at one look."""

    seconds: float
    """Seconds since the previous figures."""
    budget: int
    """Bytes that both groups may have together."""
    high: int
    """Bytes that the high group has. Its bytes in the host count too, because it wants them back."""
    low: int
    """Bytes that the low group has on the GPU."""
    ceiling: int | None = None
    """Bytes that the high group may have at most, by its own limit; None: no limit."""
    work: int | None = None
    """A number that changes with any work of the high group on the GPU; None where the machine cannot tell."""
    pending: int = 0
    """Kernels of the high group that have not ended."""


class Core:
    """Decides the gmem.limit.high of the low group."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._demand: Demand | None = None
        self._now = self._retry = 0.0
        self._aim: int | None = None  # the limit down to which memory is being taken
        self.limit: int | None = None
        """Limit of the low group that is in force, bytes; None: no limit, or an unknown one."""

    @property
    def growth(self) -> float:
        """Expected growth of the high group, bytes per second."""
        return self._demand.growth if self._demand else 0.0

    def decide(self, figures: Figures, step: int) -> int | None:
        """Return the limit to set now, in bytes, or None to leave it as it is.

        At most `step` bytes are taken at a time, or more if the high group already holds more than that would leave it.
        """
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
        """Note that a limit, in bytes, is in force."""
        self.limit = limit

    def refused(self) -> None:
        """Note that the limit could not be set and the old one holds. The next attempt is RETRY_S seconds away."""
        self._retry = self._now + RETRY_S

    def forget(self) -> None:
        """Forget the limit of a low group that has gone; its successor has none."""
        self.limit, self._aim, self._retry = None, None, 0.0

    def _left(self, figures: Figures, wanted: int) -> int:
        return max(self._options.floor, _whole(figures.budget - wanted))


def _whole(nbytes: int) -> int:
    return max(0, nbytes // GRANULE * GRANULE)
