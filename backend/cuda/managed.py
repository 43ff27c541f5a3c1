"""The CUDA programs of one GPU whose memory can be moved: those that have our library in them, and speak to us."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Protocol

import attrs
import trio

from backend.common.errors import fail
from backend.core import sight
from backend.core.protocols import Bookkeeping
from backend.core.records import Footprint, GpuInfo
from backend.core.turns import AHEAD_S, AHEAD_US, YIELD_AHEAD_US, TurnEnd
from backend.core.workingset import ANY, WorkingSet
from backend.cuda.burst import BurstPage
from backend.cuda.holding import Holding
from backend.cuda.sms import Groups, Shape
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

DEPART_S = 5.0
"""Seconds for a program to stand by: 43 ms for 8 GiB, 0.3 s for 6 GiB in chunks of 2 MiB, and until nothing runs."""

RETURN_S = 5.0
"""Seconds in which a program that was moved connects again: it counts as one with the library meanwhile, and a write to
its files is not refused for that."""

RETURN_WAIT_S = 2.0
"""Seconds of those in which it is waited for: its library tries once a second, and a write has 5 s for all it does."""

HOME_S = 30.0
"""Seconds in which what a program brought along from another GPU is where it runs now: 3 to 5 s for 16 GiB, and as long
as it is frozen or stopped nothing comes (docs/nvidia.md)."""

DISTRUST_S = 60.0
"""Seconds in which a program that said that it is drained, and then moved nothing, is not believed that it is."""

LEADERS_MOST = 8
"""Programs that one goes behind in their busy periods: BURST_LEADERS of library/driver/burst.h."""

SPEAKS_S = 1.0
"""Seconds in which a program whose context is known is waited for to speak."""

HALTED_LOOK_S = 0.02
"""Seconds between two looks whether a program that is waited for was stopped, or frozen."""


class Mover(Protocol):
    """What speaks for a program (:class:`backend.cuda.server.Session`)."""

    async def move_out(self, holding: Holding, nbytes: int, seconds: float) -> bool:
        """Asks the program to move memory to the host, which is booked when it answers; whether it did in time."""

    def working_set(self, gpu: int) -> WorkingSet | None:
        """What the program used of the memory of a GPU in its last turn; None where its library does not tell."""

    def is_alone(self, gpu: int) -> bool:
        """Whether the program says that it shares no memory of a GPU with another process."""

    async def prepare(self, gpu: int, nbytes: int) -> int:
        """Has at most so much of that come from the host, while the program waits for its turn; returns how much did,
        as it says. What comes is booked as the program asks for it. May be cancelled."""

    def room(self, gpu: int, nbytes: int) -> None:
        """Tells the program that so much may come back."""

    def counts(self, gpu: int) -> tuple[int, int] | None:
        """Kernels submitted and finished; None where its library cannot count them here."""

    def launches(self, gpu: int) -> int | None:
        """Calls that submitted kernels; None where its library cannot count them here."""

    def pending_us(self, gpu: int) -> int | None:
        """Microseconds for which some of them were submitted and not finished; None where its library does not tell."""

    @property
    def page(self) -> int:
        """The descriptor of its page (:mod:`backend.cuda.page`)."""

    async def depart(self, gpu: int, near: bool, seconds: float) -> None:
        """Has the program stand by to be moved (:attr:`backend.door.wire.Op.DEPART`), until :meth:`end`; what it has
        on GPUs is used from where it is afterwards, if the other one is `near`. OSError as there, and ETIMEDOUT; then
        it may do so later."""

    async def end_turn(self, gpu: int, bound_us: int, leaves: int = 0) -> TurnEnd:
        """Closes the gate of turns of the program, and waits up to `bound_us` microseconds until it is drained, and
        some 20 ms more for the answer. Asked again while it is late it waits again, and until it is answered that it
        is drained it stays late. May be cancelled."""

    def begin_turn(self, gpu: int, ahead_us: int) -> None:
        """Opens the gate of turns, soon; the program is `ahead_us` microseconds ahead of the GPU at most from then on,
        or as far as the driver lets it for 0."""

    @property
    def bursts(self) -> bool:
        """Whether its library has others held in its busy periods, and is held in those of others."""

    def lead(self, gpu: int, hold_us: int | None) -> BurstPage | None:
        """Tells the program, soon, that others go behind it, and are to be held for so many microseconds after its last
        request; or (None) that none does. Return its page, for those. OSError where none can be made."""

    def follow(self, gpu: int, slot: int, page: BurstPage | None, ahead_us: int) -> None:
        """Tells the program, soon, that it goes behind the one whose page that is, and is `ahead_us` microseconds ahead
        of the GPU at most. None: it goes behind none by that slot."""

    @property
    def places(self) -> bool:
        """Whether its library can have kernels run on some SMs alone."""

    async def place(self, gpu: int, groups: int, *, ask: bool = False) -> Shape:
        """Has the kernels of the program run on these groups of SMs, 0 for all, from the next launch on; returns how
        the SMs are split, which is all that happens for `ask`. EOPNOTSUPP, EINVAL, EBUSY, ETIMEDOUT."""

    def place_soon(self, gpu: int, groups: int) -> None:
        """The same, for which no caller waits."""

    def shape_soon(self, gpu: int, told: Callable[[Shape], None]) -> None:
        """Asks how the SMs are split, and calls `told` with the answer."""

    def placed(self, gpu: int) -> tuple[int, int] | None:
        """Launches that ran on the SMs of a limit, and on all SMs in spite of one; None where its library does not
        count them."""

    def end(self) -> None:
        """The program is not to be spoken for this way any more."""


@attrs.define(eq=False)
class Program:
    """One of them."""

    mover: Mover
    """What speaks for it."""
    holding: Holding
    """What it holds."""
    short_until: float = 0.0
    """Until when it is taken to have nothing to give."""
    turn: trio.Lock = attrs.field(factory=trio.Lock)
    """One piece at a time."""
    departs: bool = False
    """Whether it stands by to be moved, or is about to."""
    home_by: float = 0.0
    """When what it brought along from another GPU is taken to have come."""
    turn_end: TurnEnd | None = None
    """How its turn ended; None where it has it."""
    turn_number: int = 0
    """Number of its turns that began."""
    bound_until: float | None = None
    """Until when its run-ahead is bounded; None where it is not."""
    is_met: bool = False
    """Whether it knows that its memory is managed: of busy periods it is told then."""
    met: trio.Event = attrs.field(factory=trio.Event)
    """Set once it does."""
    page: BurstPage | None = None
    """The page on which it says until when those behind it are held; None where it was not told that there are any."""
    hold_us: int | None = None
    """For how long after its last request, microseconds, as it was told."""
    ahead: list[BurstPage | None] = attrs.field(factory=lambda: [None] * LEADERS_MOST)
    """Those of the programs that it goes behind, by slot."""
    distrusted_until: float = 0.0
    """Until when it is not believed that it is drained."""
    since: float = attrs.field(factory=trio.current_time)
    """When it connected, by trio's clock."""

    @property
    def wait(self) -> int | None:
        """The number of the turn behind which it waits, drained; None where it does not."""
        return self.turn_number if self.turn_end is TurnEnd.DRAINED else None

    @property
    def overdue(self) -> bool:
        """Whether it was asked for something that no caller waits for any more."""
        return self.holding.asked > 0 and not self.turn.locked()


