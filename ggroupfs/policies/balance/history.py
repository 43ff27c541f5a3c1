"""Remembers moves, and decides which groups may be moved again, and when. There is no clock: the caller gives the time.

A group is not moved twice within its rest, and the rest grows where that proves wrong. A move that was refused for good
is not tried again.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Collection

import attrs

from ggroupfs.client import GONE

NEVER = frozenset({errno.EOPNOTSUPP, errno.EPERM, errno.EACCES})
"""Errors of a move that would be the same for every GPU and every attempt."""
NOT_THERE = frozenset({errno.EXDEV, errno.EEXIST})
"""Errors of a move that are permanent for one target GPU: another chip, or work of the same process there."""
SOON = 12
"""Rests after a move within which another move shows that one of the two was wrong."""
PATIENCE_MOST = 64
"""Largest factor by which a rest is multiplied."""


@attrs.define
class _Moved:
    at: float
    """Time of arrival, seconds."""
    patience: int = 1
    """Factor by which the rest is multiplied."""


class History:
    """The history of all groups."""

    def __init__(self, rest: float = 60.0, cooldown: float = 5.0) -> None:
        """`rest` is the shortest stay of a moved group, and the delay before a refused move is tried again, in seconds.

        `cooldown` is the time between two plans for the same two GPUs, in seconds.
        """
        self._rest, self._cooldown = rest, cooldown
        self._moved: dict[str, _Moved] = {}
        self._refused: dict[tuple[str, int | None], float] = {}
        self._tries: dict[str, int] = {}
        self._pairs: dict[frozenset[int], float] = {}

    def may(self, now: float, name: str, here: int, there: int) -> bool:
        """Whether a group may be moved from GPU `here` to GPU `there`."""
        moved = self._moved.get(name)
        rested = moved is None or now - moved.at >= self._rest * moved.patience
        cool = now >= self._pairs.get(frozenset((here, there)), -math.inf)
        barred = max(self._refused.get((name, one), -math.inf) for one in (None, there))
        return rested and cool and now >= barred

    def moved(self, now: float, name: str, here: int, there: int) -> None:
        """Record a move that was made."""
        last = self._moved.get(name)
        patience = 1
        if last is not None and now - last.at < SOON * self._rest * last.patience:
            patience = min(PATIENCE_MOST, 2 * last.patience)
        self._moved[name] = _Moved(now, patience)
        self._tries.pop(name, None)
        self._cool(now, here, there)

    def refused(self, now: float, name: str, here: int, there: int, code: int) -> None:
        """Record a move that was refused with the errno `code`.

        It is tried again later, unless the error is permanent.
        """
        if code in NEVER:
            self._refused[name, None] = math.inf
        elif code in NOT_THERE:
            self._refused[name, there] = math.inf
        elif code not in GONE:
            tries = self._tries[name] = min(PATIENCE_MOST, 2 * self._tries.get(name, 0) or 1)
            self._refused[name, there if code == errno.ENOSPC else None] = now + self._rest * tries
        self._cool(now, here, there)

    def keep(self, names: Collection[str]) -> None:
        """Forget the groups that are not in `names`, except for the time of their last move.

        A service that is restarted is the same service to its clients.
        """
        self._refused = {key: until for key, until in self._refused.items() if key[0] in names}
        self._tries = {name: tries for name, tries in self._tries.items() if name in names}

    def _cool(self, now: float, here: int, there: int) -> None:
        self._pairs[frozenset((here, there))] = now + self._cooldown
        kept = SOON * PATIENCE_MOST * self._rest
        self._moved = {name: one for name, one in self._moved.items() if now - one.at < kept}
