"""The CUDA programs of one GPU whose memory can be moved: those that have our library in them, and speak to us."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import trio

from backend.cuda.holding import Holding
from backend.errors import fail
from backend.identity import Process, is_stopped
from backend.protocols import Host
from backend.records import Footprint, GpuInfo

PIECE = 4 << 30
"""Bytes that are asked for at a time: then somebody else may have his turn, and what came of it is in the books."""

RECLAIM_S = 3.0
"""Seconds for one piece; 35 ms are usual. Who needs longer is not waited for, and not asked until he has answered."""

SHORT_S = 0.5
"""Seconds for which a program that moved less than it was asked to is not asked again."""

HALTED_LOOK_S = 0.02
"""Seconds between two looks whether a program that is waited for was stopped, or frozen."""


class Mover(Protocol):
    """Who speaks for a program (:class:`backend.cuda.server.Session`)."""

    async def move_out(self, holding: Holding, nbytes: int, seconds: float) -> bool:
        """Asks the program to move memory to the host, which is booked when it answers; whether it did in time."""

    def room(self, gpu: int, nbytes: int) -> None:
        """Tells the program that so much may come back."""

    def counts(self, gpu: int) -> tuple[int, int]:
        """Kernels submitted and finished."""

    def end(self) -> None:
        """Nobody is to speak for the program this way any more."""


@attrs.define(eq=False)
class Program:
    """One of them."""

    mover: Mover
    """Who speaks for it."""
    holding: Holding
    """What it holds."""
    short_until: float = 0.0
    """Until when it is taken to have nothing to give."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """One piece at a time."""

    @property
    def overdue(self) -> bool:
        """Whether it was asked for something that nobody waits for any more."""
        return self.holding.asked > 0 and not self.turn.locked()


class Managed:
    """See the module. Books are kept by `host`, once the GPU runs."""

    def __init__(
        self,
        info: GpuInfo,
        frozen: Callable[[Process], bool] = lambda process: False,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """`frozen` says whose work is off the GPU: what copies memory is, too, and would wait for the thaw. `lost` says
        whether the GPU is not there: then nobody can move anything, and what programs say of their memory is booked and
        granted. What became of it they hear from the driver, in its words."""
        self.info = info
        self.lost = lost
        self.host: Host | None = None
        self._programs: dict[Process, Program] = {}
        self._frozen = frozen

    def __contains__(self, process: Process) -> bool:
        return process in self._programs

    @property
    def booked(self) -> Host:
        """The host. ENODEV while there is none."""
        if self.host is None:
            raise fail(errno.ENODEV)
        return self.host

    # Comings and goings

    def begin(self, process: Process, mover: Mover, resident: int, swapped: int) -> Holding:
        """A program that is in the books speaks from now on, and says what it has. EINVAL for what nobody can have."""
        former = self._programs.get(process)
        if former is not None:  # it connected anew, and we have not seen the end of its last connection
            if former.mover is mover:
                raise fail(errno.EBUSY)
            former.mover.end()
            self.end(former.holding)
        holding = Holding(self.booked, process, self.info.index, self.info.capacity, resident, swapped)
        self._programs[process] = Program(mover, holding)
        return holding

    def end(self, holding: Holding) -> None:
        """Its connection is closed; whether or not it lives."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            del self._programs[holding.process]
            holding.close()

    def forget(self, process: Process) -> None:
        """The process exited."""
        program = self._programs.pop(process, None)
        if program is not None:
            program.mover.end()

    # What is known

    def footprint(self, process: Process) -> Footprint:
        """What is known of the memory of a program that speaks."""
        program = self._programs[process]
        known = program.holding.footprint
        return attrs.evolve(known, movable=0) if self._stuck(program) else known

    def counts(self, process: Process) -> tuple[int, int] | None:
        """Kernels submitted and finished; None for a program that does not say."""
        program = self._programs.get(process)
        return program.mover.counts(self.info.index) if program is not None else None

    def look(self, process: Process, nbytes: int) -> None:
        """The driver's figure for a process."""
        program = self._programs.get(process)
        if program is not None:
            program.holding.look(nbytes)
            if 0 < program.short_until <= trio.current_time():
                program.short_until = 0.0
                self.booked.settle(process, self.info.index)  # it may have more to give now than when it was asked
        else:
            self.booked.observe(process, self.info.index, nbytes)

    def _stuck(self, program: Program) -> bool:
        """Whether it could not move anything if it wanted to, or has just tried."""
        process = program.holding.process
        return bool(program.overdue or program.short_until > trio.current_time() or self._halted(process))

    def _halted(self, process: Process) -> bool:
        return self.lost() or self._frozen(process) or is_stopped(process.pid)

    # Moving

    async def reclaim(self, process: Process, nbytes: int) -> int:
        """Has a program move at least `nbytes`, or what it can; returns how much it did. EOPNOTSUPP: it does not speak.

        Never waits long for one that does not answer: what it moves later is booked then.
        """
        program = self._programs.get(process)
        if program is None:
            raise OSError(errno.EOPNOTSUPP, "the memory of this program cannot be moved")
        moved = 0
        async with program.turn:
            while moved < nbytes and self._programs.get(process) is program:
                if program.holding.asked or self._stuck(program):
                    break
                piece = min(PIECE, nbytes - moved)
                before = program.holding.given
                answered = await self._ask(program, piece)
                given = program.holding.given - before  # what it could free instead is as good
                moved += given
                if answered and given < piece:
                    program.short_until = trio.current_time() + SHORT_S
        return moved

    async def _ask(self, program: Program, nbytes: int) -> bool:
        """Asks for one piece; whether it answered in time. One that is stopped in the middle of it is let go of: it
        could keep its neighbours waiting for as long as it likes to be."""
        answered = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, program.holding.process, nursery.cancel_scope)
            answered = await program.mover.move_out(program.holding, nbytes, RECLAIM_S)
            nursery.cancel_scope.cancel()
        return answered

    async def _watch(self, process: Process, scope: trio.CancelScope) -> None:
        while True:
            if self._halted(process):
                scope.cancel()
            await trio.sleep(HALTED_LOOK_S)

    def answered(self, holding: Holding) -> None:
        """It answered after all, when nobody waited any more: what it still has too much is asked for again."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            self.booked.settle(holding.process, self.info.index)

    def offer(self, room: Callable[[Process], int]) -> None:
        """There may be room: tells those that have something in the host, as far as it is for them."""
        for process, program in self._programs.items():
            if program.holding.swapped and (nbytes := min(room(process), program.holding.swapped)) > 0:
                program.mover.room(self.info.index, nbytes)

    def limits(self, process: Process) -> Sequence[int]:
        """What a program is to see as its GPU: the lowest high above it (2^64 - 1: none), what is free, what is out."""
        levels = self.booked.levels(process, self.info.index)
        limited = [books for books in levels[:-1] if books.high < self.info.capacity]
        if not limited:
            return (1 << 64) - 1, 0, levels[0].swap
        free = min(books.high - books.current for books in limited)
        return min(books.high for books in limited), max(0, free), levels[0].swap
