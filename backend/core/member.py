"""The record of a group: what the parts of the daemon know of one process, or slice, on one GPU.

:class:`backend.core.population.Population` has one of each group in the tree, made when the group comes and
dropped when it leaves. Each part has a slot in it, in the place of a table of its own: what its record held is
forgotten with a group. A process that goes on on another GPU has another record there, its heir: what was taken down
of it is handed on to that as the record is dropped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import attrs
import trio

from backend.common import clock
from backend.core.held import Held
from backend.core.nextuse import NextUse
from backend.core.reasons import ON, Engines, Off
from backend.core.records import NOWHERE, Place, Wanted
from backend.core.turns import TurnEnd
from backend.process.identity import Group

OF_PROGRAMS = ("submitted", "finished")
"""Figures that the program counts by itself: they go on where a daemon begins anew."""
FROZEN_USEC = "frozen_usec"
"""Name of the time for which a group was to be frozen, among the figures that are kept of it."""
SAID = "said_"
"""Start of the names that are kept beside the figures of a group, and are none."""
SAID_SINCE, SAID_LOST = f"{SAID}frozen_since", f"{SAID}lost"
"""Names for `since_usec` and `absent` of :class:`Taken`."""
SAID_BEGAN = f"{SAID}began"
"""Name for `began` of :class:`Taken`."""
BYTE_USEC, SAID_HELD, SAID_HELD_AT = "byte_usec", f"{SAID}held", f"{SAID}held_at"
"""Names for what `held` of :class:`Taken` has."""

NOTE_USEC = 600_000_000
"""Microseconds after which memory that is held is kept again for the next daemon, though it is what it was: how much is
too much at most where a process ends while there is no daemon."""

COMES_S = 0.5
"""Seconds after a process was let take memory back in which that may be on its way: one batch of it, with the wait for
what runs (0.3 s) and the copy (0.2 s, ``library/move/batch.c``)."""

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
    spent: Engines | None = None
    """Engines that it is without as its quota is used up: none where it stands at its gate; None where its quota lets
    it work."""
    doubtful: bool = False
    """Detached at most in part: the lever has not returned, or failed."""
    pulls: int = 0
    """Times that its engines were to go off the runlist, or on again."""
    held: bool = False
    """Let run without what is asked for it: no lever of it is pulled."""
    inherited: bool = False
    """As another daemon left it, in the books: no lever was pulled here yet."""
    shown: bool = False
    """Whether it is frozen, as compute.events last said."""
    turn_end: TurnEnd | None = None
    """How its turn ended, or UNGATED while that is waited for; None once its next one has begun."""
    draining: trio.CancelScope | None = None
    """What ends the wait for it to drain; None where there is none."""
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
    """The slot of :class:`backend.core.reclaimer.Reclaimer` and :class:`backend.core.foresight.Foresight`."""

    waiting: trio.lowlevel.ParkingLot | None = None
    """Reclaims that wait for the group to hold less."""
    ignored_until: float = 0.0
    """Until when a program that listens is not waited for, by trio's clock."""
    next_use: NextUse | None = None
    """How soon a process uses its memory again, as the ledger was told last; None where nothing is known."""
    came_at: float = -math.inf
    """When a process was let take memory back last, by trio's clock."""
    _settling: trio.Lock | None = None

    def settling(self) -> trio.Lock:
        """The lock that is held while it is brought under its limit."""
        if self._settling is None:
            self._settling = trio.Lock()
        return self._settling

    def may_come(self) -> bool:
        """Whether memory may be on its way back to a process: its library does nothing else then."""
        return trio.current_time() < self.came_at + COMES_S

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


@attrs.frozen
class Undrained:
    """The last time that the kernels of a process did not end by the end of its turn."""

    again: float
    """When the process is waited for again, by trio's clock."""
    wait: float
    """Seconds from then to that."""


