"""Next use: how soon a process uses its memory again, as far as that can be told. Reclaim takes the farthest first.

It is a class and no time: processes whose next use is about as far are equals, and reclaim leaves them level. A class
comes nearer at once, since memory that is taken from a program at work is missed at once. It goes farther after that
was so for HOLD_S, so that turns that come and go in less than that leave equals what they are. Classes are pure and
have no clock: the ledger is told of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence

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


NEXT_USE_MOST = int(max(NextUse))
"""Greatest class."""
NEXT_USE_S = 30
"""Seconds after which a class that was not said again is not known any more: the daemon that said it may be gone."""

IDLE_S: Mapping[NextUse, float] = {NextUse.ASLEEP: 600.0, NextUse.RESTING: 60.0, NextUse.IDLE: 10.0}
"""Seconds without any use after which a process is of a class, the farthest class first."""
HOLD_S = 1.0
"""Seconds for which a process looks farther than its class before it is of a farther one."""
TURNS_NEAR = 1
"""Turns before its own at which a program still counts as near: while one runs, the next has its memory."""


@attrs.frozen
class Order:
    """What a scheduler knows of what comes."""

    turns: Sequence[Process] = ()
    """The processes that take turns: the one whose turn it is, then those that wait, in the order in which they run."""
    leads: Collection[Process] = frozenset()
    """The processes that go before others whenever they have work: theirs is always the next turn."""


NO_ORDER = Order()
"""What is known where nothing is scheduled."""


@attrs.frozen
class Sight:
    """What was seen of a process, up to a time."""

    busy_usec: int | None
    """Microseconds on the engine with work to do, ever; None where the machine cannot tell."""
    charged: int
    """Bytes that it has, on the GPU and in the host."""


@attrs.define
class Prospect:
    """What is known of one process."""

    sight: Sight
    """What was seen of it last."""
    used: float
    """When it was seen to use the GPU last, seconds; when it came, where it never was."""
    next_use: NextUse | None = None
    """Its class; None while nothing is known: it was not seen to use the GPU, nor to leave it alone for long."""
    farther: float | None = None
    """Since when it looks farther than its class, seconds; None where it does not."""

    def see(self, now: float, sight: Sight) -> None:
        """Note what is seen of it now: what it did, and memory that it came by, is use. Memory that comes back from the
        host is none, since that is no decision of the program."""
        before, self.sight = self.sight, sight
        if sight.busy_usec is None:
            self.used = now
        elif sight.busy_usec != before.busy_usec or sight.charged > before.charged:
            self.used = now
            self.next_use, self.farther = NextUse.SOON, None

    def judge(self, now: float, turn: int | None, is_leading: bool) -> None:
        """Find its class, with so many `turn`s before its own; None where it takes none."""
        if turn is not None:
            self.used = now  # it has work, and cannot show it before its turn comes
        if is_leading or (turn is not None and turn <= TURNS_NEAR):
            self.next_use, self.farther = NextUse.SOON, None
            return
        wanted = NextUse.LATER if turn is not None else self._rested(now)
        if wanted <= (self.next_use or NextUse.SOON):
            self.next_use = wanted if self.next_use is not None else None
            self.farther = None
            return
        if self.farther is None:
            self.farther = now
        if now - self.farther >= HOLD_S:
            self.next_use, self.farther = wanted, None

    def _rested(self, now: float) -> NextUse:
        """Return the class of a process that takes no turns."""
        return next((one for one, seconds in IDLE_S.items() if now - self.used >= seconds), NextUse.SOON)


class Outlook:
    """The classes of all processes of one GPU."""

    def __init__(self) -> None:
        self._known: dict[Process, Prospect] = {}

    def see(self, now: float, sights: Mapping[Process, Sight]) -> None:
        """Note what is seen of all processes at the time `now`, seconds; one that is not among them is forgotten."""
        last, self._known = self._known, {}
        for process, sight in sights.items():
            prospect = self._known[process] = last.get(process) or Prospect(sight, now)
            prospect.see(now, sight)

    def judge(self, now: float, order: Order = NO_ORDER) -> Mapping[Process, NextUse]:
        """Return the class of each process of which one is known, at the time `now`, seconds."""
        turns = {process: place for place, process in enumerate(order.turns)}
        for process, prospect in self._known.items():
            prospect.judge(now, turns.get(process), process in order.leads)
        return {process: one.next_use for process, one in self._known.items() if one.next_use is not None}
