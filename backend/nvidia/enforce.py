"""Make the TSGs of a process on one GPU follow what is wanted, in steps that find and change them.

A step runs in a thread and with a deadline. Each thread applies what is wanted at the time it acts, so a call that
was abandoned does no harm when it wakes up.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager

from backend.core.reasons import Engines
from backend.nvidia import levers, rm
from backend.nvidia.applied import Applied, channels_of
from backend.nvidia.discover import Tsg
from backend.nvidia.levers import Controls
from backend.nvidia.linux import System
from backend.nvidia.notes import Notes, noted, recalled
from backend.nvidia.questions import Questions
from backend.nvidia.readback import ChannelStates
from backend.nvidia.timeslices import Timeslices
from backend.nvidia.waiting import Waiter
from backend.process.identity import Process

TIMESLICE = "timeslice"
"""What a process has undone that has another timeslice than was set, in words."""
NEVER = 1 << 62
"""A start time later than that of any process, in clock ticks since boot."""


class Enforcement:
    """The steps for one process on one GPU."""

    def __init__(
        self,
        process: Process,
        system: System,
        applied: Applied,
        states: ChannelStates,
        questions: Questions,
        timeslices: Timeslices,
        began: int,
        notes: Notes,
        waiter: Waiter,
    ) -> None:
        """`states` tells which channels of the GPU are on its runlist. `began` is the start time of this daemon in
        clock ticks since boot: an earlier daemon may have changed a process that is older.
        """
        self.waiter = waiter
        """What is noted of it for the case that the daemon is killed."""
        self._process = process
        self._system = system
        self._applied = applied
        self._states = states
        self._began = began
        self._notes = notes
        self._questions = questions
        self._timeslices = timeslices
        self._adopted = False  # whether channels that an earlier daemon left off were looked for
        self.unsure = False
        """Whether an earlier daemon may have left channels off and the driver cannot tell."""
        self._forgotten = False  # whether the process is gone: a thread that is still at work notes nothing
        self._acting = threading.Lock()  # held while the hardware is made to follow
        known = recalled(self._notes.known(process))
        if known:
            applied.handles.recall(known)
            applied.slices |= dict.fromkeys(known, levers.UNKNOWN)

    @property
    def _is_older(self) -> bool:
        """Whether an earlier daemon may have pulled levers of the process."""
        return self._process.start < self._began

    def begin_again(self) -> None:
        """Start over after the GPU was lost and is back: everything done before was undone, or is asked for anew."""
        self._applied.off.clear()
        self._applied.doubt_timeslices()
        self._timeslices.begin_again()
        self.adopt_again()

    def adopt_again(self) -> None:
        """Ask which channels are off the runlist before the next step, since another daemon may have
        taken them off.
        """
        self._adopted, self._began = False, NEVER

    def forget(self) -> None:
        """Forget the process, or what was wanted for it. A thread that is still at work leaves no notes behind."""
        self._forgotten = True  # before the notes go: that thread may be about to make some
        self._notes.note(self._process, {})
        self.waiter.clear()

    # In threads

    def look(self, force: bool) -> None:
        """Find the process's TSGs; with `force`, even if the host's totals say that there are no new ones.
        Raises OSError.
        """
        with self._alive():
            self._applied.handles.wide(force)
            if not self._adopted:
                with self._acting:
                    self._adopt_channels()

    def left_off(self) -> set[levers.Key]:
        """Return the channels that are off the runlist according to the GPU."""
        return levers.left_off(self._applied.tsgs(), self._states.enabled)

    def enforce(self, again: bool = False, anew: bool = False) -> str:
        """Make the hardware follow; `again`, `anew` and the result are as of
        :meth:`backend.nvidia.tenant.Tenant.enforce`. The levers take about 1 ms. Raises OSError.
        """
        applied = self._applied
        with self._acting, self._alive():
            if anew:
                self._doubt()
            if not applied.handles.fds() or (self._is_older and not self._adopted):
                # A wide look under way ends first: a process that is half known is not adopted.
                applied.handles.wide()
            self._adopt_channels()
            with self._borrowed() as controls, applied.handles.levers.taken():
                if self._looks_first():
                    applied.handles.quick(controls)
                sliced = frozenset(applied.tsgs()) if again else applied.slices_due()
                tsgs, stretched = self._concerned(controls, sliced or frozenset(), again), False
                if sliced is not None:
                    tsgs, stretched = self._timeslices.ask(controls, tsgs, again)
                undone = TIMESLICE if stretched else ""
                if again and applied.stays_off and self._questions.finds_undone():
                    undone = "freeze"
                    levers.attach_once(controls, list(filter(applied.takes, tsgs)), applied.off)
                self._take_off(controls, tsgs)
                if sliced is not None:
                    self._set_timeslices(controls, tsgs)
                self._put_on(controls, tsgs)
            if not applied.off:
                self.waiter.clear()
        return undone

    def _looks_first(self) -> bool:
        """Return whether to look for unknown TSGs before acting. Letting go needs no look, since a new TSG is not
        off. A freeze always looks: equal totals are not enough to say that there is no new one.
        """
        applied = self._applied
        if applied.engines is Engines.ALL:
            return True
        return (applied.stays_off or not applied.off) and applied.handles.may_be_new()

    def _concerned(self, controls: Controls, sliced: Set[Tsg], again: bool) -> Sequence[Tsg]:
        """Return the TSGs to act on, among them those of `sliced`, with those of their handles that are still
        what they were. A lever on GR TSGs asks nothing about the copy TSGs, and one that sets timeslices
        nothing about channels.
        """
        tsgs = self._applied.tsgs()
        due = tsgs if again or self.unsure else self._applied.due()
        return levers.still_there(controls, [tsg for tsg in tsgs if tsg in due or tsg in sliced], due)

    def _take_off(self, controls: Controls, tsgs: Sequence[Tsg]) -> None:
        applied, enabled = self._applied, self._states.enabled
        if self.unsure:  # an enable too many does no harm; a second disable does
            levers.attach(controls, tsgs, applied.off, enabled)
            self.unsure = False
        # What is to run goes on first: a program that is thawed in another's turn waits for its copies.
        if applied.stays_off:
            let_go = [tsg for tsg in tsgs if applied.is_off(tsg) and not applied.takes(tsg)]
            levers.attach(controls, let_go, applied.off, enabled)
            taken = list(filter(applied.takes, tsgs))
            self._note_waiting(taken)
            levers.detach(controls, taken, applied.off, enabled)

    def _note_waiting(self, taken: Sequence[Tsg]) -> None:
        """Note all channels that are off once these TSGs are taken, before they are."""
        applied = self._applied
        self.waiter.note(levers.batches([*taken, *filter(applied.is_off, applied.tsgs())]))
        if self._forgotten:
            self.waiter.clear()

    def _set_timeslices(self, controls: Controls, tsgs: Sequence[Tsg]) -> None:
        applied = self._applied
        if applied.timeslice_us:  # noted before it is set: afterwards the driver does not know it any more
            self._notes.note(self._process, noted(tsgs))
            if self._forgotten:
                self._notes.note(self._process, {})
        unseen = set(map(levers.name, applied.tsgs())) - set(map(levers.name, tsgs))
        left = {key: us for key, us in applied.slices.items() if key in unseen}
        levers.set_timeslice(controls, tsgs, applied.timeslice_us, applied.slices)
        applied.slices |= left  # until a look says that they were freed
        if not applied.slices:
            self._notes.note(self._process, {})

    def _put_on(self, controls: Controls, tsgs: Sequence[Tsg]) -> None:
        applied = self._applied
        if applied.off and not applied.stays_off:
            levers.attach(controls, list(filter(applied.is_off, tsgs)), applied.off, self._states.enabled)
            # What is left was freed, or was out of sight and is tried again until a look says that it was freed.
            applied.off &= {key for tsg in applied.tsgs() for key in channels_of(tsg)}

    @contextmanager
    def _borrowed(self) -> Iterator[Controls]:
        """Yield the files that the process's clients belong to. A program that gave a file another number
        (dup2) looks as if it had closed the file: then its files are looked for again. EBUSY for a program that
        does so all the time.
        """
        handles = self._applied.handles
        for last in (False, True):
            fds = handles.fds()
            with rm.borrowed(self._system, self._process, fds) as controls:
                if len(controls) == len(fds):
                    yield controls
                    return
            if last:
                raise OSError(errno.EBUSY, "the files of this program change as they are looked for")
            handles.wide(force=True)

    def _doubt(self) -> None:
        """Forget what was applied to the process: it may hold, or not. The channels are looked for as after an
        earlier daemon.
        """
        if self._applied.stays_off or self._applied.off:
            self._applied.off.clear()
            self.adopt_again()
        self._applied.doubt_timeslices()

    def _adopt_channels(self) -> None:
        """Learn, once, which channels an earlier daemon left off: after a second disable they would stay off.
        `_acting` is held.
        """
        tsgs = self._applied.tsgs()
        if tsgs and not self._adopted:
            self._adopted = True
            if self._is_older:
                self._applied.off |= self.left_off()
                channels = [key for tsg in tsgs for key in channels_of(tsg)]
                self.unsure = any(self._states.enabled(*key) is None for key in channels[:1])

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turn any OSError into ProcessLookupError if the process is gone."""
        try:
            yield
        except OSError:
            if self._system.start_time(self._process.pid) != self._process.start:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
            raise
