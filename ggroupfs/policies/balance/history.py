"""Who was moved, and whom nobody should try to move: no group twice within its rest, and ever longer where that
proves wrong; what was refused for good is not tried again. Without a clock: times are told.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Collection

import attrs

from ggroupfs.client import GONE

NEVER = frozenset({errno.EOPNOTSUPP, errno.EPERM, errno.EACCES})
"""Errors of a move that another try would have too, to whatever GPU."""
NOT_THERE = frozenset({errno.EXDEV, errno.EEXIST})
"""... to that GPU: another chip, or work of the same process there."""
SOON = 12
"""A move within so many rests after the one before says that one of the two was wrong."""
PATIENCE_MOST = 64
"""A group rests for so many times its rest at most."""


@attrs.define
class _Moved:
    at: float
    """When it arrived, seconds."""
    patience: int = 1
    """For how many times the rest it stays."""


class History:
    """See the module."""

    def __init__(self, rest: float = 60.0, cooldown: float = 5.0) -> None:
        """`rest` are the seconds for which a group that was moved stays at least, and after which a move that was
        refused is tried again; `cooldown` those between two plans for the same two GPUs."""
        self._rest, self._cooldown = rest, cooldown
        self._moved: dict[str, _Moved] = {}
        self._refused: dict[tuple[str, int | None], float] = {}
        self._tries: dict[str, int] = {}
        self._pairs: dict[frozenset[int], float] = {}

    def may(self, now: float, name: str, here: int, there: int) -> bool:
        """Whether a group may be moved from a GPU to another one."""
        moved = self._moved.get(name)
        rested = moved is None or now - moved.at >= self._rest * moved.patience
        cool = now >= self._pairs.get(frozenset((here, there)), -math.inf)
        barred = max(self._refused.get((name, one), -math.inf) for one in (None, there))
        return rested and cool and now >= barred

    def moved(self, now: float, name: str, here: int, there: int) -> None:
        """It was."""
        last = self._moved.get(name)
        patience = 1
        if last is not None and now - last.at < SOON * self._rest * last.patience:
            patience = min(PATIENCE_MOST, 2 * last.patience)
        self._moved[name] = _Moved(now, patience)
        self._tries.pop(name, None)
        self._cool(now, here, there)

    def refused(self, now: float, name: str, here: int, there: int, code: int) -> None:
        """It was tried, and the answer was this errno. What may be otherwise later is tried again then."""
        if code in NEVER:
            self._refused[name, None] = math.inf
        elif code in NOT_THERE:
            self._refused[name, there] = math.inf
        elif code not in GONE:
            tries = self._tries[name] = min(PATIENCE_MOST, 2 * self._tries.get(name, 0) or 1)
            self._refused[name, there if code == errno.ENOSPC else None] = now + self._rest * tries
        self._cool(now, here, there)

    def keep(self, names: Collection[str]) -> None:
        """Those are there. Who is not is forgotten, but for when it was moved: a service that is started again is
        the same one, to whoever waits for it."""
        self._refused = {key: until for key, until in self._refused.items() if key[0] in names}
        self._tries = {name: tries for name, tries in self._tries.items() if name in names}

    def _cool(self, now: float, here: int, there: int) -> None:
        self._pairs[frozenset((here, there))] = now + self._cooldown
        kept = SOON * PATIENCE_MOST * self._rest
        self._moved = {name: one for name, one in self._moved.items() if now - one.at < kept}
