"""Next use: how soon a process will use its memory again, as far as that can be told. Reclaim takes the farthest first.

It is a class rather than a time: processes with about equally far next uses are equals, and reclaim levels them. A
class becomes nearer at once, since memory taken from a program at work is missed at once. It becomes farther only after
that looked so for HOLD_S, so that turns shorter than that leave equals equal. Classes are pure and have no clock; the
ledger is told of them.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping, Sequence

import attrs

from backend.process.identity import Process


class NextUse(enum.IntEnum):
    """How soon a process uses its memory again: the greater, the farther."""

    SOON = 0
    """It runs, its turn is next, or nothing is known of it."""
    LATER = 1
    """Other programs have their turns before it."""
    IDLE = 2
    """It has run nothing for some seconds."""
    RESTING = 3
    """It has run nothing for a minute."""
    ASLEEP = 4
    """It has run nothing for ten minutes."""


NEXT_USE_MOST = 255
"""Greatest rank that a ledger takes (GGROUP_NEXT_USE_MOST): more than :meth:`Outlook.rank` needs, so that a module that
has been loaded for long understands a daemon with more classes."""
NEXT_USE_S = 30
"""Seconds after which the ledger forgets a class that was not repeated: the daemon that told it may be gone."""

IDLE_S: Mapping[NextUse, float] = {NextUse.ASLEEP: 600.0, NextUse.RESTING: 60.0, NextUse.IDLE: 10.0}
"""Seconds without use after which a process is in a class, farthest class first."""
HOLD_S = 1.0
"""Seconds for which a process must look farther than its class before it is put into a farther one."""
GREW_LEAST = 2 << 20
"""Bytes of growth that count as the program's own: smaller growth may be the driver's, which a move causes as well."""
TURNS_NEAR = 1
"""Number of waiting programs, first in the order of turns, that count as near: while one runs, the next has its
memory."""


@attrs.frozen
class Order:
    """The order in which a scheduler gives processes their turns."""

    waiting: Sequence[Process] = ()
    """The processes that wait for their turns, the next first."""
    leads: Collection[Process] = frozenset()
    """The processes of better priority than the default, which go first whenever they have work: the next turn is
    always theirs."""
    behind: Sequence[tuple[Collection[Process], Collection[Process]]] = ()
    """Pairs of processes of worse priority than the default and those that go before them: reclaim takes from the
    former no later than from the latter. A process may be in several pairs, at several levels."""


NO_ORDER = Order()
"""The order where nothing is scheduled."""


@attrs.frozen
class Sight:
    """A sighting of a process, up to some time."""

    charged: int
    """Bytes that it holds, on the GPU and in the host."""
    done: Hashable = None
    """What it has done so far, in any figures that change as it uses the GPU; None where the machine cannot tell."""
    has_work: bool = True
    """Whether it may have unfinished work."""
    can_give: bool = True
    """Whether some of its memory can be moved now."""


@attrs.define
class Prospect:
    """The state known of one process."""

    sight: Sight
    """The last sighting of it."""
    used: float
    """Time when it was last seen to use the GPU, in seconds; when it came, if it never was."""
    grew: float
    """Time of its last growth, in seconds: new memory is about to be used."""
    next_use: NextUse = NextUse.SOON
    """Its class."""
    farther: float | None = None
    """Time since when it has looked farther than its class, in seconds; None where it does not."""

    def see(self, now: float, sight: Sight) -> None:
        """Note a sighting made at `now`. Memory that comes back from the host is no growth: that it comes is no
        decision of the program's."""
        before, self.sight = self.sight, sight
        if sight.done is None or sight.done != before.done:
            self.used = now
        if sight.charged >= before.charged + GREW_LEAST:
            self.grew = now

    def judge(self, now: float, place: int | None, is_leading: bool) -> NextUse:
        """Return its class. `place` is its position among those that wait for their turns, from 0; None where it does
        not wait."""
        if place is not None and self.sight.has_work:
            self.used = now  # it has work, and cannot show it before its turn
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
    """Return the class of a process that has not used the GPU for so many seconds."""
    return next((one for one, least in IDLE_S.items() if seconds >= least), NextUse.SOON)


class Outlook:
    """The classes of all processes of one GPU. A process that is new is SOON."""

    def __init__(self) -> None:
        self._known: dict[Process, Prospect] = {}
        self._judged: float | None = None
        """Time when classes were last judged, in seconds."""

    def is_at_work(self, process: Process, sight: Sight) -> bool:
        """Return whether a process did something, or grew, between its last sighting and this one; False for one
        without an earlier sighting."""
        known = self._known.get(process)
        return known is not None and (
            sight.done != known.sight.done or sight.charged >= known.sight.charged + GREW_LEAST
        )

    def see(self, now: float, sights: Mapping[Process, Sight]) -> None:
        """Note the sightings of all processes at the time `now`, in seconds. A process that is not among them is
        forgotten."""
        last, self._known = self._known, {}
        for process, sight in sights.items():
            prospect = self._known[process] = last.get(process) or Prospect(sight, now, now)
            prospect.see(now, sight)

    def judge(self, now: float, order: Order = NO_ORDER) -> Mapping[Process, NextUse]:
        """Return the class of each process at the time `now`, in seconds. A process that is behind others is at least
        as far as the farthest of those, so that it gives memory with them or before them.

        Where two looks are more than HOLD_S apart, waiting for a turn at both says nothing: the process may have had
        turns in between, and have one before the next look.
        """
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
        """Return the rank of each process, 0 to NEXT_USE_MOST, for classes that were judged: the greater, the farther.

        Of processes that are far only because they are behind others, those that are idle themselves give first. A
        process that can give nothing now ranks nearest: the module gives up a plan in which the first that it asks give
        nothing.
        """
        behind = {process for those, _ in order.behind for process in those}
        return {
            process: len(NextUse) * next_use + (self._known[process].next_use if process in behind else 0)
            if self._known[process].sight.can_give
            else int(NextUse.SOON)
            for process, next_use in classes.items()
        }