@attrs.define
class Turned:
    """What memory that is scheduled with time made of a process."""

    turns: int = 0
    """Turns that it had for the sake of memory."""
    fetched: int = 0
    """Bytes that came for its turns before they began."""
    evicted: int = 0
    """Bytes of it that went for the turns of others."""
    runs: int = 0
    """Processes that have such a turn now: 1 or 0 of one."""
    waits: int = 0
    """Processes that wait for one now."""

    def __add__(self, other: Turned) -> Turned:
        return Turned(*(one + another for one, another in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


@attrs.define(eq=False)
class Scheduled:
    """The slot of :class:`backend.scheduler.scheduler.Scheduler`."""

    throttle: Throttle | None = None
    """None for one that was never taken off the runlist."""
    failure: Failure | None = None
    """None while its levers move."""
    undrained: Undrained | None = None
    """None for one that was drained by the end of its last turn."""
    rests: bool = False
    """Whether it waits for a turn of memory: what it lacks comes as that is planned, and not wherever there is room."""
    turned: Turned | None = None
    """None for one that never had turns for the sake of memory."""
    ending: bool = False
    """Ends, or has ended: its exit is still to be told."""


@attrs.define
class Taken:
    """The slot of :class:`backend.core.totals.Totals` and :class:`backend.core.tally.Tally`: what was taken down of one
    group, and is kept for the next daemon."""

    total: dict[str, int] = attrs.field(factory=dict)
    """What it did, ever, by the names of figures."""
    said: dict[str, int] = attrs.field(factory=dict)
    """Of a process: what the GPU told then."""
    since: float | None = None
    """Start of the time for which it is to be frozen, in seconds of trio's clock; None where it is not to be."""
    since_usec: int = 0
    """The same by the clock of this boot, which the next daemon knows; 0 for none. Without `since`: it is left by the
    daemon before."""
    began: int | None = attrs.field(factory=lambda: int(time.time()))
    """Time at which counting began, in seconds of the Unix epoch; None where a daemon began that did not note it."""
    held: Held = attrs.field(factory=Held)
    """Its memory over time, as it was when that was taken down last."""
    booked: int = 0
    """What the books told of that then, in byte-microseconds."""
    stale: bool = True
    """Whether the next daemon has other words of `held`."""
    noted_usec: int = 0
    """When `held` was last kept for the next daemon though it need not be, by the clock of this boot."""
    absent: bool = False
    """Of a GPU's root: whether the GPU is lost, and that was counted."""
    told: object = None
    """Of a process: all that was told of it when it was taken down last. As long as the same is, there is nothing to
    reckon: of a thousand processes most are idle."""

    def __bool__(self) -> bool:
        """Whether anything was taken down."""
        return bool(self.total or self.said or self.since_usec or self.absent or self.held.at_usec)

    @classmethod
    def of(cls, kept: Mapping[str, int]) -> Taken:
        """Return what the daemon before us kept."""
        total = {name: value for name, value in kept.items() if not name.startswith(SAID)}
        said = {name: kept[SAID + name] for name in OF_PROGRAMS if SAID + name in kept}
        held = Held(total.pop(BYTE_USEC, 0), kept.get(SAID_HELD, 0), kept.get(SAID_HELD_AT, 0))
        since, began, absent = kept.get(SAID_SINCE, 0), kept.get(SAID_BEGAN), bool(kept.get(SAID_LOST))
        return cls(total, said, None, since, began, held, absent=absent)

    def kept(self) -> Mapping[str, int]:
        """Return what is kept for the next daemon. A name with SAID is of no figure."""
        found = {**self.total, **{SAID + name: self.said[name] for name in OF_PROGRAMS if name in self.said}}
        if self.since_usec:
            found[SAID_SINCE] = self.since_usec
        if self.absent:
            found[SAID_LOST] = 1
        if self.began is not None:
            found[SAID_BEGAN] = self.began
        if self.held.byte_usec:
            found[BYTE_USEC] = self.held.byte_usec
        if self.held.nbytes:
            found |= {SAID_HELD: self.held.nbytes, SAID_HELD_AT: self.held.at_usec}
        return found

    def hold(self, held: Held) -> bool:
        """Take down its memory over time, as the books have it. Return whether that is to be kept: the next daemon
        could not reckon it from what was kept, as what did not change is held on; or NOTE_USEC have passed."""
        now = clock.boot_usec()
        is_news = self.stale or held.at_usec >= self.held.at_usec
        if held.nbytes and now - self.noted_usec >= NOTE_USEC:
            is_news = True
        if is_news:
            self.noted_usec = now
        self.held, self.booked = Held(self.byte_usec(held, now), held.nbytes, now), held.until(now)
        self.stale = False
        return is_news

    def hold_on(self, held: Held, living: int) -> None:
        """Go on from what the daemon before us kept. It lived on for NOTE_USEC at most without another word, and for
        so long all of it was held; from then on `living` bytes, of processes that are still there."""
        now = clock.boot_usec()
        known = min(now, self.held.at_usec + NOTE_USEC)
        byte_usec = self.held.until(known) + min(self.held.nbytes, living) * (now - known)
        self.held, self.booked = Held(byte_usec, held.nbytes, now), held.until(now)
        self.stale = bool(byte_usec or held.nbytes or self.began is None)

    def is_behind(self, held: Held) -> bool:
        """Return whether the next daemon would reckon less than :meth:`byte_usec` tells now, which never falls."""
        now = clock.boot_usec()
        if self.stale and (self.held.byte_usec or self.held.nbytes):  # reckoned from another's words, and not kept
            return True
        return self.byte_usec(held, now) > self.held.until(min(now, self.noted_usec + NOTE_USEC))

    def byte_usec(self, held: Held, now_usec: int) -> int:
        """Return its memory over time, in byte-microseconds up to now, as the books have it."""
        return self.held.byte_usec + held.until(now_usec) - self.booked

    def begin(self) -> bool:
        """Note that the group is to be frozen from now on, or still is, as the daemon before us left it. Return whether
        it was not to be."""
        if self.since is not None:
            return False
        now, now_usec = trio.current_time(), clock.boot_usec()
        if not 0 < self.since_usec <= now_usec:
            self.since_usec = now_usec
        self.since = now - (now_usec - self.since_usec) / 1e6
        return True

    def end(self) -> bool:
        """Note that it is not to be frozen any more. Return whether it was to be."""
        if self.since_usec and self.since is None:
            self.begin()  # it was thawed while there was no daemon: by now at the latest
        if self.since is None:
            return False
        self.total[FROZEN_USEC] = self.frozen_usec()
        self.since, self.since_usec = None, 0
        return True

    def frozen_usec(self) -> int:
        """Return how long the group was to be frozen, in microseconds."""
        frozen = self.total.get(FROZEN_USEC, 0)
        return frozen if self.since is None else frozen + round((trio.current_time() - self.since) * 1e6)


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
    """Of the Totals and the Tally."""
    _writing: trio.Lock | None = None
    _deciding: trio.Lock | None = None

    def deciding(self) -> trio.Lock:
        """The lock of writers that may go on for longer than they have the other one: it is taken first, and held by
        the one whose write is not decided."""
        if self._deciding is None:
            self._deciding = trio.Lock()
        return self._deciding

    def writing(self) -> trio.Lock:
        """The lock that is held by the writer whose write is under way."""
        if self._writing is None:
            self._writing = trio.Lock()
        return self._writing

    def is_written(self) -> bool:
        """Whether a write is under way."""
        return self._writing is not None and self._writing.locked()

    def is_decided_on(self) -> bool:
        """Whether a write that may take long is not decided."""
        return self._deciding is not None and self._deciding.locked()
