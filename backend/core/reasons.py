"""Why a process is off the runlist: a set of reasons, each with the engines that it takes.

The hardware has the union of what the reasons take. So a reason that ends puts back only what no other reason holds: a
program that is thawed while it waits for its turn has its copy engines again, and its GR engine with its turn.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs


class Reason(enum.Flag):
    """A reason to be off the runlist. The bits appear in journals and in the ABI of the kernel module.

    FREEZE and MIGRATION outlive a daemon: a freeze is a setting in the books, a move is noted. All further reasons are
    decisions of one daemon: they end with it, as it puts everything back, or its guard does, or the next daemon.
    """

    FREEZE = 1 << 0
    """compute.freeze, of the process or of a slice above it."""
    TURN = 1 << 1
    """The scheduler: it is the turn of another program."""
    QUOTA = 1 << 2
    """The process has used up its time in this period."""
    BUSY = 1 << 3
    """A latency-critical neighbour is at work."""
    GANG = 1 << 4
    """A peer that it works with has no turn."""
    MIGRATION = 1 << 5
    """It is being migrated to another GPU."""


NO_REASON = Reason(0)

LASTING = Reason.FREEZE | Reason.MIGRATION
"""The reasons that outlive a daemon."""

KNOWN = Reason.FREEZE | Reason.TURN | Reason.QUOTA | Reason.BUSY | Reason.GANG | Reason.MIGRATION
"""All reasons that this version knows."""


class Engines(enum.Enum):
    """Engines whose TSGs are off the runlist, ordered from none to all."""

    NONE = 0
    GR = 1
    """Graphics and compute alone: kernels stand, copies and moves of memory go on."""
    ALL = 2
    """The copy engines, too."""

    def __or__(self, other: Engines) -> Engines:
        """Return the engines of both."""
        return max(self, other, key=lambda engines: engines.value)

    def covers(self, other: Engines) -> bool:
        """Return whether these include all of the other ones."""
        return self.value >= other.value


TURN_ENGINES = Engines.ALL
"""Engines that a program goes without until its next turn."""


@attrs.frozen
class Off:
    """The reasons for which a process is off the runlist, by the engines that they take."""

    all: Reason = NO_REASON
    """Reasons that take every engine."""
    gr: Reason = NO_REASON
    """Reasons that take the GR engine alone."""

    @property
    def engines(self) -> Engines:
        """The union of what the reasons take: what is off in the hardware."""
        if self.all:
            return Engines.ALL
        return Engines.GR if self.gr else Engines.NONE

    @property
    def reasons(self) -> Reason:
        """All reasons, whichever engines they take."""
        return self.all | self.gr

    def __bool__(self) -> bool:
        """Return whether there is any reason."""
        return bool(self.reasons)

    def __or__(self, other: Off) -> Off:
        """Return the reasons of both. A reason that takes every engine in either takes every engine in the result."""
        everything = self.all | other.all
        return Off(everything, (self.gr | other.gr) & ~everything)

    def with_(self, reason: Reason, engines: Engines = Engines.ALL) -> Off:
        """Return the set in which a reason takes these engines, whatever it took before."""
        left = self.without(reason)
        match engines:
            case Engines.ALL:
                return Off(left.all | reason, left.gr)
            case Engines.GR:
                return Off(left.all, left.gr | reason)
        return left

    def without(self, reason: Reason) -> Off:
        """Return the set without a reason."""
        return Off(self.all & ~reason, self.gr & ~reason)

    def held_in(self, engines: Engines) -> Off:
        """Return the reasons that fit hardware in which these engines are off, given this set as it was noted.

        A reason is noted before the hardware follows it, and removed after that. So a daemon that is killed may leave a
        note that goes beyond the hardware. A process without a noted reason is taken for frozen where all its engines
        are off, and for one that waits for its turn where only GR is.
        """
        match engines:
            case Engines.ALL:
                return Off(self.all or self.gr or Reason.FREEZE, self.gr if self.all else NO_REASON)
            case Engines.GR:
                return Off(gr=self.gr or self.all or Reason.TURN)
        return ON


ON = Off()
"""On the runlist with every engine."""

FROZEN = Off(Reason.FREEZE)
"""Off the runlist with every engine, as compute.freeze asks."""


GR_ALONE = "gr"
"""Name, among those of reasons, of the count of processes that have only the GR engine off."""


def name_of(reason: Reason) -> str:
    """Return the name of one reason, as users read it."""
    assert reason.name is not None, "one bit"
    return reason.name.lower()


def counted(each: Iterable[Off]) -> Mapping[str, int]:
    """Return how many of some processes are off the runlist for each reason, and how many have only the GR engine
    off."""
    found = Counter[str]()
    for off in each:
        if off is not ON and off:
            found.update(name_of(reason) for reason in off.reasons)
            found[GR_ALONE] += off.engines is Engines.GR
    return {name: found[name] for name in (*map(name_of, Reason), GR_ALONE)}


def reasons_of(mask: int) -> Reason:
    """Return the reasons of a bit mask, as far as this version knows them."""
    return Reason(mask & KNOWN.value)
