"""The CUDA programs of one GPU whose memory can be moved: those that have our library in them, and speak to us."""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence

import attrs
import trio

from backend.common.errors import fail
from backend.core import sight
from backend.core.protocols import Bookkeeping
from backend.core.records import Footprint, GpuInfo
from backend.core.turns import AHEAD_S, AHEAD_US, TurnEnd
from backend.core.workingset import ANY, WorkingSet
from backend.cuda.caps import Caps
from backend.cuda.holding import Holding
from backend.cuda.migrations import Migrations, Standby
from backend.cuda.periods import Periods
from backend.cuda.program import HALTED_LOOK_S, Mover, Program
from backend.process.identity import Process
from backend.process.running import is_stopped

log = logging.getLogger(__name__)

PIECE = 4 << 30
"""Bytes that are asked for at a time: then another request may follow, and what came of it is in the books."""

RECLAIM_S = 3.0
"""Seconds for one piece; 35 ms are usual. A program that needs longer is not waited for, and not asked until it
has answered."""

SHORT_S = 0.5
"""Seconds for which a program that moved less than it was asked to is not asked again."""

PREPARE_S = 0.5
"""Seconds for a piece of a working set to come: 5 ms are usual."""

HALT_LASTS_S = 0.05
"""Seconds for which it holds that a program is stopped, or is not, where that is asked for all programs with each piece
that moves: a look reads some ten files."""

DISTRUST_S = 60.0
"""Seconds in which a program that said that it is drained, and then moved nothing, is not believed that it is."""


