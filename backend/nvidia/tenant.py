"""A process on one NVIDIA GPU: what is wanted for it, and the steps that find its TSGs and make them follow.

A step runs in a thread and with a deadline. Whatever thread comes last applies what is wanted then, so a call that was
given up can do no harm when it wakes up.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import attrs

from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.nvidia import levers, rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import Engine, Handles, Tsg
from backend.nvidia.levers import Controls, Key
from backend.nvidia.linux import System
from backend.nvidia.readback import ChannelStates
from backend.process.identity import Process

log = logging.getLogger(__name__)

NEVER = 1 << 62
"""Clock ticks since boot that nobody lives to see."""

SLICES_AT_ONCE = 64
"""TSGs of a program that are asked for their timeslice in one go: one that has thousands keeps nobody waiting."""
OWN_S = 1.0
"""Seconds in which a timeslice may still be set by who makes the TSG: of PyTorch programs that had just come some had
the driver's default again (docs/nvidia.md), which the CUDA library seems to set some time after the TSG is there. On a
host that has much to do that may be later: the default is excused once, whenever it comes."""
SAY_AGAIN_S = 60.0
"""Seconds after which it is said again of a program that it undoes what was set: it may do so ten times a second."""


class Notes(Protocol):
    """Who remembers, over the death of a daemon, what TSGs had of their own. For any thread."""

    def known(self, process: Process) -> Mapping[str, int]:
        """Timeslices, microseconds, by the names under which they were noted."""

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        """From now on these are to be given back, and no others."""


class NoNotes:
    """Remembers nothing."""

    def known(self, process: Process) -> Mapping[str, int]:
        return {}

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        pass


@attrs.define(eq=False)
class Tenant:
    """See the module."""

    process: Process
    """Who."""
    handles: Handles
    """Its RM objects, on every GPU."""
    levers: Deadline
    """For calls that act on it."""
    looks: Deadline
    """For looks at it."""
    system: System
    """The driver of this host."""
    gpu_id: int
    """What it calls the GPU."""
    states: ChannelStates
    """Which channels of the GPU are on its runlist."""
    began: int
    """When this daemon did, in clock ticks since boot: an earlier one may have had programs that are older."""
    notes: Notes = attrs.field(factory=NoNotes)
    """Of the timeslices that its TSGs had."""
    engines: Engines = Engines.NONE
    """Wanted: the engines whose TSGs are off the runlist."""
    timeslice_us: int = 0
    """Wanted: microseconds in a round, 0 the default."""
    off: set[Key] = attrs.field(factory=set)
    """Its channels that were taken off the runlist."""
    slices: dict[Key, int] = attrs.field(factory=dict)
    """Its TSGs whose timeslice is not their own, microseconds."""
    adopted: bool = False
    """Whether it was asked for channels that an earlier daemon left off."""
    unsure: bool = False
    """Whether an earlier daemon may have left channels off, and that cannot be asked here."""
    activity: Activity = attrs.field(factory=Activity)
    """As last seen."""
    forgotten: bool = False
    """Whether it is gone, for everybody: a thread that is still at it notes nothing that would stay."""
    acting: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while the hardware is made to follow."""

    # What the keeper remembers of it (keeper.py)

    asked: int = 0
    """When it was last asked whether it undid its detach, by a count of questions."""
    is_asked: bool | None = None
    """Whether somebody froze it, and not only the scheduler for a moment."""
    sliced: int = 0
    """... and its timeslice."""
    held: dict[Key, float] = attrs.field(factory=dict)
    """Since when its TSGs were seen to have the timeslices that they were given, by the keeper's clock."""
    changed: set[Key] = attrs.field(factory=set)
    """TSGs that had them for OWN_S, and that have others."""
    excused: set[Key] = attrs.field(factory=set)
    """TSGs that had the driver's default again, which nobody was blamed for; of each once."""
    suspect: int = 0
    """Questions that come before those to others: it had the engine while it was frozen."""
    used: int | None = None
    """The time that it had had the engine when that was last looked at, microseconds."""
    looked_at: float = 0.0
    """When it was last its turn to be looked at for new TSGs."""
    looks_made: int = 0
    """... and how often it was."""
    kept_at: float = 0.0
    """When it was last looked whether the hardware is behind."""
    totals: tuple[int, ...] | None = None
    """What the host had made of objects by then."""
    _questions: list[Key] = attrs.field(factory=list)  # channels not yet asked for in this round, the next one last
    _said: float | None = None  # when it was last said that it undid something

    @property
    def _is_older(self) -> bool:
        """Whether a daemon before us may have pulled its levers."""
        return self.process.start < self.began

    def __attrs_post_init__(self) -> None:
        known = {_key(name): us for name, us in self.notes.known(self.process).items()}
        if known:
            self.handles.recall(known)
            self.slices |= dict.fromkeys(known, levers.UNKNOWN)

    @property
    def has_policy(self) -> bool:
        """Whether anything is wanted, or left over."""
        return self._stays_off or self.timeslice_us != 0 or bool(self.off or self.slices)

    @property
    def is_behind(self) -> bool:
        """Whether the hardware is not yet what is wanted, by all that is known without asking it."""
        tsgs = self.tsgs()
        if any((key in self.off) != self.takes(tsg) for tsg in tsgs for key in _channels(tsg)):
            return True
        if self.off and not self._stays_off:
            return True
        return any(levers.differing(tsgs, self.timeslice_us, self.slices))

    @property
    def _stays_off(self) -> bool:
        """Whether any engine is to be off the runlist. What is wanted may change while a thread is at work."""
        return self.engines is not Engines.NONE

    def takes(self, tsg: Tsg) -> bool:
        """Whether a TSG is to be off the runlist. One of which nobody knows yet what it runs on may run kernels."""
        if self.engines is Engines.GR:
            return tsg.engine is not Engine.COPY
        return self.engines is Engines.ALL

    def tsgs(self) -> Sequence[Tsg]:
        """Those on this GPU, as last seen."""
        return [tsg for tsg in self.handles.tsgs() if tsg.gpu_id == self.gpu_id]

    async def has_files(self) -> bool:
        """Whether it has the driver's device open. OSError."""
        return bool(await self.looks.call(partial(self.system.control_fds, self.process.pid)))

    def begin_again(self) -> None:
        """The GPU was lost and is back: whatever was done to it before is undone, or asked for anew."""
        self.off.clear()
        self.slices = dict.fromkeys(self.slices, levers.UNKNOWN)
        self.held.clear()
        self.adopted, self.began = False, NEVER

    async def look(self, force: bool = False) -> None:
        """Finds its TSGs; with `force` also where the host's totals say that there are no new ones. OSError."""
        await self.looks.call(partial(self._look, force))

    async def enforce(self, *, again: bool = False, anew: bool = False) -> str:
        """Makes the hardware follow what is wanted. OSError.

        With `again` the tenant seems to have undone it: it is asked once more, and what it undid is done again. What
        that was; empty for nothing. With `anew` nobody knows what of it still holds: all is done again, nothing twice.
        """
        return await self.levers.call(partial(self._enforce, again, anew))

    def suspected(self) -> None:
        """It had the engine, frozen or not: the channels that run kernels come first now."""
        if not self.suspect:
            kernels = [tsg for tsg in self.tsgs() if tsg.engine is not Engine.COPY]
            self._questions = [key for tsg in kernels for key in _channels(tsg)]
            random.shuffle(self._questions)
            self.suspect = len(self._questions)

    def blame(self, what: str) -> None:
        """Says, now and then, that it undid something."""
        now = time.monotonic()
        if self._said is None or now - self._said >= SAY_AGAIN_S:
            self._said = now
            log.warning("pid %d undid its %s: set again", self.process.pid, what)

    # In threads

    def is_thawed(self) -> bool:
        """Asks for one channel that is to be off the runlist, another one each time, whether it is back. Takes no lock:
        who acts may hang, and may have changed it meanwhile."""
        self.suspect = max(0, self.suspect - 1)
        key = self._next_question()
        return key is not None and self._is_undone(key)

    def is_stretched(self, now: float) -> bool:
        """Asks for timeslices, whether they are not what was set. It is `now`, in seconds."""
        known = {key: us for key, us in dict(self.slices).items() if us != levers.UNKNOWN}
        tsgs = [tsg for tsg in self.tsgs() if levers.name(tsg) in known]
        tsgs = random.sample(tsgs, min(len(tsgs), SLICES_AT_ONCE))
        try:
            with rm.borrowed(self.system, self.process, sorted({tsg.fd for tsg in tsgs})) as controls:
                found = levers.timeslices(controls, [tsg for tsg in tsgs if tsg.fd in controls])
        except OSError:
            return False  # gone, or about to be found so
        self.held = {key: since for key, since in self.held.items() if key in known}
        for key, us in found.items():
            if us == known[key]:
                self.held.setdefault(key, now)
            elif now - self.held.get(key, now) >= OWN_S:
                self.changed.add(key)
        return any(us != known[key] for key, us in found.items())

    def _next_question(self) -> Key | None:
        """A channel of each TSG first, of those that run kernels before the others; nobody knows which one."""
        if not self._questions:
            lists = [_channels(tsg) for tsg in self._kernels_first() if self.takes(tsg)]
            for keys in lists:
                random.shuffle(keys)
            rounds = [keys[n] for n in range(max(map(len, lists), default=0)) for keys in lists if n < len(keys)]
            self._questions = rounds[::-1]
        return self._questions.pop() if self._questions else None

    def _kernels_first(self) -> Sequence[Tsg]:
        return sorted(self.tsgs(), key=lambda tsg: tsg.engine is Engine.COPY)

    def _is_undone(self, key: Key) -> bool:
        """Whether that channel is on the runlist, and ought not to be."""
        undone = key in self.off and self.states.enabled(*key) is True and self._is_taken(key)
        if undone:
            self._questions.append(key)  # the one to ask for again, before anything is done about it
        return undone

    def _is_taken(self, key: Key) -> bool:
        """Whether a channel is to be off the runlist: less may be wanted since it was chosen."""
        return any(key in _channels(tsg) for tsg in self.tsgs() if self.takes(tsg))

    def _look(self, force: bool) -> None:
        with self._alive():
            self.handles.wide(force)
            if not self.adopted:
                with self.acting:
                    self._adopt_channels()
        self._count()

    def _enforce(self, again: bool, anew: bool = False) -> str:
        """The levers proper take about 1 ms."""
        with self.acting, self._alive():
            if anew:
                self._doubt()
            if not self.handles.fds() or (self._is_older and not self.adopted):
                # One that is under way comes to its end first: whoever is half known is not adopted.
                self.handles.wide()
            self._adopt_channels()
            with self._borrowed() as controls, self.handles.levers.taken():
                if self._stays_off or not self.off:  # who is let go waits for it, and what is new is not off
                    self.handles.quick(controls)
                enabled = self.states.enabled
                tsgs = levers.still_there(controls, self.tsgs())
                tsgs, stretched = self._ask_for_timeslices(controls, tsgs, again)
                undone = "timeslice" if stretched else ""
                if again and self._stays_off and (key := self._next_question()) and self._is_undone(key):
                    undone = "freeze"
                    self._questions.clear()
                    levers.attach_once(controls, list(filter(self.takes, tsgs)), self.off)
                if self.unsure:  # enabled once more than needed does no harm, disabled twice does
                    levers.attach(controls, tsgs, self.off, enabled)
                    self.unsure = False
                # What is to run goes on first: a program that is thawed in the turn of another waits for its copies.
                if self._stays_off:
                    let_go = [tsg for tsg in tsgs if self._is_off(tsg) and not self.takes(tsg)]
                    levers.attach(controls, let_go, self.off, enabled)
                    levers.detach(controls, list(filter(self.takes, tsgs)), self.off, enabled)
                if self.timeslice_us:  # noted before it is so: the driver does not know it any more then
                    self.notes.note(self.process, {_name(tsg): us for tsg, us in levers.shares(tsgs, 0).items()})
                    if self.forgotten:
                        self.notes.note(self.process, {})
                unseen = set(map(levers.name, self.tsgs())) - set(map(levers.name, tsgs))
                left = {key: us for key, us in self.slices.items() if key in unseen}
                levers.set_timeslice(controls, tsgs, self.timeslice_us, self.slices)
                self.slices |= left  # until a look says that they were freed
                if not self.slices:
                    self.notes.note(self.process, {})
                if self.off and not self._stays_off:
                    levers.attach(controls, list(filter(self._is_off, tsgs)), self.off, enabled)
                    # What is left was freed; or could not be seen, and is tried again until a look says that it was.
                    self.off &= {key for tsg in self.tsgs() for key in _channels(tsg)}
        self._count()
        return undone

    @contextmanager
    def _borrowed(self) -> Iterator[Controls]:
        """The files that its clients belong to. A program that gave one another number (dup2) looks as if it had closed
        it: then it is looked for. EBUSY for one that does so all the time."""
        for last in (False, True):
            fds = self.handles.fds()
            with rm.borrowed(self.system, self.process, fds) as controls:
                if len(controls) == len(fds):
                    yield controls
                    return
            if last:
                raise OSError(errno.EBUSY, "the files of this program change as they are looked for")
            self.handles.wide(force=True)

    def _doubt(self) -> None:
        """Forgets what it was given: it may still have it, or not. Its channels are asked for, as those are that a
        daemon before us may have left off."""
        slices = self.slices.keys()
        if self._stays_off or self.off:
            self.off.clear()
            self.adopted, self.began = False, NEVER
        self.slices = dict.fromkeys(slices, levers.UNKNOWN)

    def _ask_for_timeslices(self, controls: Controls, tsgs: Sequence[Tsg], again: bool) -> tuple[Sequence[Tsg], bool]:
        """Asks those that are about to be given another one; with `again` all. Returns `tsgs` with what is known to be
        their own by now, and whether it undid what was set."""
        again = again and self.timeslice_us != 0
        due = [tsg for tsg, _ in levers.differing(tsgs, self.timeslice_us, self.slices)]
        found = levers.timeslices(controls, levers.shares(tsgs, 0) if again else due)
        known = {key: us for key, us in self.slices.items() if us != levers.UNKNOWN}
        tsgs = self._learn(tsgs, found)
        self.slices |= found
        if not again:
            return tsgs, False
        changed, self.changed = self.changed, set()
        others = {key for key in changed & known.keys() & found.keys() if found[key] != known[key]}
        return tsgs, bool(others - self._excuse(others))

    def _learn(self, tsgs: Sequence[Tsg], found: Mapping[Key, int]) -> Sequence[Tsg]:
        """`tsgs` with their own timeslices, of those that were found: who makes a TSG may set it late. It is what the
        TSG has before it is given one, and the CUDA library's, whenever that comes."""
        own = {}
        for tsg in tsgs:
            key = levers.name(tsg)
            us = found.get(key, tsg.default_us)
            by_cuda = us == rm.TIMESLICE_DEFAULT_US and self.slices.get(key) not in (us, levers.UNKNOWN)
            if us != tsg.default_us and (by_cuda or key not in self.slices):
                own[key] = us
        if own:
            self.handles.learn(own)
        return [attrs.evolve(tsg, default_us=own.get(levers.name(tsg), tsg.default_us)) for tsg in tsgs]

    def _excuse(self, keys: Set[Key]) -> Set[Key]:
        """Those of the TSGs whose new timeslice their maker may have set: its default, the first time. Not again."""
        own = {levers.name(tsg): us for tsg, us in levers.shares(self.tsgs(), 0).items()}
        excused = {key for key in keys - self.excused if self.slices.get(key) == own.get(key)}
        self.excused = (self.excused | excused) & own.keys()
        return excused

    def _adopt_channels(self) -> None:
        """Learns, once, what a daemon before us left off: disabled once more it would stay so. `acting` is held."""
        tsgs = self.tsgs()
        if tsgs and not self.adopted:
            self.adopted = True
            if self._is_older:
                self.off |= levers.left_off(tsgs, self.states.enabled)
                channels = [key for tsg in tsgs for key in _channels(tsg)]
                self.unsure = any(self.states.enabled(*key) is None for key in channels[:1])

    def _count(self) -> None:
        tsgs = self.tsgs()
        self.activity = Activity(
            tsgs=len(tsgs),
            channels=sum(len(tsg.channels) for tsg in tsgs),
            contexts=sum(tsg.engine is Engine.GR for tsg in tsgs),
            attached=sum(not self._is_off(tsg) for tsg in tsgs),
        )

    def _is_off(self, tsg: Tsg) -> bool:
        """Whether any channel of a TSG was taken off the runlist."""
        return any(key in self.off for key in _channels(tsg))

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turns whatever went wrong because the process is gone into ProcessLookupError."""
        try:
            yield
        except OSError:
            if self.system.start_time(self.process.pid) != self.process.start:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
            raise


def _channels(tsg: Tsg) -> list[Key]:
    return [(tsg.client, channel) for channel in tsg.channels]


def _name(tsg: Tsg) -> str:
    return f"{tsg.client:x}:{tsg.handle:x}"


def _key(name: str) -> Key:
    client, _, handle = name.partition(":")
    return int(client, 16), int(handle, 16)
