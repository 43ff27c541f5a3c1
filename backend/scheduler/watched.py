"""What of its time on the engine a program without the library works. Pure, in microseconds.

Nothing tells when such a program has work. All of its time on the engine counts, and less only where samples of the
driver say so for certain: those of times in which it was on the runlist from beginning to end. What a program does that
is had stand and go on is a matter of its quota; a sample that covers some of both says more of the phase of one to the
other, and a quota that went by that would feed itself.

Samples are some time late: what was counted since the last one is put right with the next.
"""

from __future__ import annotations

import math

import attrs

from backend.core.records import Activity

MEMORY_US = 1_500_000
"""Microseconds of samples in which older ones come to count a third: nine of an H200's, which differ by percents."""
PUT_RIGHT_US = 5_000_000
"""Microseconds on the engine that are put right with a sample, at most: what was long ago may have been otherwise."""
WORKS, IDLES = 0.9, 0.97
"""Part of its time from which on a program is taken to work always: to let others wait for it is no loss; and below
which it idles in between, by so much that its quota is another one."""
ON_US = 360_000
"""Microseconds on the runlist in one go in which a whole sample falls, whenever that begins: two of an H200's are
333 ms."""
AGAIN_US = 60_000_000
"""Microseconds after which it is looked again whether one that works always still does."""
FIRST_US = 3_300_000
"""Microseconds after which it is looked for the first time whether it does, where no sample has told by then."""
NEW_US = 10_000_000
"""The same of a program that is below a quota from its start on: where programs come and go, each of them would else
have a long cycle soon after it has come, and the quota of all of them with it."""
TRIED_US = 5_000_000
"""Microseconds for which that is tried where no sample comes, before it is given up for as long."""


@attrs.define(eq=False)
class Watched:
    """What samples say of one process."""

    part: float = 1.0
    """Part of its time on the engine that it is taken to work."""
    is_seen: bool = False
    """Whether any sample has told since it is watched."""
    _is_known: bool = False  # whether it ran before it was below a quota
    _told: tuple[int, int] | None = None  # time that was watched, and busy, as it was told last
    _weight: float = 0.0  # microseconds of samples that the part is made of
    _open: float = 0.0  # on the engine since the last sample
    _counted: float = 0.0  # ... and what of that was counted
    _due_us: int | None = None  # when it is to be watched again
    _is_fresh: bool = False  # whether a sample has told since it was last
    _tries_us: int | None = None  # since when it is

    def begin(self, activity: Activity) -> None:
        """It is watched from now on. What was told before is the guess for what comes until the first sample."""
        self._is_known = True
        if activity.watched_usec and activity.watched_busy_usec is not None:
            self.part = min(1.0, activity.watched_busy_usec / activity.watched_usec)
        self._told = (activity.watched_usec or 0, activity.watched_busy_usec or 0)

    def take(self, used: float, activity: Activity) -> float:
        """Return what is to be counted where it had the engine for so long, and what was not counted before."""
        counted = used * self.part
        self._open += used
        self._counted += counted
        told = (activity.watched_usec or 0, activity.watched_busy_usec or 0)
        watched, busy = (now - before for now, before in zip(told, self._told or told, strict=True))
        self._told = told
        if watched <= 0:
            return counted
        part = max(0.0, min(1.0, busy / watched))
        counted += (part * self._open - self._counted) * min(1.0, PUT_RIGHT_US / max(1.0, self._open))
        self._open = self._counted = 0.0
        self._learn(part, watched)
        return counted

    def wants_sight(self, now_us: int) -> bool:
        """Whether it is to be on the runlist for ON_US in one go: nothing has told of it, or not for long; or it idles,
        by which its quota goes with what is told."""
        if self.is_seen and self.part < IDLES:
            return True
        if self._due_us is None:
            self._due_us = now_us + (FIRST_US if self._is_known else NEW_US)
        if now_us < self._due_us:
            return False
        tries_us = self._tries_us = now_us if self._tries_us is None else self._tries_us
        if self._is_fresh or now_us - tries_us >= TRIED_US:
            self._due_us, self._tries_us, self._is_fresh = now_us + AGAIN_US, None, False
            return False
        return True

    @property
    def works(self) -> bool:
        """Whether it has work at all times, as far as is known: all of its time counts until samples say otherwise."""
        return self.part >= WORKS

    @property
    def is_told(self) -> bool:
        """Whether samples have ever told of it."""
        return self._weight > 0

    def _learn(self, part: float, watched: float) -> None:
        kept = self._weight * math.exp(-watched / MEMORY_US)
        self.part = (self.part * kept + part * watched) / (kept + watched)
        self._weight = kept + watched
        self.is_seen = self._is_fresh = True
