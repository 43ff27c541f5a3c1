"""The gate of turns of a program on the software GPU: what it asks of the engines waits there between its turns.

It stands before the queues, as the library's before the driver: what was let through is queued and runs, or is copied,
whatever becomes of the gate. Memory is allocated, freed, read and written past it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import trio


class TurnGate:
    """See the module."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether launches and copies wait."""
        self.turn = 1
        """Number of the turn that is under way, or ended last."""
        self.under_way = 0
        """Launches that were let through and have not queued their kernels yet, and copies that were and go on."""
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

    def open(self) -> None:
        """Begins the next turn, where the last one had ended."""
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
