"""A CUDA program whose memory can be moved, on one GPU: what speaks for it, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import trio

from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.cuda.burst import BurstPage
from backend.cuda.holding import Holding
from backend.cuda.sms import Shape

LEADERS_MOST = 8
"""Programs that one goes behind in their busy periods: BURST_LEADERS of library/driver/burst.h."""

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
    """A CUDA program that speaks, on one GPU, and what was asked of it."""

    mover: Mover
    """What speaks for it."""
    holding: Holding
    """What it holds."""
    short_until: float = 0.0
    """Until when it is taken to have nothing to give."""
    looked_at: float | None = None
    """When it was looked whether it is stopped, by trio's clock."""
    is_stopped: bool = False
    """Whether it was then."""
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
    doubted: int | None = None
    """The number of the turn behind which it did not answer in time when it was asked to move memory, and is not
    believed for that."""
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
