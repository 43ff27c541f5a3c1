"""State that a software GPU keeps for one process."""

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
from backend.core.settings import SM_MAX, TIMESLICE, Lever
from backend.soft.pages import Memory
from backend.soft.runlist import US, Tsg
from backend.soft.turn import TurnGate
from backend.space.space import Space

NOTHING = Activity(0, 0, 0, 0, managed=True, busy_usec=0, busy_sampled_usec=0)
"""Activity of a process that has done no work. The software GPU counts use exactly: the engine is busy whenever it is
used.
"""


@attrs.define(eq=False)
class Tenant:
    """One process on a software GPU."""

    memory: Memory
    """Its pages."""
    tsgs: dict[int, Tsg] = attrs.field(factory=dict)
    """TSGs of its contexts, by number."""
    timeslice_us: int = 0
    """Timeslice that was set, microseconds; 0 is the default."""
    sm_max: int = 0
    """SMs that its kernels run on at most, as was set; 0 is all of them."""
    asked: Engines = Engines.NONE
    """Engines that are to be off by request; others may be off for another reason."""
    gate: TurnGate = attrs.field(factory=TurnGate)
    """Its gate for turns; always open if it is not gated."""
    misses: tuple[int, int] = (0, 0)
    """Number of pages that its last turn used and the one before did not, and of those used only in the one before."""
    ungated: set[int] = attrs.field(factory=set)
    """Numbers of the TSGs whose clients know no gate for turns."""
    leaving: bool = False
    """Whether its memory is moving to another GPU."""
    shared: frozenset[Hashable] = frozenset()
    """Names of the memory that it shares with others, as set by a test."""
    copied: int = 0
    """Total bytes that the copy engine has copied for it."""
    copying: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    """Copies that wait for the copy engine."""
    space: Space | None = None
    """The space in which its TSGs run beside others; None where they run by themselves."""
    dead: bool = False
    """Whether its contexts and memory were lost with the GPU: it can only free them."""
    retired: Activity = NOTHING
    """Activity of the contexts that it has closed."""

    @property
    def engines(self) -> Engines:
        """Engines that are off: those requested, and all of them while it moves to another GPU."""
        return Engines.ALL if self.leaving else self.asked

    @property
    def attached(self) -> bool:
        """Whether its TSGs, including new ones, belong on the runlist of the GR engine."""
        return self.engines is Engines.NONE

    def follow(self) -> None:
        """Apply `engines` to its TSGs and copies."""
        for tsg in self.tsgs.values():
            tsg.attached = self.attached
        if self.engines is not Engines.ALL:
            self.copying.unpark_all()

    @property
    def is_gated(self) -> bool:
        """Whether a gate can hold everything that it launches: the client of each of its contexts knows the gate. After
        a loss nothing is held, because launches are refused.
        """
        return bool(self.tsgs) and not self.ungated and not self.dead

    def regate(self) -> None:
        """Open the gate if it no longer holds everything, after a context came or went."""
        if not self.is_gated:
            self.gate.open()

    @property
    def pending(self) -> int:
        """Queued work, nanoseconds if it ran alone, as of the engine's last advance."""
        return sum(tsg.pending for tsg in self.tsgs.values())

    @property
    def ahead_us(self) -> float:
        """Queued work in excess of its bound on run-ahead, microseconds, as of the engine's last advance; minus
        infinity without a bound. Kernels wait while it is positive.
        """
        bound_us = self.gate.ahead_us
        return -math.inf if bound_us == math.inf else self.pending / US - bound_us

    @property
    def is_busy(self) -> bool:
        """Whether any of its work is running, queued or being copied, as of the engine's last advance."""
        return bool(self.gate.under_way or any(tsg.queue for tsg in self.tsgs.values()))

    @property
    def is_late(self) -> bool:
        """Whether its turn has ended while some of its work has not run: none of its memory moves until that has."""
        return self.gate.is_closed and self.is_busy

    @property
    def is_stuck(self) -> bool:
        """Whether it is late and its work cannot continue before its next turn."""
        return self.is_late and not self.attached

    def begin_turn(self) -> None:
        """Open its gate. Unfinished work continues in this turn, and the pages that it uses count as used in it."""
        if self.is_late:
            self.memory.carry(self.gate.turn)
        self.gate.begin()

    async def copies(self) -> None:
        """Return once the copy engine may work for it, or it has lost its memory."""
        while self.engines is Engines.ALL and not self.dead:
            await self.copying.park()

    def lose(self) -> None:
        """Drop its work, after the loss of the GPU or the process, so that no call waits for a turn, a thaw or the
        engine.
        """
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
        """Return its finished and pending work, as of the engine's last advance."""
        tsgs = self.tsgs.values()
        activity = self.retired + Activity(
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
        if self.space is None:
            return activity
        # What several have of the engine at the same time cannot be told apart.
        return attrs.evolve(activity, beside=True, gpu_usec=None, gpu_usec_estimate=activity.gpu_usec)

    def set_lever(self, lever: Lever, value: int) -> None:
        """Take the value of a lever. EOPNOTSUPP for a lever that software GPUs do not have, unless the value is 0."""
        if lever is TIMESLICE:
            self.timeslice_us = value
        elif lever is SM_MAX:
            self.sm_max = value
        elif value:
            raise fail(errno.EOPNOTSUPP)

    def split(self, default_us: int) -> None:
        """Split its timeslice over its present TSGs."""
        us = split_timeslice(self.timeslice_us, len(self.tsgs)) if self.timeslice_us else default_us
        for tsg in self.tsgs.values():
            tsg.timeslice = us * US

    def retire(self, tsg: Tsg) -> None:
        """Keep the work of a TSG that is being closed."""
        usec = tsg.busy // US
        work = attrs.evolve(NOTHING, submitted=tsg.submitted, finished=tsg.finished, gpu_usec=usec, busy_usec=usec)
        self.retired += work

    def revive(self) -> None:
        """Let the process start again once it has freed all that was lost."""
        self.dead = self.dead and self.holds_work
