"""What a software GPU keeps for one process."""

from __future__ import annotations

import errno
import math
from collections.abc import Hashable

import attrs
import trio

from backend.common.errors import fail
from backend.core.protocols import split_timeslice
from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.core.settings import TIMESLICE, Lever
from backend.soft.pages import Memory
from backend.soft.runlist import US, Tsg
from backend.soft.turn import TurnGate

NOTHING = Activity(0, 0, 0, 0, managed=True, busy_usec=0, busy_sampled_usec=0)
"""The work of a process that has done none. That of the engine is known exactly: it is busy whenever it is used."""


@attrs.define(eq=False)
class Tenant:
    """See the module."""

    memory: Memory
    """Its pages."""
    tsgs: dict[int, Tsg] = attrs.field(factory=dict)
    """Its contexts' TSGs, by number."""
    timeslice_us: int = 0
    """What was asked for it; 0 is the default."""
    asked: Engines = Engines.NONE
    """Engines that it is to be without, whatever else it is without."""
    gate: TurnGate = attrs.field(factory=TurnGate)
    """Its gate of turns: open for good where it is not gated."""
    misses: tuple[int, int] = (0, 0)
    """Pages that its last turn used and the one before did not, and the other way round."""
    ungated: set[int] = attrs.field(factory=set)
    """Numbers of TSGs of clients that know of no gate of turns."""
    leaving: bool = False
    """Whether its memory is on the way to another GPU."""
    shared: frozenset[Hashable] = frozenset()
    """Names of the memory that it shares with others; a program of a test says so."""
    copied: int = 0
    """Bytes that the copy engine copied for it, ever."""
    copying: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    """Its copies that wait for the copy engine."""
    dead: bool = False
    """Whether what it has here was lost with the GPU: it is good for nothing but to be given back."""
    retired: Activity = NOTHING
    """The work of the contexts that it closed."""

    @property
    def engines(self) -> Engines:
        """Engines that it is without: what is asked, and all of them on the way to another GPU."""
        return Engines.ALL if self.leaving else self.asked

    @property
    def attached(self) -> bool:
        """Whether its TSGs, and those to come, belong on the runlist of the GR engine."""
        return self.engines is Engines.NONE

    def follow(self) -> None:
        """Has the engines follow what it is to be without."""
        for tsg in self.tsgs.values():
            tsg.attached = self.attached
        if self.engines is not Engines.ALL:
            self.copying.unpark_all()

    @property
    def is_gated(self) -> bool:
        """Whether all that it launches can be held at a gate: each of its contexts is of a client that knows of it.
        Nothing is held of what was lost: launches are refused."""
        return bool(self.tsgs) and not self.ungated and not self.dead

    def regate(self) -> None:
        """Opens the gate where it would not hold everything: a context came, or is gone."""
        if not self.is_gated:
            self.gate.open()

    @property
    def pending(self) -> int:
        """What it has queued, nanoseconds of work by itself, as far as the engine was brought."""
        return sum(tsg.pending for tsg in self.tsgs.values())

    @property
    def ahead_us(self) -> float:
        """Microseconds of work that it has queued beyond its bound, as far as the engine was brought; minus infinity
        without a bound. Kernels wait where that is more than nothing."""
        bound_us = self.gate.ahead_us
        return -math.inf if bound_us == math.inf else self.pending / US - bound_us

    @property
    def is_busy(self) -> bool:
        """Whether something of it runs, is queued or being copied, as far as the engine was brought."""
        return bool(self.gate.under_way or any(tsg.queue for tsg in self.tsgs.values()))

    @property
    def is_late(self) -> bool:
        """Whether its turn has ended, and something of it has not run yet: none of its memory moves before that."""
        return self.gate.is_closed and self.is_busy

    @property
    def is_stuck(self) -> bool:
        """Whether that does not go on, either, until its next turn."""
        return self.is_late and not self.attached

    def begin_turn(self) -> None:
        """Opens its gate. What has not run yet goes on in this turn, with the memory that it uses."""
        if self.is_late:
            self.memory.carry(self.gate.turn)
        self.gate.begin()

    async def copies(self) -> None:
        """Waits until the copy engine may work for it, or what it has is lost."""
        while self.engines is Engines.ALL and not self.dead:
            await self.copying.park()

    def lose(self) -> None:
        """What it has is lost, with the GPU or the process: nothing waits for a turn, a thaw or the engine."""
        self.dead = True
        for tsg in self.tsgs.values():
            tsg.drop()
        self.gate.open()
        self.copying.unpark_all()

    @property
    def holds_work(self) -> bool:
        """Whether it has contexts or memory."""
        return bool(self.tsgs or len(self.memory))

    def activity(self) -> Activity:
        """What it has done and has to do, as far as the engine was brought."""
        tsgs = self.tsgs.values()
        return self.retired + Activity(
            submitted=sum(tsg.submitted for tsg in tsgs),
            finished=sum(tsg.finished for tsg in tsgs),
            pending=sum(len(tsg.queue) for tsg in tsgs),
            gpu_usec=sum(tsg.busy for tsg in tsgs) // US,
            busy_usec=sum(tsg.busy for tsg in tsgs) // US,
            busy_sampled_usec=0,
            tsgs=len(tsgs),
            channels=sum(tsg.channels for tsg in tsgs),
            attached=sum(tsg.attached for tsg in tsgs),
            contexts=len(tsgs),
            stays=sum(tsg.stays for tsg in tsgs),
            managed=True,
        )

    def set_lever(self, lever: Lever, value: int) -> None:
        """Takes the value of a lever. EOPNOTSUPP for one that is not here; 0 holds for each."""
        if lever is TIMESLICE:
            self.timeslice_us = value
        elif value:
            raise fail(errno.EOPNOTSUPP)

    def split(self, default_us: int) -> None:
        """Splits its timeslice over its TSGs, as many as they are now."""
        us = split_timeslice(self.timeslice_us, len(self.tsgs)) if self.timeslice_us else default_us
        for tsg in self.tsgs.values():
            tsg.timeslice = us * US

    def retire(self, tsg: Tsg) -> None:
        """A TSG is closed: what it has done is kept."""
        usec = tsg.busy // US
        work = attrs.evolve(NOTHING, submitted=tsg.submitted, finished=tsg.finished, gpu_usec=usec, busy_usec=usec)
        self.retired += work

    def revive(self) -> None:
        """A process that gave back all that was lost may begin anew."""
        self.dead = self.dead and self.holds_work