@attrs.frozen
class Standby:
    """How a program with the library is had to stand by, so that the driver can move it."""

    page: int
    """The descriptor of its page, which says that it does (:func:`backend.cuda.page.stands`)."""
    begin: Callable[[], Awaitable[None]]
    """Returns once it does. OSError: it runs on."""
    end: Callable[[], None]
    """Has it go on: it is unlocked."""
    over: trio.Event
    """To be set once no agent is at it any more, if it was begun: before, the driver is slow to do what it asks for."""


@attrs.define(eq=False)
class Expected:
    """A program that was moved, and has not connected again yet."""

    movable: int
    """Bytes that it will be able to move then."""
    waited_until: float
    """When it is not waited for any more, by trio's clock."""
    until: float
    """When it is not expected any more, by trio's clock."""
    over: trio.Event = attrs.field(factory=trio.Event)
    """It has, or never will."""


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
        self._programs: dict[Process, Program] = {}
        self._expected: dict[Process, Expected] = {}
        self._spoken: dict[Process, float] = {}  # seconds, over connections that have ended
        self._moving: dict[Process, trio.Event] = {}  # until when nothing is begun with it
        self._frozen = frozen
        self._counted = counted
        self._groups = Groups()
        self._shapes: dict[Process, Shape] = {}  # of the SMs, by the word of each program, for itself alone
        self._awaited: dict[Process, trio.Event] = {}  # those that are waited for to speak
        self._sms: dict[Process, int] = {}  # those with a limit of SMs, as it was asked for
        self._behind: Mapping[Process, Sequence[Process]] = {}
        self._hold_us = 0

    def __contains__(self, process: Process) -> bool:
        return process in self._programs

    @property
    def booked(self) -> Bookkeeping:
        """What keeps the books. ENODEV while there is none."""
        if self.bookkeeper is None:
            raise fail(errno.ENODEV)
        return self.bookkeeper

    # Comings and goings

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
        if (awaited := self._awaited.pop(process, None)) is not None:
            awaited.set()
        if (expected := self._expected.pop(process, None)) is not None:
            self._came(program)
            expected.over.set()
        return holding

    def met_by(self, holding: Holding, groups: int = 0) -> None:
        """The program has heard that its memory is managed, and its kernels run on these groups of SMs, 0 for all."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            program.is_met = True
            program.met.set()
            self._rank()
            wanted = self._mask(holding.process)
            if wanted is None:
                program.mover.shape_soon(self.info.index, partial(self._shaped, program))
            elif wanted != groups:
                program.mover.place_soon(self.info.index, wanted)

    def end(self, holding: Holding) -> None:
        """Its connection is closed; whether or not it lives."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
            self.booked.take_down(holding.process, self.info.index)  # what it counted is told no more
            self._spoken[holding.process] = self.spoken(holding.process)
            program.met.set()
            del self._programs[holding.process]
            holding.close()
            self._rank()

    def forget(self, process: Process) -> None:
        """The process exited, or runs elsewhere."""
        if (over := self._moving.get(process)) is not None and over.is_set():
            del self._moving[process]
        self._spoken.pop(process, None)
        self._sms.pop(process, None)
        self._shapes.pop(process, None)
        self._groups.forget(process)
        program = self._programs.pop(process, None)
        if program is not None:
            program.mover.end()
            self._rank()
        if (expected := self._expected.pop(process, None)) is not None:
            expected.over.set()

    # What is known

    def footprint(self, process: Process) -> Footprint:
        """What is known of the memory of a program that speaks, or is about to."""
        program = self._programs.get(process)
        if program is None:
            expected = self._expected[process]
            comes = trio.current_time() < expected.waited_until and not self._halted(process)
            return Footprint(movable=expected.movable if comes else 0)
        known = program.holding.footprint
        if not self._stuck(program):
            return known
        later = 0 if self._cannot(program) else max(0, known.movable - (known.unmovable or 0))
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

    def held_launches(self, process: Process) -> int | None:
        """Launches of a program that is held in the busy periods of all those that it goes behind; None for one that
        goes behind none, or behind one that cannot have it held: that has its library, or the other's, against it."""
        program, behind = self._programs.get(process), self._behind.get(process, ())
        if program is None or not behind:
            return None
        for one in behind:
            leader = self._programs.get(one)
            if leader is None or leader.page is None or leader.page not in program.ahead:
                return None
        return program.mover.launches(self.info.index)

    def busy_periods(self, process: Process) -> int | None:
        """Busy periods of a program, ever, by its own word; None for one that goes before none."""
        program = self._programs.get(process)
        if program is None or program.page is None:
            return None
        try:
            return program.page.periods()
        except OSError:  # its connection has ended
            return None

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
            if program.holding.twice:
                self._comes(program)
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

    def _stuck(self, program: Program) -> bool:
        """Whether it could not move anything if it wanted to, or has just tried."""
        return program.short_until > trio.current_time() or self._cannot(program)

    def _cannot(self, program: Program) -> bool:
        """Whether it could not, however long ago it tried."""
        return bool(program.departs or program.overdue or self._halted(program.holding.process))

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
        if program is None and process in self._expected:
            return 0
        if program is None:
            raise OSError(errno.EOPNOTSUPP, "the memory of this program cannot be moved")
        moved = 0
        async with program.turn:
            while moved < nbytes and self._programs.get(process) is program:
                if program.holding.asked or self._stuck(program):
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

    def answered(self, holding: Holding) -> None:
        """It answered after all, when no caller waited any more: what it still has too much is asked for again."""
        program = self._programs.get(holding.process)
        if program is not None and program.holding is holding:
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
        if program is None or program.turn_end is not TurnEnd.DRAINED or self._stuck(program):
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
        self._behind, self._hold_us = behind, hold_us
        self._rank()

    def _rank(self) -> None:
        """Tells programs that can take part in busy periods what has changed for them. What another one has the page of
        is decided here alone: by a page that it has no more a program holds no other."""
        if not self._behind and all(one.hold_us is None for one in self._programs.values()):
            return
        can = {process: one for process, one in self._programs.items() if one.is_met and one.mover.bursts}
        ahead = {
            process: [can[one] for one in self._behind.get(process, ()) if one in can][:LEADERS_MOST] for process in can
        }
        leaders = {id(one) for found in ahead.values() for one in found}
        for one in can.values():
            self._lead(one, self._hold_us if id(one) in leaders else None)
        for process, found in ahead.items():
            self._follow(can[process], [one.page for one in found if one.page is not None])

    def _lead(self, program: Program, hold_us: int | None) -> None:
        if hold_us == program.hold_us:
            return
        program.hold_us = hold_us
        try:
            program.page = program.mover.lead(self.info.index, hold_us)
        except OSError as error:  # no descriptor is left, say
            program.page = program.hold_us = None
            log.warning("process %d: no page for its busy periods: %s", program.holding.process.pid, error.strerror)

    def _follow(self, program: Program, pages: Sequence[BurstPage]) -> None:
        """Has a program go behind those of these pages. A slot keeps its page as long as that is one of them."""
        new = [page for page in pages if page not in program.ahead]
        for slot, page in enumerate(program.ahead):
            if page in pages:
                continue
            now = new.pop(0) if new else None
            if now is not page:
                program.ahead[slot] = now
                program.mover.follow(self.info.index, slot, now, YIELD_AHEAD_US)

    # From one GPU to another

    def standby(self, process: Process, target: Managed, near: bool) -> Standby:
        """How a program that speaks is had to stand by; `near` is where it goes if that can use memory of this GPU.
        The descriptor is for the caller to close. OSError."""
        program, over = self._programs.get(process), trio.Event()
        if program is None:
            raise OSError(errno.EBUSY, "it speaks no more")

        async def begin() -> None:
            for managed in (self, target):
                managed._moving[process] = over
            await self._depart(process, near)

        return Standby(os.dup(program.mover.page), begin, partial(self._let_go, process), over)

    def _let_go(self, process: Process) -> None:
        program = self._programs.get(process)
        if program is not None and program.departs:
            self.forget(process)

    async def _depart(self, process: Process, near: bool) -> None:
        program = self._programs.get(process)
        if program is None:
            raise OSError(errno.EBUSY, "it speaks no more")
        async with program.turn:  # nothing else is asked of it any more
            program.departs = True
            try:
                await program.mover.depart(self.info.index, near, DEPART_S)
            except OSError as error:
                program.departs = error.errno == errno.ETIMEDOUT  # then it may do so yet
                raise

    async def moved(self, process: Process) -> None:
        """Returns once no agent is at a program to move it from here, or to here."""
        if (over := self._moving.get(process)) is not None:
            await over.wait()
            self._moving.pop(process, None)

    def placed(self, process: Process) -> int:
        """Bytes on the GPU that the library has placed, as the program says."""
        program = self._programs.get(process)
        return 0 if program is None else max(0, program.holding.charged - program.holding.unmovable)

    def follows(self, process: Process) -> int:
        """Bytes of those that go from GPU to GPU without the driver: by the descriptors of the library."""
        program = self._programs.get(process)
        return 0 if program is None else max(0, self.placed(process) - program.holding.intact)

    def departs(self, process: Process) -> bool:
        """Whether a program stands by, or is about to: what it asks for it is given when it is back."""
        program = self._programs.get(process)
        return program is not None and program.departs

    def expect(self, process: Process, placed: int) -> None:
        """A program has moved here, with so many bytes that its library has placed. It may be here by now."""
        if (program := self._programs.get(process)) is not None:
            self._came(program)
        else:
            now = trio.current_time()
            self._expected[process] = Expected(placed, now + RETURN_WAIT_S, now + RETURN_S)

    def _came(self, program: Program) -> None:
        """It speaks, from where it was moved to, and its memory follows."""
        program.home_by = trio.current_time() + HOME_S
        program.holding.comes(program.holding.charged)

    def _comes(self, program: Program) -> None:
        if self._halted(program.holding.process):
            program.home_by = trio.current_time() + HOME_S
        elif program.home_by <= trio.current_time():
            program.holding.comes(0)

    async def returned(self, process: Process) -> None:
        """Returns once a program that is expected speaks, or is not waited for any more; one that is stopped is not."""
        if process not in self._programs and (expected := self._expected.get(process)) is not None:
            with trio.move_on_at(expected.waited_until):
                while not expected.over.is_set() and not self._halted(process):
                    with trio.move_on_after(HALTED_LOOK_S):
                        await expected.over.wait()

    def expects(self, process: Process) -> bool:
        """Whether it has, and is about to speak."""
        expected = self._expected.get(process)
        return expected is not None and trio.current_time() < expected.until

    def stay(self, process: Process, placed: int) -> None:
        """A program is not moved after all: it is to go on, if it stands by, or has gone on and comes back here."""
        self._let_go(process)
        self.expect(process, placed)

    # SMs

    async def limit_sms(self, process: Process, sms: int, *, here: bool) -> None:
        """Have the kernels of a program run on so many SMs at most, 0 for all; return once the next launch does. It
        holds for a program that is not here yet, too, once it speaks. EOPNOTSUPP for one that is `here` and does not
        speak.
        """
        before = self._sms.get(process, 0)
        if not sms and not before and process not in self._programs:
            return
        self._wants(process, sms)
        try:
            await self._limit_sms(process, here=here)
        except BaseException:
            self._wants(process, before)
            program, mask = self._programs.get(process), self._mask(process)
            if program is not None and mask is not None:  # it may have followed, and not said so in time
                program.mover.place_soon(self.info.index, mask)
            raise

    def _wants(self, process: Process, sms: int) -> None:
        """Note the limit of a program, 0 for none."""
        if sms:
            self._sms[process] = sms
        else:
            self._sms.pop(process, None)

    async def _limit_sms(self, process: Process, *, here: bool) -> None:
        if here and process not in self._programs and self._sms.get(process):
            await self._spoken_for(process)
        program = self._programs.get(process)
        if program is None:
            if here and self._sms.get(process):
                raise OSError(errno.EOPNOTSUPP, "the program was started without the library (ggroupfs run)")
            return
        await program.met.wait()
        if self._sms.get(process) and process not in self._shapes:
            self._shapes[process] = await program.mover.place(self.info.index, 0, ask=True)
        mask = self._mask(process)
        if mask or program.mover.places:
            await program.mover.place(self.info.index, mask or 0)

    async def _spoken_for(self, process: Process) -> None:
        """Return once a program speaks, or was waited for: its context may be known before its library's word."""
        with trio.move_on_after(SPEAKS_S):
            await self._awaited.setdefault(process, trio.Event()).wait()
        self._awaited.pop(process, None)

    def _shaped(self, program: Program, shape: Shape) -> None:
        """A program has said how the SMs are split, of which a limit waits for it."""
        process = program.holding.process
        self._shapes[process] = shape
        if self._programs.get(process) is program and (mask := self._mask(process)):
            program.mover.place_soon(self.info.index, mask)

    def _mask(self, process: Process) -> int | None:
        """Return the groups of SMs that a program is to have, 0 for all; None while it is not known what there is."""
        sms = self._sms.get(process, 0)
        if not sms:
            self._groups.forget(process)
            return 0
        shape = self._shapes.get(process)
        return None if shape is None else self._groups.take(process, shape.count(sms), shape.groups)

    def placed_launches(self, process: Process) -> tuple[int, int] | None:
        """Launches of a program that ran on the SMs of its limit, and on all SMs in spite of it; None for a program
        that does not count them."""
        program = self._programs.get(process)
        return None if program is None else program.mover.placed(self.info.index)

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
