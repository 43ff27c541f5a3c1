"""Next use: how soon a process uses its memory again, as far as that can be told. Reclaim takes the farthest first.

It is a class and no time: processes whose next use is about as far are equals, and reclaim leaves them level. A class
comes nearer at once, since memory that is taken from a program at work is missed at once. It goes farther after that
was so for HOLD_S, so that turns that come and go in less than that leave equals what they are. Classes are pure and
have no clock: the ledger is told of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping, Sequence

import attrs

from backend.process.identity import Process


class NextUse(enum.IntEnum):
    """How soon a process uses its memory again: the greater, the farther."""

    SOON = 0
    """It runs, its turn is the next, or nothing is known of it."""
    LATER = 1
    """Others have their turns before it."""
    IDLE = 2
    """It ran nothing for some seconds."""
    RESTING = 3
    """It ran nothing for a minute."""
    ASLEEP = 4
    """It ran nothing for ten minutes."""


NEXT_USE_MOST = 255
"""Greatest number that a ledger takes (GGROUP_NEXT_USE_MOST): more than :meth:`Outlook.rank` has use for, so that a
daemon with more classes is understood by a module that has been loaded for long."""
NEXT_USE_S = 30
"""Seconds after which a class that was not said again is not known any more: the daemon that said it may be gone."""

IDLE_S: Mapping[NextUse, float] = {NextUse.ASLEEP: 600.0, NextUse.RESTING: 60.0, NextUse.IDLE: 10.0}
"""Seconds without any use after which a process is of a class, the farthest class first."""
HOLD_S = 1.0
"""Seconds for which a process looks farther than its class before it is of a farther one."""
GREW_LEAST = 2 << 20
"""Bytes by which a process grows that came by memory: less is the driver's own, which a move may take as well."""
TURNS_NEAR = 1
"""Programs that wait and count as near, those whose turns come first: while one runs, the next has its memory."""


@attrs.frozen
class Order:
    """What a scheduler knows of the processes that it schedules."""

    waiting: Sequence[Process] = ()
    """The processes that wait for their turns, the next one first."""
    leads: Collection[Process] = frozenset()
    """The processes of better priority than the default that go before others whenever they have work: theirs is always
    the next turn."""
    behind: Sequence[tuple[Collection[Process], Collection[Process]]] = ()
    """Processes of worse priority than the default, and those that go before them: the former give no later than the
    latter. A process may be behind others at several levels."""


NO_ORDER = Order()
"""What is known where nothing is scheduled."""


@attrs.frozen
class Sight:
    """What was seen of a process, up to a time."""

    charged: int
    """Bytes that it has, on the GPU and in the host."""
    done: Hashable = None
    """What it has done ever, in any figures that change as it uses the GPU; None where the machine cannot tell."""
    has_work: bool = True
    """Whether it may have work that is not done."""
    can_give: bool = True
    """Whether memory of it can be moved now."""


@attrs.define
class Prospect:
    """What is known of one process."""

    sight: Sight
    """What was seen of it last."""
    used: float
    """When it was seen to use the GPU last, seconds; when it came, where it never was."""
    grew: float
    """When it came by memory last, seconds: that is about to be used."""
    next_use: NextUse = NextUse.SOON
    """Its class."""
    farther: float | None = None
    """Since when it looks farther than its class, seconds; None where it does not."""

    def see(self, now: float, sight: Sight) -> None:
        """Note what is seen of it, at a time at which it was so. Memory that comes back from the host is none that it
        came by: that it comes is no decision of the program."""
        before, self.sight = self.sight, sight
        if sight.done is None or sight.done != before.done:
            self.used = now
        if sight.charged >= before.charged + GREW_LEAST:
            self.grew = now

    def judge(self, now: float, place: int | None, is_leading: bool) -> NextUse:
        """Return its class. `place` is that among those that wait for their turns, from 0, None where it does not
        wait."""
        if place is not None and self.sight.has_work:
            self.used = now  # it has work, and cannot show it before its turn comes
            wanted = NextUse.SOON if place < TURNS_NEAR else NextUse.LATER
        else:
            wanted = _rested(min(now - self.grew, now - self.used))
        if is_leading:
            wanted = NextUse.SOON
        if wanted <= self.next_use:
            self.next_use, self.farther = wanted, None
        elif self.farther is None:
            self.farther = now
        elif now - self.farther >= HOLD_S:
            self.next_use, self.farther = wanted, None
        return self.next_use


def _rested(seconds: float) -> NextUse:
    """Return the class of a process that did not use the GPU for so long."""
    return next((one for one, least in IDLE_S.items() if seconds >= least), NextUse.SOON)


class Outlook:
    """The classes of all processes of one GPU. One that has come is SOON."""

    def __init__(self) -> None:
        self._known: dict[Process, Prospect] = {}
        self._judged: float | None = None
        """When classes were judged last, seconds."""

    def is_at_work(self, process: Process, sight: Sight) -> bool:
        """Whether what is seen of a process says that it did something, or grew, since it was seen before; False of one
        that was not."""
        known = self._known.get(process)
        return known is not None and (
            sight.done != known.sight.done or sight.charged >= known.sight.charged + GREW_LEAST
        )

    def see(self, now: float, sights: Mapping[Process, Sight]) -> None:
        """Note what is seen of all processes at the time `now`, seconds; one that is not among them is forgotten."""
        last, self._known = self._known, {}
        for process, sight in sights.items():
            prospect = self._known[process] = last.get(process) or Prospect(sight, now, now)
            prospect.see(now, sight)

    def judge(self, now: float, order: Order = NO_ORDER) -> Mapping[Process, NextUse]:
        """Return the class of each process, at the time `now`, seconds. One that is behind others is at least as far as
        the farthest of them: it gives with them, or before them.

        Where two looks are farther apart than HOLD_S it says nothing that a process waits for its turn at both: it may
        have had turns in between, and have one before the next look."""
        far_apart = self._judged is not None and now - self._judged > HOLD_S
        self._judged = now
        places = {process: 0 if far_apart else place for place, process in enumerate(order.waiting)}
        found = {
            process: one.judge(now, places.get(process), process in order.leads) for process, one in self._known.items()
        }
        told = dict(found)
        for behind, ahead in order.behind:
            farthest = max((found[process] for process in ahead if process in found), default=NextUse.SOON)
            told |= {process: max(told[process], farthest) for process in behind if process in told}
        return told

    def rank(self, classes: Mapping[Process, NextUse], order: Order = NO_ORDER) -> Mapping[Process, int]:
        """Return what the ledger is told for classes that were judged, 0 to NEXT_USE_MOST: the greater, the farther. Of
        those that are as far as others that they are behind the ones give first that are idle themselves. One that has
        nothing to give now is asked last: a plan of the module breaks off where the first that it asks give nothing."""
        behind = {process for those, _ in order.behind for process in those}
        return {
            process: len(NextUse) * next_use + (self._known[process].next_use if process in behind else 0)
            if self._known[process].sight.can_give
            else int(NextUse.SOON)
            for process, next_use in classes.items()
        }
