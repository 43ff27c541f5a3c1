"""Control files that are the policy's for a while: written when they change, in the end taken back."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping

import attrs

from backend.core.settings import MAX, PERIOD, QUOTA
from ggroupfs.client import GONE, Group
from ggroupfs.policies.slo.core import WHOLE
from ggroupfs.text.values import show_quota

log = logging.getLogger(__name__)


class By(enum.Enum):
    """What shares are."""

    WEIGHT = "weight"
    """Weights: what a group does not use the others have."""
    QUOTA = "quota"
    """Quotas, of those without bounds as well: none has more than its share, also on an idle GPU."""
    BOTH = "both"
    """Weights, and for those with bounds quotas besides: the others have what these leave."""


@attrs.frozen
class Wanted:
    """What a group is to have; None for what it had before."""

    weight: int | None = None
    """compute.weight."""
    priority: int | None = None
    """compute.priority."""
    quota: str | None = None
    """compute.max."""


def wanted(
    shares: Mapping[str, int], others: int, priority: int, by: By = By.WEIGHT, period_us: int = PERIOD.default
) -> tuple[Mapping[str, Wanted], Wanted]:
    """What groups are to have that were given these points, and each of the `others`, which have none.

    Points are weights, or parts of periods of so many microseconds, or both; what is left is for the others, in equal
    parts. Where nothing is left no weight says so: it is `priority` then, that of the groups, and the others fill what
    these leave; those that have quotas have the least that there is.
    """
    left = WHOLE - sum(shares.values())
    first = None if left > 0 else priority
    part = left // max(1, others)

    def one(points: int, first: int | None, *, limited: bool) -> Wanted:
        weight = None if by is By.QUOTA else max(1, points)
        return Wanted(weight, first, quota(points, period_us) if limited else None)

    critical = {name: one(share, first, limited=by is not By.WEIGHT) for name, share in shares.items()}
    return critical, one(part, None, limited=by is By.QUOTA)


def quota(points: int, period_us: int) -> str:
    """What compute.max takes for a share in points; ``max`` for all of a GPU."""
    us = MAX if points >= WHOLE else max(QUOTA.least, points * period_us // WHOLE)
    return show_quota(us, period_us)


class Levers:
    """compute.weight, compute.priority and compute.max of one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._before: dict[str, str] = {}
        self._ours: dict[str, str] = {}
        self._complained = False

    async def apply(self, what: Wanted) -> None:
        """Writes what is not as it is to be. What fails is told once, and left for the next time."""
        try:
            await self._set("compute.weight", None if what.weight is None else str(what.weight))
            await self._set("compute.priority", None if what.priority is None else str(what.priority))
            await self._set("compute.max", what.quota)
            self._complained = False
        except OSError as error:
            if error.errno not in GONE and not self._complained:
                log.error("%s: %s", self._group.path, error.strerror)
                self._complained = True

    def follow(self, group: Group) -> None:
        """The group, and what was written, is there now."""
        self._group = group

    def forget(self) -> None:
        """The group is gone, and what was written with it."""
        self._before.clear()
        self._ours.clear()

    async def release(self) -> None:
        """Takes back what was written, unless another program has written something else since."""
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