class Managed:
    """See the module. Books are kept by `host`, once the GPU runs."""

    def __init__(
        self,
        info: GpuInfo,
        frozen: Callable[[Process], bool] = lambda process: False,
        lost: Callable[[], bool] = lambda: False,
        counted: Callable[[Process], Awaitable[int]] | None = None,
    ) -> None:
        """`frozen` says whose memory stays where it is, since work of it is off the GPU: what copies memory would wait
        for the thaw, or the kernels would that the library waits for. `lost` says whether the GPU is not there: then
        nothing can be moved, and what programs say of their memory is booked and granted. What became of it they hear
        from the driver, in its words. `counted` says what the driver counts for a process now, 0 where it is not known.
        """
        self.info = info
        self.lost = lost
        self.bookkeeper: Bookkeeping | None = None
        self.spoke: Callable[[Process], None] = lambda process: None
        """Called with a program that speaks from now on: with its last connection its gate opened."""
        self.unheard: Callable[[Iterable[Process]], None] = lambda processes: None
        """Called with those for which something is to be asked again, as they could not speak before."""
        self._programs: dict[Process, Program] = {}
        self._spoken: dict[Process, float] = {}  # seconds, over connections that have ended
        self._frozen = frozen
        self._counted = counted
        self._periods = Periods(info.index, self._programs)
        self._caps = Caps(info.index, self._programs)
        self._migrations = Migrations(info.index, self._programs, self._halted, self.forget)

    def __contains__(self, process: Process) -> bool:
        return process in self._programs

    @property
    def booked(self) -> Bookkeeping:
        """What keeps the books. ENODEV while there is none."""
        if self.bookkeeper is None:
            raise fail(errno.ENODEV)
        return self.bookkeeper

    # Comings and goings

    def open(self) -> None:
        """Programs are heard from now on."""
        self.unheard(self._caps.open())

    async def counted(self, process: Process) -> int:
        """Bytes that the driver counts for a program that is about to speak; 0 where it is not known.

        One that has allocated nothing yet has its context by then. What it allocates is granted beside that: the next
        look at the driver's list would find it after the grant, with the limit exceeded.
        """
        return 0 if self._counted is None else await self._counted(process)

    def begin(self, process: Process, mover: Mover, resident: int, swapped: int, counted: int = 0) -> Holding:
        """Begins with a program that is in the books, speaks from now on, and says what it has; the driver counts
        `counted` for it. EINVAL for what none can have."""
        former = self._programs.get(process)
        if former is not None:  # it connected anew, and we have not seen the end of its last connection
            if former.mover is mover:
                raise fail(errno.EBUSY)
            former.mover.end()
            self.end(former.holding)
        holding = Holding(self.booked, process, self.info.index, self.info.capacity, resident, swapped, counted)
        program = self._programs[process] = Program(mover, holding)
        self._caps.begin(process)
        self._migrations.begin(program)
        return holding

    def met_by(self, holding: Holding, groups: int = 0) -> None:
        """The program has heard that its memory is managed, and its kernels run on these groups of SMs, 0 for all."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            program.is_met = True
            program.met.set()
            self._periods.tell()
            self._caps.met(program, groups)
            self.spoke(holding.process)

    def end(self, holding: Holding) -> None:
        """Its connection is closed; whether or not it lives."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            self.booked.take_down(holding.process, self.info.index)  # what it counted is told no more
            self._spoken[holding.process] = self.spoken(holding.process)
            program.met.set()
            del self._programs[holding.process]
            holding.close()
            self._periods.tell()

    def forget(self, process: Process) -> None:
        """The process exited, or runs elsewhere."""
        self._spoken.pop(process, None)
        self._caps.forget(process)
        program = self._programs.pop(process, None)
        if program is not None:
            program.mover.end()
            self._periods.tell()
        self._migrations.forget(process)

    # What is known

    def footprint(self, process: Process) -> Footprint:
        """What is known of the memory of a program that speaks, or is about to."""
        program = self._programs.get(process)
        if program is None:
            return Footprint(movable=self._migrations.movable(process))
        known = program.holding.footprint
        if not self._stuck(program, HALT_LASTS_S):
            return known
        cannot = self._cannot(program, HALT_LASTS_S)
        later = 0 if cannot else max(0, known.movable - (known.unmovable or 0))
        return attrs.evolve(known, movable=0, later=later)

    def spoken(self, process: Process) -> float:
        """As :meth:`backend.core.protocols.Gpu.spoken`."""
        program = self._programs.get(process)
        now = 0.0 if program is None else trio.current_time() - program.since
        return self._spoken.get(process, 0.0) + now

    def counts(self, process: Process) -> tuple[int, int] | None:
        """Kernels submitted and finished; None for a program that does not say."""
        program = self._programs.get(process)
        return program.mover.counts(self.info.index) if program is not None else None

    def pending_us(self, process: Process) -> int | None:
        """Microseconds for which kernels of a program were submitted and not finished; None where it does not say."""
        program = self._programs.get(process)
        return program.mover.pending_us(self.info.index) if program is not None else None

    def look(self, process: Process, nbytes: int) -> None:
        """The driver's figure for a process."""
        program = self._programs.get(process)
        if program is not None:
            program.holding.look(nbytes)
            self._unbind(program)
            self._migrations.look(program)
            if 0 < program.short_until <= trio.current_time():
                program.short_until = 0.0
                # It may have more to give now than when it was asked.
                self.booked.reclaim_soon(process, self.info.index)
        else:
            self.booked.observe(process, self.info.index, nbytes)

    def met(self, process: Process, nbytes: int) -> None:
        """What the driver said a while ago of one that is in the books from now on. If it speaks, that is too old to be
        held against what it says: it would be taken to have allocated since, and in the books have less than it has."""
        if process not in self._programs:
            self.booked.observe(process, self.info.index, nbytes)

    def _stuck(self, program: Program, lasts: float = 0.0) -> bool:
        """Whether it could not move anything if it wanted to, or has just tried; see :meth:`_cannot`."""
        return program.short_until > trio.current_time() or self._cannot(program, lasts)

    def _cannot(self, program: Program, lasts: float = 0.0) -> bool:
        """Whether it could not, however long ago it tried. That it is stopped, or is not, may have been seen `lasts`
        seconds ago."""
        return bool(program.departs or program.overdue or self._is_halted(program, lasts))

    def _is_halted(self, program: Program, lasts: float) -> bool:
        process, now = program.holding.process, trio.current_time()
        if not lasts or program.looked_at is None or now - program.looked_at > lasts:
            program.looked_at, program.is_stopped = now, is_stopped(process.pid)
        return self.stays(process) or program.is_stopped

    def _halted(self, process: Process) -> bool:
        return self.stays(process) or is_stopped(process.pid)

    def stays(self, process: Process) -> bool:
        """Whether memory of a program stays where it is, in the host, too: the GPU is lost, or the program is frozen,
        and would hold room for what does not come before the thaw."""
        return self.lost() or self._frozen(process)

    # Moving

    async def reclaim(self, process: Process, nbytes: int) -> int:
        """Has a program move at least `nbytes`, or what it can; returns how much it did. EOPNOTSUPP: it does not speak,
        and is not about to.

        Never waits long for one that does not answer: what it moves later is booked then.
        """
        await self.returned(process)
        program = self._programs.get(process)
        if program is None and self._migrations.awaits(process):
            return 0
        if program is None:
            raise OSError(errno.EOPNOTSUPP, "the memory of this program cannot be moved")
        moved = 0
        async with program.turn:
            while moved < nbytes and self._programs.get(process) is program:
                if program.holding.asked or self._stuck(program, HALT_LASTS_S):  # else `_ask` sees it
                    break
                piece = min(PIECE, nbytes - moved)
                before, wait = program.holding.given, program.wait
                answered = await self._ask(program, piece)
                given = program.holding.given - before  # what it could free instead is as good
                moved += given
                if answered and given < piece:
                    program.short_until = trio.current_time() + SHORT_S
                vain = not given if answered else program.holding.asked
                if vain and wait is not None and wait == program.wait and not self._halted(process):
                    # It waits for work of its own, which waits for its turn.
                    program.turn_end = TurnEnd.LATE
                    program.distrusted_until = trio.current_time() + DISTRUST_S
                    program.doubted = None if answered else wait
                    self.booked.not_drained(process, self.info.index)
                if not answered:
                    break  # it was asked for long enough, or not at all: its socket has no room
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

    def answered(self, holding: Holding, moved: int = 0) -> None:
        """It answered after all, when no caller waited any more: what it still has too much is asked for again. One
        that moved memory before its next turn was drained, and slow."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            if moved and program.turn_end is not None and program.doubted == program.turn_number:
                program.distrusted_until, program.doubted = 0.0, None
            self.booked.reclaim_soon(holding.process, self.info.index)

    def offer(self, room: Callable[[Process], int]) -> None:
        """There may be room: tells those that have something in the host, as far as it is for them."""
        for process, program in self._programs.items():
            if program.holding.swapped and (nbytes := min(room(process), program.holding.swapped)) > 0:
                program.mover.room(self.info.index, nbytes)

    # Turns

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        """See :class:`backend.core.protocols.Gpu`. One that is stopped does not answer: it is not waited for."""
        program = self._programs.get(process)
        if program is None or program.departs or is_stopped(process.pid):
            return TurnEnd.UNGATED
        number = program.turn_number
        program.bound_until = None  # or it would pass meanwhile, and the gate be opened for that
        end = await program.mover.end_turn(self.info.index, bound_us, leaves)
        if self._programs.get(process) is not program or program.departs:
            return TurnEnd.UNGATED
        if program.turn_number != number:  # its next one has begun
            return TurnEnd.UNGATED
        if end is TurnEnd.DRAINED and trio.current_time() < program.distrusted_until:
            end = TurnEnd.LATE
        program.turn_end = end
        return end

    def begin_turn(self, process: Process) -> None:
        """See :class:`backend.core.protocols.Gpu`. What it could not move while it waited it is asked for now."""
        program = self._programs.get(process)
        if program is None:
            return
        end = program.turn_end
        self._begin(program, AHEAD_US)
        program.bound_until = trio.current_time() + AHEAD_S
        if end is not TurnEnd.DRAINED and self.booked.knows(process, self.info.index):
            self.booked.reclaim_soon(process, self.info.index)

    def working_set(self, process: Process) -> WorkingSet | None:
        """See :class:`backend.core.protocols.Gpu`."""
        program = self._programs.get(process)
        return None if program is None or program.departs else program.mover.working_set(self.info.index)

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        """See :class:`backend.core.protocols.Gpu`. What a program shares has no name: it may be with any that does."""
        program = self._programs.get(process)
        if program is None or program.departs or program.mover.working_set(self.info.index) is None:
            return None
        return frozenset() if program.mover.is_alone(self.info.index) else frozenset({ANY})

    async def prepare(self, process: Process, nbytes: int) -> int:
        """See :class:`backend.core.protocols.Gpu`. One that is not drained, or stopped, is not asked."""
        program = self._programs.get(process)
        if program is None or program.turn_end is not TurnEnd.DRAINED or self._stuck(program, HALT_LASTS_S):
            return 0
        with trio.move_on_after(PREPARE_S):
            return await program.mover.prepare(self.info.index, nbytes)
        return 0

    def open_all(self) -> None:
        """Opens all gates, since the GPU is lost: a launch fails in the driver's words, and waits for no turn, nor for
        work that never ends. Turns may end again once the GPU is back."""
        for program in self._programs.values():
            self._begin(program, 0)

    def _begin(self, program: Program, ahead_us: int) -> None:
        program.turn_end, program.bound_until = None, None
        program.turn_number += 1
        program.mover.begin_turn(self.info.index, ahead_us)

    def is_drained(self, process: Process) -> bool:
        """Whether a program waits for its turn, and nothing of it runs until then: its memory moves."""
        program = self._programs.get(process)
        return program is not None and program.turn_end is TurnEnd.DRAINED

    def _unbind(self, program: Program) -> None:
        """Lets a program that took no turn for some time run ahead of the GPU again."""
        if program.bound_until is None or program.turn_end is not None:
            return
        if program.bound_until <= trio.current_time():
            program.bound_until = None
            program.mover.begin_turn(self.info.index, 0)

    # Busy periods

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        """See :class:`backend.core.protocols.Gpu`."""
        self._periods.rank(behind, hold_us)

    def held_launches(self, process: Process) -> int | None:
        """See :meth:`backend.cuda.periods.Periods.held_launches`."""
        return self._periods.held_launches(process)

    def busy_periods(self, process: Process) -> int | None:
        """See :meth:`backend.cuda.periods.Periods.busy_periods`."""
        return self._periods.busy_periods(process)

    # From one GPU to another

    def standby(self, process: Process, target: Managed, near: bool) -> Standby:
        """See :meth:`backend.cuda.migrations.Migrations.standby`."""
        return self._migrations.standby(process, target._migrations, near)

    async def moved(self, process: Process) -> None:
        """See :meth:`backend.cuda.migrations.Migrations.moved`."""
        await self._migrations.moved(process)

    def placed(self, process: Process) -> int:
        """See :meth:`backend.cuda.migrations.Migrations.placed`."""
        return self._migrations.placed(process)

    def follows(self, process: Process) -> int:
        """See :meth:`backend.cuda.migrations.Migrations.follows`."""
        return self._migrations.follows(process)

    def departs(self, process: Process) -> bool:
        """See :meth:`backend.cuda.migrations.Migrations.departs`."""
        return self._migrations.departs(process)

    def expect(self, process: Process, placed: int) -> None:
        """See :meth:`backend.cuda.migrations.Migrations.expect`."""
        self._migrations.expect(process, placed)

    async def returned(self, process: Process) -> None:
        """See :meth:`backend.cuda.migrations.Migrations.returned`."""
        await self._migrations.returned(process)

    def expects(self, process: Process) -> bool:
        """See :meth:`backend.cuda.migrations.Migrations.expects`."""
        return self._migrations.expects(process)

    def stay(self, process: Process, placed: int) -> None:
        """See :meth:`backend.cuda.migrations.Migrations.stay`."""
        self._migrations.stay(process, placed)

    # SMs

    async def limit_sms(self, process: Process, sms: int, *, here: bool) -> None:
        """See :meth:`backend.cuda.caps.Caps.limit`."""
        await self._caps.limit(process, sms, here=here)

    def placed_launches(self, process: Process) -> tuple[int, int] | None:
        """See :meth:`backend.cuda.caps.Caps.launches`."""
        return self._caps.launches(process)

    # Sizes

    def limits(self, process: Process) -> Sequence[int]:
        """What holds for a program now: the lowest limit above it (2^64 - 1: none), what is free, what is out."""
        levels = self.booked.levels(process, self.info.index)
        return *sight.limits(levels, self.info.capacity), levels[0].swap

    async def view(self, process: Process) -> Sequence[int]:
        """What a program that asks for the first time is to see as the size of this GPU, whether or not it speaks of
        its memory yet (2^64 - 1: all that there is); and what is free and used of that now, as
        :func:`backend.core.sight.view` has them."""
        levels = await self.booked.prospect(process, self.info.index)
        return sight.total(levels, self.info.capacity), *sight.view(levels, self.info.capacity)
