"""A process on one NVIDIA GPU: what is wanted for it, and the steps that find its TSGs and make them follow.

A step runs in a thread and with a deadline. Whatever thread comes last applies what is wanted then, so a call that was
given up can do no harm when it wakes up.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import attrs

from backend.identity import Process
from backend.nvidia import levers, rm
from backend.nvidia.deadline import Deadline
from backend.nvidia.discover import Engine, Handles, Tsg
from backend.nvidia.levers import Key
from backend.nvidia.readback import ChannelStates
from backend.records import Activity

log = logging.getLogger(__name__)


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
    system: rm.System
    """The driver of this host."""
    gpu_id: int
    """What it calls the GPU."""
    states: ChannelStates
    """Which channels of the GPU are on its runlist."""
    began: int
    """When this daemon did, in clock ticks since boot: an earlier one may have had programs that are older."""
    frozen: bool = False
    """Wanted: off the runlist."""
    timeslice_us: int = 0
    """Wanted: microseconds in a round, 0 the default."""
    off: set[Key] = attrs.field(factory=set)
    """Its channels that were taken off the runlist."""
    slices: dict[Key, int] = attrs.field(factory=dict)
    """Its TSGs whose timeslice is not their own, microseconds."""
    adopted: bool = False
    """Whether it was asked for channels that an earlier daemon left off."""
    activity: Activity = attrs.field(factory=Activity)
    """As last seen."""
    looked_at: int = 0
    """The round of looks in which it was last its turn to be asked whether it undid anything."""
    asked: int = 0
    """Of the questions that there are, those that were asked, ever: it goes on behind them."""
    acting: threading.Lock = attrs.field(factory=threading.Lock)
    """Held while the hardware is made to follow."""

    @property
    def has_policy(self) -> bool:
        """Whether anything is wanted, or left over."""
        return self.frozen or self.timeslice_us != 0 or bool(self.off or self.slices)

    @property
    def is_behind(self) -> bool:
        """Whether the hardware is not yet what is wanted, by all that is known without asking it."""
        tsgs = self.tsgs()
        if self.frozen:
            if any((tsg.client, channel) not in self.off for tsg in tsgs for channel in tsg.channels):
                return True
        elif self.off:
            return True
        return any(levers.differing(tsgs, self.timeslice_us, self.slices))

    def questions(self) -> int:
        """How many calls it takes yet to see whether the tenant undid its freeze."""
        every = len(self._questions(self.tsgs()))
        return every - self.asked % every if every else 0

    def tsgs(self) -> Sequence[Tsg]:
        """Those on this GPU, as last seen."""
        return [tsg for tsg in self.handles.tsgs() if tsg.gpu_id == self.gpu_id]

    async def look(self, force: bool = False) -> None:
        """Finds its TSGs; with `force` also where the host's totals say that there are no new ones. OSError."""
        await self.looks.call(partial(self._look, force))

    async def enforce(self, questions: int = 0, *, again: bool = False) -> None:
        """Makes the hardware follow what is wanted. OSError.

        Asks so many of its `questions` first, the next ones each time, and, for what is to hold `again`, for its
        timeslices, to see whether the tenant undid it.
        """
        await self.levers.call(partial(self._enforce, questions, again))

    # In threads

    def _look(self, force: bool) -> None:
        with self._alive():
            self.handles.wide(force)
            if not self.adopted:
                with self.acting:
                    self._adopt_channels()
        self._count()

    def _enforce(self, questions: int, again: bool) -> None:
        """The levers proper take about 1 ms."""
        with self.acting, self._alive():
            handles = self.handles
            if not handles.fds():
                handles.wide()
            self._adopt_channels()
            with rm.borrowed(self.system, self.process, handles.fds()) as controls:
                handles.quick(controls)
                tsgs = levers.still_there(controls, self.tsgs())
                enabled = self.states.enabled
                if again and self.timeslice_us:
                    levers.look_at_timeslices(controls, levers.shares(tsgs, 0), self.slices)
                if questions:
                    self._ask(tsgs, questions)
                if self.frozen:
                    levers.detach(controls, tsgs, self.off, enabled)
                levers.set_timeslice(controls, tsgs, self.timeslice_us, self.slices)
                if self.off and not self.frozen:
                    levers.attach(controls, tsgs, self.off, enabled)
                    self.off.clear()  # what is left in it was freed
        self._count()

    def _questions(self, tsgs: Sequence[Tsg]) -> Sequence[Tsg]:
        """TSGs to be asked for a channel of theirs."""
        return [tsg for tsg in tsgs if tsg.channels] if self.frozen else []

    def _ask(self, tsgs: Sequence[Tsg], most: int) -> None:
        questions = self._questions(tsgs)
        if not questions:
            return
        turn, at = divmod(self.asked, len(questions))
        asked = (*questions[at:], *questions[:at])[:most]
        self.asked += len(asked)
        if levers.undone(asked, self.off, self.states.enabled, turn):
            log.warning("pid %d undid its freeze: frozen again", self.process.pid)

    def _adopt_channels(self) -> None:
        """Learns, once, what a daemon before us left off: disabled once more it would stay so. `acting` is held."""
        tsgs = self.tsgs()
        if tsgs and not self.adopted:
            self.adopted = True
            if self.process.start < self.began:
                self.off |= levers.left_off(tsgs, self.states.enabled)

    def _count(self) -> None:
        tsgs = self.tsgs()
        self.activity = Activity(
            tsgs=len(tsgs),
            channels=sum(len(tsg.channels) for tsg in tsgs),
            contexts=sum(tsg.engine is Engine.GR for tsg in tsgs),
            attached=sum(not any((tsg.client, channel) in self.off for channel in tsg.channels) for tsg in tsgs),
        )

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turns whatever went wrong because the process is gone into ProcessLookupError."""
        try:
            yield
        except OSError:
            if self.system.start_time(self.process.pid) != self.process.start:
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
            raise
