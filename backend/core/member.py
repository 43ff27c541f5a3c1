"""The record of a group: what the parts of the daemon know of one process, or slice, on one GPU.

:class:`backend.core.population.Population` has one of each group in the tree, made when the group comes and
dropped when it leaves. Each part has a slot in it, in the place of a table of its own: what its record held is
forgotten with a group. A process that goes on on another GPU has another record there, its heir: what was taken down
of it is handed on to that as the record is dropped.
"""

from __future__ import annotations

import attrs
import trio

from backend.core.reasons import ON, Off
from backend.core.records import NOWHERE, Place, Wanted
from backend.process.identity import Group

UNTOUCHED = Wanted()
"""State of a process before anything is asked for it."""


@attrs.define(eq=False)
class Followed:
    """What :class:`backend.core.background.Background` keeps of a group, for one kind of work."""

    put_off_s: float = 0.0
    """Seconds for which work that failed was put off; 0 where none did."""


@attrs.define(eq=False)
class Compute(Followed):
    """The slot of :class:`backend.core.follower.Follower`."""

    applied: Wanted = UNTOUCHED
    """What holds for a process now."""
    noted: Off = ON
    """Why a process is off the runlist, as the books say; `ON` itself for one that is on it."""
    place: Place = NOWHERE
    """What the scheduler adds to what is asked for."""
    doubtful: bool = False
    """Detached at most in part: the lever has not returned, or failed."""
    held: bool = False
    """Let run without what is asked for it: no lever of it is pulled."""
    inherited: bool = False
    """As another daemon left it, in the books: no lever was pulled here yet."""
    shown: bool = False
    """Whether it is frozen, as compute.events last said."""
    since: float | None = None
    """When it began to be asked to freeze, by trio's clock; None where it is not asked to."""
    frozen_s: float = 0.0
    """Seconds of the times before."""
    _lever: trio.Lock | None = None

    def lever(self) -> trio.Lock:
        """The lock that is held while a lever of it is pulled."""
        if self._lever is None:
            self._lever = trio.Lock()
        return self._lever

    def is_busy(self) -> bool:
        """Whether a lever of it is being pulled."""
        return self._lever is not None and self._lever.locked()


@attrs.define(eq=False)
class Memory(Followed):
    """The slot of :class:`backend.core.reclaimer.Reclaimer`."""

    waiting: trio.lowlevel.ParkingLot | None = None
    """Reclaims that wait for the group to hold less."""
    ignored_until: float = 0.0
    """Until when a program that listens is not waited for, by trio's clock."""
    _settling: trio.Lock | None = None

    def settling(self) -> trio.Lock:
        """The lock that is held while it is brought under its limit."""
        if self._settling is None:
            self._settling = trio.Lock()
        return self._settling

    def is_settling(self) -> bool:
        """Whether it is being brought under its limit."""
        return self._settling is not None and self._settling.locked()


@attrs.define
class Failure:
    """A process whose levers do not move for the scheduler."""

    again: float
    """When they are tried again, seconds."""
    wait: float
    """For how long that was put off, seconds."""
    told: bool
    """Whether the log says so."""


@attrs.define
class Throttle:
    """What is counted of a process that the scheduler takes off the runlist."""

    times: int = 0
    """Times it was taken off."""
    usec: int = 0
    """For how long, microseconds, but for the last time."""
    since: float | None = None
    """When it was taken off, seconds; None while it is there."""


@attrs.define(eq=False)
class Scheduled:
    """The slot of :class:`backend.scheduler.scheduler.Scheduler`."""

    throttle: Throttle | None = None
    """None for one that was never taken off the runlist."""
    failure: Failure | None = None
    """None while its levers move."""
    ending: bool = False
    """Ends, or has ended: its exit is still to be told."""


@attrs.define
class Taken:
    """The slot of :class:`backend.core.totals.Totals`: what was taken down of one group."""

    total: dict[str, int] = attrs.field(factory=dict)
    """What it did, ever, by the names of figures."""
    said: dict[str, int] = attrs.field(factory=dict)
    """Of a process: what the GPU told then."""

    def __bool__(self) -> bool:
        """Whether anything was taken down."""
        return bool(self.total or self.said)


@attrs.define(eq=False)
class Record:
    """See the module."""

    group: Group
    """The process or slice, and the GPU."""
    compute: Compute = attrs.field(factory=Compute)
    """Of the Follower."""
    memory: Memory = attrs.field(factory=Memory)
    """Of the Reclaimer."""
    scheduled: Scheduled = attrs.field(factory=Scheduled)
    """Of the Scheduler."""
    taken: Taken = attrs.field(factory=Taken)
    """Of the Totals."""
    undone: int = 0
    """Times that the process, or one of the slice, undid by itself what was set."""
    losses: int = 0
    """Times that the GPU was lost while the group was there."""
    arrivals: int = 0
    """Processes that were moved to this GPU, in a slice."""
    _writing: trio.Lock | None = None

    def writing(self) -> trio.Lock:
        """The lock that is held by the writer whose write is under way."""
        if self._writing is None:
            self._writing = trio.Lock()
        return self._writing

    def is_written(self) -> bool:
        """Whether a write is under way."""
        return self._writing is not None and self._writing.locked()
