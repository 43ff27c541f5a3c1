"""The control files that the policy sets for a while: written when a value changes, and restored at the end."""

from __future__ import annotations

import enum
import errno
import logging
from collections.abc import Awaitable, Callable, Mapping

import attrs

from backend.core.settings import MAX, PERIOD, QUOTA
from ggroupfs.client import GONE, Group
from ggroupfs.policies.slo.core import WHOLE
from ggroupfs.text.values import show_quota

log = logging.getLogger(__name__)


class By(enum.Enum):
    """The control files that carry the shares."""

    WEIGHT = "weight"
    """Weights: other groups may use what a group leaves idle."""
    QUOTA = "quota"
    """Quotas, also for groups without bounds: no group gets more than its share, even on an idle GPU."""
    BOTH = "both"
    """Weights for all, and quotas for groups with bounds; the other groups get what these leave."""


@attrs.frozen
class Wanted:
    """The settings of a group; None leaves or restores the group's own."""

    weight: int | None = None
    """Value for compute.weight."""
    priority: int | None = None
    """Value for compute.priority."""
    quota: str | None = None
    """Value for compute.max."""
    sms: str | None = attrs.field(default=None, eq=False)
    """The same part of the GPU for compute.sm.max, which has it in a slice whose programs run at the same time."""


def wanted(
    shares: Mapping[str, int], others: int, priority: int, by: By = By.WEIGHT, period_us: int = PERIOD.default
) -> tuple[Mapping[str, Wanted], Wanted]:
    """Return the settings of the groups with shares, in points, and those of each of the `others`.

    Points become weights, or parts of periods of `period_us` microseconds, or both. What is left is divided equally
    among the others. If nothing is left, no weight can express that: the groups with shares then get `priority`, and
    the others fill the gaps; others with quotas get the smallest quota that there is.
    """
    left = WHOLE - sum(shares.values())
    first = None if left > 0 else priority
    part = left // max(1, others)

    def one(points: int, first: int | None, *, limited: bool) -> Wanted:
        weight = None if by is By.QUOTA else max(1, points)
        if not limited:
            return Wanted(weight, first)
        return Wanted(weight, first, quota(points, period_us), sms(points))

    critical = {name: one(share, first, limited=by is not By.WEIGHT) for name, share in shares.items()}
    return critical, one(part, None, limited=by is By.QUOTA)


def quota(points: int, period_us: int) -> str:
    """Return the value of compute.max for a share in points; ``max`` for a whole GPU."""
    us = MAX if points >= WHOLE else max(QUOTA.least, points * period_us // WHOLE)
    return show_quota(us, period_us)


def sms(points: int) -> str:
    """Return the value of compute.sm.max for a share in points, a percentage; ``max`` for a whole GPU."""
    return "max" if points >= WHOLE else f"{max(1, points) * 100 / WHOLE:g}%"


async def never() -> bool:
    """Return that a group shares its GPU by time."""
    return False


class Levers:
    """The files compute.weight, compute.priority, and compute.max or compute.sm.max of one group."""

    def __init__(self, group: Group, is_spatial: Callable[[], Awaitable[bool]] = never) -> None:
        """`is_spatial` returns whether the programs of the slice that the group is in run at the same time: time is
        no share there, and SMs are."""
        self._group = group
        self._is_spatial = is_spatial
        self._before: dict[str, str] = {}
        self._ours: dict[str, str] = {}
        self._complained = False
        self._is_refused = False  # whether kernels of its programs cannot be placed

    async def apply(self, what: Wanted) -> None:
        """Write the settings that differ. A failure is logged once, and tried again with the next call."""
        try:
            await self._set("compute.weight", None if what.weight is None else str(what.weight))
            await self._set("compute.priority", None if what.priority is None else str(what.priority))
            is_placed = await self._place(what.sms)
            await self._set("compute.max", None if is_placed else what.quota)
            if not is_placed:
                await self._set("compute.sm.max", None)
            self._complained = False
        except OSError as error:
            if error.errno not in GONE and not self._complained:
                log.error("%s: %s", self._group.path, error.strerror)
                self._complained = True

    async def _place(self, sms: str | None) -> bool:
        """Return whether the group has its part of the GPU as SMs: its programs run at the same time, and their kernels
        can be placed.
        """
        if sms is None or self._is_refused or not await self._is_spatial():
            return False
        try:
            await self._set("compute.sm.max", sms)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._is_refused = True
            log.warning("%s: shares are compute.max: %s", self._group.path, error.strerror)
        return not self._is_refused

    def follow(self, group: Group) -> None:
        """Continue with a group that has moved to another directory together with its settings."""
        self._group = group

    def forget(self) -> None:
        """Forget all settings: the group is gone, and they went with it."""
        self._before.clear()
        self._ours.clear()
        self._is_refused = False

    async def release(self) -> None:
        """Restore the old values, except where another program has written since."""
        await self.apply(Wanted())

    async def _set(self, name: str, value: str | None) -> None:
        if value is None:
            if name in self._ours:
                if await self._group.read(name) == self._ours[name]:
                    await self._group.write(name, self._before[name])
                del self._ours[name]
        elif self._ours.get(name) != value:
            if name not in self._before:
                self._before[name] = await self._group.read(name)
            await self._group.write(name, value)
            self._ours[name] = value
