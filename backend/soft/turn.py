"""The gate of turns of a program on the software GPU: what it asks of the engines waits there between its turns.

It stands before the queues, as the library's before the driver: what was let through is queued and runs, or is copied,
whatever becomes of the gate. Memory is allocated, freed, read and written past it.

A program that takes turns is not far ahead of the engine, as with the library: kernels wait while more than AHEAD_US of
work is queued, and for AHEAD_S after its last turn began.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import trio

from backend.core.turns import AHEAD_S, AHEAD_US


class TurnGate:
    """See the module."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether launches and copies wait."""
        self.turn = 1
        """Number of the turn that is under way, or ended last."""
        self.under_way = 0
        """Launches that were let through and have not queued their kernels yet, and copies that were and go on."""
        self._bound_until = -math.inf
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def ended(self) -> int:
        """Number of the last turn that ended; of the one under way where none has."""
        return self.turn if self.is_closed else max(1, self.turn - 1)

    @property
    def waiting(self) -> int:
        """Launches and copies that wait."""
        return len(self._waiting)

    def close(self) -> None:
        """Ends the turn."""
        self.is_closed = True

    @property
    def ahead_us(self) -> float:
        """Microseconds of work that may be queued when the next kernel is let through."""
        return AHEAD_US if trio.current_time() < self._bound_until else math.inf

    def begin(self) -> None:
        """Begins the next turn, with a bound on the run-ahead, where the last one had ended."""
        if self.is_closed:
            self.open()
            self._bound_until = trio.current_time() + AHEAD_S

    def open(self) -> None:
        """Lets everything through, as the program takes no turns; the next one has begun where the last one had
        ended."""
        self._bound_until = -math.inf
        if self.is_closed:
            self.is_closed = False
            self.turn += 1
            self._waiting.unpark_all()

    async def change(self) -> None:
        """Waits until it was opened, however it is by now."""
        await self._waiting.park()

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """A launch or a copy that was let through, until it has queued what it has, or is done."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
