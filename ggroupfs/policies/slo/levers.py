"""Control files that are the policy's for a while: written when they change, in the end taken back."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import attrs

from ggroupfs.client import GONE, Group
from ggroupfs.policies.slo.core import WHOLE

log = logging.getLogger(__name__)


@attrs.frozen
class Wanted:
    """What a group is to have; None for what it had before."""

    weight: int | None = None
    """compute.weight."""
    priority: int | None = None
    """compute.priority."""


def wanted(shares: Mapping[str, int], others: int, priority: int) -> tuple[Mapping[str, Wanted], Wanted]:
    """What groups are to have that were given these points, and each of the `others`, who have none.

    Weights are points; what is left is for the others, in equal parts. Where nothing is left no weight says so: it is
    `priority` then, that of the groups, and the others fill what these leave.
    """
    left = WHOLE - sum(shares.values())
    first = None if left > 0 else priority
    rest = Wanted(max(1, left // max(1, others)))
    return {name: Wanted(max(1, share), first) for name, share in shares.items()}, rest


class Levers:
    """compute.weight and compute.priority of one group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._before: dict[str, int] = {}
        self._ours: dict[str, int] = {}
        self._complained = False

    async def apply(self, what: Wanted) -> None:
        """Writes what is not as it is to be. What fails is told once, and left for the next time."""
        try:
            for name, value in (("compute.weight", what.weight), ("compute.priority", what.priority)):
                await self._set(name, value)
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
        """Takes back what was written, unless somebody else has written something else since."""
        await self.apply(Wanted())

    async def _set(self, name: str, value: int | None) -> None:
        if value is None:
            if name in self._ours:
                if await self._group.number(name) == self._ours[name]:
                    await self._group.write(name, self._before[name])
                del self._ours[name]
        elif self._ours.get(name) != value:
            if name not in self._before:
                before = await self._group.number(name)
                assert before is not None, "a weight is a number"
                self._before[name] = before
            await self._group.write(name, value)
            self._ours[name] = value
