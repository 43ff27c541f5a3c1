"""The record of a group: the state that the parts of the daemon keep of one process, or slice, on one GPU.

:class:`backend.core.population.Population` has one record for each group in the tree, made when the group comes and
dropped when it leaves. Each part of the daemon has a slot in the record instead of a table of its own, so its state of
a group is dropped with the group. A process that moves to another GPU has another record there, its heir: when the old
record is dropped, what was taken down in it is passed on to the heir.
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

OF_PROGRAMS = ("submitted", "finished", "capped", "uncapped")
"""Figures that the program counts itself: they continue when a daemon is restarted."""
FROZEN_USEC = "frozen_usec"
"""Name, among the kept figures of a group, of the time for which it was to be frozen."""
SAID = "said_"
"""Prefix of names that are kept beside the figures of a group and are not figures."""
SAID_SINCE, SAID_LOST = f"{SAID}frozen_since", f"{SAID}lost"
"""Names under which `since_usec` and `absent` of :class:`Taken` are kept."""
SAID_BEGAN = f"{SAID}began"
"""Name under which `began` of :class:`Taken` is kept."""
BYTE_USEC, SAID_HELD, SAID_HELD_AT = "byte_usec", f"{SAID}held", f"{SAID}held_at"
"""Names under which the parts of `held` of :class:`Taken` are kept."""

NOTE_USEC = 600_000_000
"""Microseconds after which an unchanged amount of held memory is saved for the next daemon again. This bounds the error
when a process ends while there is no daemon.
"""

COMES_S = 0.5
"""Seconds after a process was allowed to take memory back during which that may be on its way: one batch, with the wait
for running work (0.3 s) and the copy (0.2 s, ``library/move/batch.c``).
"""

UNTOUCHED = Wanted()
"""State of a process before any setting is applied."""


@attrs.define(eq=False)
class Followed:
    """State that :class:`backend.core.background.Background` keeps of a group, for one kind of work."""

    put_off_s: float = 0.0
    """Seconds by which failed work was put off; 0 if none failed."""


@attrs.define(eq=False)
class Compute(Followed):
    """The slot of :class:`backend.core.follower.Follower`."""

    applied: Wanted = UNTOUCHED
    """State that holds for a process now."""
    noted: Off = ON
    """Why a process is off the runlist, as the books say; `ON` itself for a process that is on it."""
    place: Place = NOWHERE
    """Place that the scheduler wants, in addition to the settings."""
    spent: Engines | None = None
    """Engines that are off because the quota of the process is used up: none if it is stopped at its gate; None while
    its quota lets it work.
    """
    doubtful: bool = False
    """Whether the process may be detached only in part: the lever has not returned, or failed."""
    pulls: int = 0
    """Number of times that its engines were to go off the runlist or on again."""
    held: bool = False
    """Whether the process runs without its settings: none of its levers is pulled."""
    inherited: bool = False
    """Whether the books are as another daemon left them: no lever was pulled here yet."""
    unasked: bool = False
    """Whether the program itself was not asked yet what it makes hold, and `applied` says nothing of that."""
    shown: bool = False
    """Whether the process is frozen, as compute.events last said."""
    turn_end: TurnEnd | None = None
    """How its turn ended, or UNGATED while the end is waited for; None once its next turn has begun."""
    draining: trio.CancelScope | None = None
    """Scope of the wait for it to drain, cancelled to end the wait; None if there is no wait."""
    _lever: trio.Lock | None = None

    def lever(self) -> trio.Lock:
        """Return the lock that is held while a lever of the group is pulled."""
        if self._lever is None:
            self._lever = trio.Lock()
        return self._lever

    def is_busy(self) -> bool:
        """Return whether a lever of the group is being pulled."""
        return self._lever is not None and self._lever.locked()


@attrs.define(eq=False)
class Memory(Followed):
    """The slot of :class:`backend.core.reclaimer.Reclaimer` and :class:`backend.core.foresight.Foresight`."""

    waiting: trio.lowlevel.ParkingLot | None = None
    """Reclaims that wait for the group to hold less."""
    ignored_until: float = 0.0
    """Time until which a listening program is not waited for, by trio's clock."""
    next_use: NextUse | None = None
    """Next use of the memory of a process, as last told to the ledger; None if unknown."""
    came_at: float = -math.inf
    """Time at which the process was last allowed to take memory back, by trio's clock."""
    _settling: trio.Lock | None = None

    def settling(self) -> trio.Lock:
        """Return the lock that is held while the group is brought under its limit."""
        if self._settling is None:
            self._settling = trio.Lock()
        return self._settling

    def may_come(self) -> bool:
        """Return whether memory may be on its way back to a process: its library does nothing else meanwhile."""
        return trio.current_time() < self.came_at + COMES_S

    def is_settling(self) -> bool:
        """Return whether the group is being brought under its limit."""
        return self._settling is not None and self._settling.locked()


