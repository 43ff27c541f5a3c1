"""compute.max: the work that a group may do in each period, and what it did of that. Pure, in microseconds.

A group has its quota anew with each period. What it used beyond the quota is a debt, which the next periods pay. What
it left is lost, as with cpu.max without a burst, but where we kept it from using it: what it was thought to have used
then, and had not, is owed to it. So is what it left of a period in all of which it had work: others had the engine, as
much of it as was theirs. So a group that always has work has its quota to the microsecond in the long run,
however late it is heard what it used, and one that idles saves nothing up.
"""

from __future__ import annotations

import attrs

LEAST_US = 1_000
"""Microseconds that a group has left at least when it is let go on: less is not worth a start."""
CHECK_US = 1_000
"""Microseconds between two looks at a group that may run, at least."""
OWED_US = 1_000_000
"""Microseconds of which the quotas are owed at most to a group that waits for its turn meanwhile."""
BACK_US = 500_000
"""Microseconds of which the quotas are owed at most to a group that stood, where its use is heard of late: so much may
be given back in one period, as for a process that has ended."""
TURN_US = 500_000
"""Microseconds in which a turn has begun, and what is owed is used."""
DEBT_S, DEBT_LEAST_US = 60, 1_000_000
"""Seconds whose quotas are the most that a group owes from one period to the next, and microseconds of that at least:
what is more is forgotten. A lever that fails for long is no fault of the group, which would stand for hours."""
IDLE_CHECK_US = 20_000
"""Microseconds between two looks, at least, at a group that did nothing in its last period: so much it may do beyond
its quota when it begins."""


@attrs.define(eq=False)
class Account:
    """What one group may use, and has used."""

    quota_us: int
    """Work in each period, microseconds."""
    period_us: int
    """Length of a period, microseconds."""
    began_us: int
    """When the period that is under way began, microseconds."""
    left_us: int = attrs.field(init=False)
    """What is left of the quota; less than nothing where more was used."""
    is_spent: bool = False
    """Whether nothing of the group may run now."""
    is_kept: bool = False
    """Whether something of it stood in this period: what is left is owed to it."""
    waited_us: int | None = None
    """When something of it waited for its turn last: what is left then is owed to it, up to the quotas of OWED_US."""
    is_late: bool = False
    """Whether its use is heard of late. A group that stands does so until the next period then, and has in that what it
    is given back meanwhile: beside others, a group that goes on at once for a millisecond has nothing of that, or a
    whole slice."""
    strung: int = 1
    """Periods that are to be strung together from the next one on: their quotas are there at the beginning of them."""
    _span: int = attrs.field(default=1, init=False)  # periods that are strung together now
    _worked: bool = attrs.field(default=False, init=False)  # in them
    _idles: bool = attrs.field(default=True, init=False)  # since they began, and before
    _starves: bool | None = attrs.field(default=None, init=False)  # whether it had work for all of them; None: not told

    def __attrs_post_init__(self) -> None:
        self.left_us = self.quota_us

    def change(self, quota_us: int, period_us: int) -> None:
        """Take another quota and period, from the period that is under way on. What is owed stays owed."""
        used = self._span * self.quota_us - self.left_us
        self.quota_us, self.period_us = quota_us, period_us
        self.left_us = min(self._span * quota_us, self._span * quota_us - used)
        self.is_spent = self.is_spent and self.left_us < self._due_us

    def advance(self, now_us: int) -> int:
        """It is that time. Return the periods that have ended since it was told last, and in which the group had
        something to do."""
        active = 0
        while now_us >= self.began_us + self._span * self.period_us:
            if self.is_spent or self._worked:
                active += self._span
            self.began_us += self._span * self.period_us
            kept = max(-self._debt_most_us, min(self.left_us, self._owed_us))
            self.is_kept, self._worked, self._idles, self._span = False, False, not self._worked, self.strung
            self._starves = None
            if kept == 0 and self._idles:  # nothing is to be reckoned up to now
                spans = max(0, (now_us - self.began_us) // (self._span * self.period_us))
                self.began_us += spans * self._span * self.period_us
            self.left_us = kept + self._span * self.quota_us
            self.is_kept = self.is_spent = self.is_spent and self.left_us < self._due_us
        return active

    def charge(self, us: int) -> None:
        """Take note of work, microseconds; less than nothing where it was less than was thought."""
        self.left_us -= us
        self._worked = self._worked or us > 0

    def note(self, works_on: bool) -> None:
        """Take note whether something of it that might work had work for all of the time since the last look."""
        self._starves = works_on and self._starves is not False

    def decide(self) -> bool:
        """Return whether the group is to stand from now on, or to go on standing."""
        self.is_spent = (self.is_late or self.left_us < self._due_us) if self.is_spent else self.left_us <= 0
        self.is_kept = self.is_kept or self.is_spent
        return self.is_spent

    @property
    def _owed_us(self) -> int:
        """What may be left for the next period, microseconds."""
        waited = self.waited_us is not None and self.began_us - self.waited_us < TURN_US
        periods = self._span if self.is_kept or self._starves else 0
        if self.is_late and self.is_kept:
            periods = max(periods, BACK_US // self.period_us)
        return self.quota_us * (max(periods, OWED_US // self.period_us) if waited else periods)

    @property
    def _debt_most_us(self) -> int:
        """What a group may owe to the next period, microseconds."""
        return max(DEBT_LEAST_US, DEBT_S * 1_000_000 * self.quota_us // self.period_us)

    @property
    def _due_us(self) -> int:
        """What is to be left before it goes on, microseconds."""
        return min(LEAST_US, self.quota_us)

    def next_us(self, now_us: int) -> int:
        """Return when to look at it again, microseconds: when it may have used up what is left, since one engine does
        no more than a microsecond of work in each; or when it has enough to go on with."""
        if not self.is_spent:
            return now_us + max(IDLE_CHECK_US if self._idles and not self._worked else CHECK_US, self.left_us)
        missing = max(1, self._due_us - max(-self._debt_most_us, self.left_us))
        first_us = self.began_us + self._span * self.period_us
        more = -(-missing // (self.strung * self.quota_us)) - 1
        return first_us + more * self.strung * self.period_us
