"""The gate of turns of a program on the software GPU: its launches and copies wait there between its turns.

It stands before the queues, as the library's gate stands before the driver. Work that was let through is queued and
runs, or is copied, whatever becomes of the gate. Allocating, freeing, reading and writing memory does not pass it.

As with the library, a program that takes turns cannot be far ahead of the engine: kernels wait while more than
AHEAD_US of work is queued, until AHEAD_S after its last turn began.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import trio

from backend.core.turns import AHEAD_S, AHEAD_US


class TurnGate:
    """The gate of turns of one program."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether launches and copies wait."""
        self.turn = 1
        """Number of the turn that is under way, or ended last."""
        self.under_way = 0
        """Launches that were let through and have not queued their kernels yet, and copies that have not ended."""
        self._bound_until = -math.inf
        self._waiting = trio.lowlevel.ParkingLot()

    @property
    def ended(self) -> int:
        """Number of the last turn that ended; of the one under way where none has."""
        return self.turn if self.is_closed else max(1, self.turn - 1)

    @property
    def waiting(self) -> int:
        """Number of launches and copies that wait."""
        return len(self._waiting)

    def close(self) -> None:
        """End the turn."""
        self.is_closed = True

    @property
    def ahead_us(self) -> float:
        """Microseconds of work that may be queued when the next kernel is let through."""
        return AHEAD_US if trio.current_time() < self._bound_until else math.inf

    def begin(self) -> None:
        """Begin the next turn, with a bound on the run-ahead; no effect unless the last one has ended."""
        if self.is_closed:
            self.open()
            self._bound_until = trio.current_time() + AHEAD_S

    def open(self) -> None:
        """Let everything through, as for a program that takes no turns. If the last turn had ended, the
        next one begins.
        """
        self._bound_until = -math.inf
        if self.is_closed:
            self.is_closed = False
            self.turn += 1
            self._waiting.unpark_all()

    async def change(self) -> None:
        """Wait until the gate is opened, even if it is closed again by then."""
        await self._waiting.park()

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Count a launch or a copy as let through, until it has queued its work, or is done."""
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