@attrs.define
class Failure:
    """A process whose levers failed to move for the scheduler."""

    again: float
    """Time at which they are tried again, seconds."""
    wait: float
    """Delay of that attempt, seconds."""
    told: bool
    """Whether the failure was logged."""


@attrs.define
class Throttle:
    """Counts of the times that the scheduler took a process off the runlist."""

    times: int = 0
    """Times that it was taken off."""
    usec: int = 0
    """Total time off, microseconds, without the current one."""
    since: float | None = None
    """Time at which it was taken off, seconds; None while it is on the runlist."""


@attrs.frozen
class Undrained:
    """The last time that the kernels of a process did not end by the end of its turn."""

    again: float
    """Time from which the process is waited for again, by trio's clock."""
    wait: float
    """Seconds from that end of a turn to `again`."""


@attrs.define
class Turned:
    """Counts of the memory turns of a process, or of several."""

    turns: int = 0
    """Memory turns that it had."""
    fetched: int = 0
    """Bytes that were fetched for its turns before they began."""
    evicted: int = 0
    """Bytes of it that were moved out for the turns of others."""
    runs: int = 0
    """Processes that have a memory turn now: 1 or 0 for a single process."""
    waits: int = 0
    """Processes that wait for a memory turn now."""

    def __add__(self, other: Turned) -> Turned:
        return Turned(*(one + another for one, another in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


@attrs.define(eq=False)
class Scheduled:
    """The slot of :class:`backend.scheduler.scheduler.Scheduler`."""

    throttle: Throttle | None = None
    """Times off the runlist; None for a process that was never taken off."""
    failure: Failure | None = None
    """Last failure of its levers; None while they move."""
    undrained: Undrained | None = None
    """Last failed drain; None for a process that was drained by the end of its last turn."""
    rests: bool = False
    """Whether it waits for a memory turn: what it lacks is fetched as planned for that, not whenever there is room."""
    turned: Turned | None = None
    """Counts of its memory turns; None for a process that never had one."""
    ending: bool = False
    """Whether it is ending or has ended, and its exit is still to be reported."""


@attrs.define
class Taken:
    """The slot of :class:`backend.core.totals.Totals` and :class:`backend.core.tally.Tally`: figures that were taken
    down of one group, and are kept for the next daemon.
    """

    total: dict[str, int] = attrs.field(factory=dict)
    """Totals over the life of the group, by the names of figures."""
    said: dict[str, int] = attrs.field(factory=dict)
    """Figures of a process as its GPU reported them at that time."""
    since: float | None = None
    """Start of the time for which it is to be frozen, in seconds of trio's clock; None if it is not to be frozen."""
    since_usec: int = 0
    """The same by the clock of this boot, which the next daemon shares; 0 for none. If set without `since`, the daemon
    before left it.
    """
    began: int | None = attrs.field(factory=lambda: int(time.time()))
    """Time at which counting began, in seconds of the Unix epoch; None if an earlier daemon did not note it."""
    held: Held = attrs.field(factory=Held)
    """Memory over time, when it was last taken down."""
    booked: int = 0
    """Memory over time in the books at that moment, in byte-microseconds."""
    stale: bool = True
    """Whether what is kept for the next daemon differs from `held`."""
    noted_usec: int = 0
    """When `held` was last kept for the next daemon, by the clock of this boot."""
    absent: bool = False
    """Of a GPU's root: whether the GPU is lost and the loss was counted."""
    told: object = None
    """Of a process: all that was reported of it when it was last taken down. While the report is the same there is
    nothing to compute: of a thousand processes most are idle.
    """

    def __bool__(self) -> bool:
        """Whether anything was taken down."""
        return bool(self.total or self.said or self.since_usec or self.absent or self.held.at_usec)

    @classmethod
    def of(cls, kept: Mapping[str, int]) -> Taken:
        """Return the record of what the daemon before this one kept."""
        total = {name: value for name, value in kept.items() if not name.startswith(SAID)}
        said = {name: kept[SAID + name] for name in OF_PROGRAMS if SAID + name in kept}
        held = Held(total.pop(BYTE_USEC, 0), kept.get(SAID_HELD, 0), kept.get(SAID_HELD_AT, 0))
        since, began, absent = kept.get(SAID_SINCE, 0), kept.get(SAID_BEGAN), bool(kept.get(SAID_LOST))
        return cls(total, said, None, since, began, held, absent=absent)

    def kept(self) -> Mapping[str, int]:
        """Return the names and values that are kept for the next daemon. Names with SAID are not figures."""
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
        """Take down the memory over time as the books have it. Return whether it must be saved: the next daemon could
        not compute it from what was saved last, which it takes to be held on unchanged; or NOTE_USEC have passed.
        """
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
        """Continue from what the daemon before this one kept. That daemon ran for at most NOTE_USEC without saving
        again, and all the memory counts as held for that long. From then on `living` bytes count, of processes that
        still exist.
        """
        now = clock.boot_usec()
        known = min(now, self.held.at_usec + NOTE_USEC)
        byte_usec = self.held.until(known) + min(self.held.nbytes, living) * (now - known)
        self.held, self.booked = Held(byte_usec, held.nbytes, now), held.until(now)
        self.stale = bool(byte_usec or held.nbytes or self.began is None)

    def is_behind(self, held: Held) -> bool:
        """Return whether the next daemon would compute less than :meth:`byte_usec` gives now, a figure that must never
        fall.
        """
        now = clock.boot_usec()
        # computed from what another daemon kept, and not saved yet
        if self.stale and (self.held.byte_usec or self.held.nbytes):
            return True
        return self.byte_usec(held, now) > self.held.until(min(now, self.noted_usec + NOTE_USEC))

    def byte_usec(self, held: Held, now_usec: int) -> int:
        """Return the memory over time up to `now_usec`, in byte-microseconds, given the books of it."""
        return self.held.byte_usec + held.until(now_usec) - self.booked

    def begin(self) -> bool:
        """Note that the group is to be frozen from now on, or still is to be, as the daemon before left it. Return
        whether this is news.
        """
        if self.since is not None:
            return False
        now, now_usec = trio.current_time(), clock.boot_usec()
        if not 0 < self.since_usec <= now_usec:
            self.since_usec = now_usec
        self.since = now - (now_usec - self.since_usec) / 1e6
        return True

    def end(self) -> bool:
        """Note that the group is no longer to be frozen. Return whether it was to be."""
        if self.since_usec and self.since is None:
            self.begin()  # it was thawed while no daemon ran: by now at the latest
        if self.since is None:
            return False
        self.total[FROZEN_USEC] = self.frozen_usec()
        self.since, self.since_usec = None, 0
        return True

    def frozen_usec(self) -> int:
        """Return for how long the group was to be frozen, in microseconds."""
        frozen = self.total.get(FROZEN_USEC, 0)
        return frozen if self.since is None else frozen + round((trio.current_time() - self.since) * 1e6)


@attrs.define(eq=False)
class Record:
    """The record of one group, with a slot for each part of the daemon."""

    group: Group
    """The process or slice, and the GPU."""
    compute: Compute = attrs.field(factory=Compute)
    """State of the Follower."""
    memory: Memory = attrs.field(factory=Memory)
    """State of the Reclaimer."""
    scheduled: Scheduled = attrs.field(factory=Scheduled)
    """State of the Scheduler."""
    taken: Taken = attrs.field(factory=Taken)
    """Figures of the Totals and the Tally."""
    _writing: trio.Lock | None = None
    _deciding: trio.Lock | None = None

    def deciding(self) -> trio.Lock:
        """Return the outer lock of writers. It is taken before `writing`, and held by the writer whose write is not
        decided, because that writer may need longer than it holds the inner lock.
        """
        if self._deciding is None:
            self._deciding = trio.Lock()
        return self._deciding

    def writing(self) -> trio.Lock:
        """Return the inner lock, held by the writer whose write is under way."""
        if self._writing is None:
            self._writing = trio.Lock()
        return self._writing

    def is_written(self) -> bool:
        """Return whether a write is under way."""
        return self._writing is not None and self._writing.locked()

    def is_decided_on(self) -> bool:
        """Return whether a write that may take long is undecided."""
        return self._deciding is not None and self._deciding.locked()
