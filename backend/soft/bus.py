"""The bus between a software GPU and its host: two directions, whose bandwidth is shared by the moves in each.

A direction is shared equally: each of n moves under way has an n-th of it, and the two directions do not slow each
other down. A kernel that reaches over the bus for pages in the host shares the direction in, like one more move, as
long as it does so. The engine is told how many moves it shares with, and reports how much of the time was its own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Protocol

import trio

NEAR_BYTES = 4096.0
"""Bytes that may be left of a move that is over: 0.1 us. A real-time clock that counts from the start of the machine
has no finer resolution.
"""


class Way(enum.Enum):
    """A direction of the bus."""

    OUT = enum.auto()
    """From the GPU to the host."""
    IN = enum.auto()
    """From the host to the GPU."""


class Lane:
    """One direction, in a time of its own that only :meth:`advance` moves on. Pure."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        """Bandwidth, bytes a second."""
        self.moves = 0
        """Number of moves that share it."""
        self._served = 0.0  # bytes for each move under way, since there last was none
        self._now = 0.0

    def advance(self, now: float, kernels: float = 0.0) -> None:
        """Advance to the time `now`, in seconds. Kernels had `kernels` bytes since the last time, and the
        moves the rest.
        """
        if self.moves:
            self._served += max(0.0, (now - self._now) * self.bytes_per_s - kernels) / self.moves
        else:
            self._served = 0.0
        self._now = now

    def begin(self, nbytes: int) -> float:
        """Begin a move; return a value that names its end for :meth:`left_s`."""
        self.moves += 1
        return self._served + nbytes

    def end(self) -> None:
        """End a move."""
        self.moves -= 1

    def left_s(self, end: float) -> float:
        """Return the seconds until a move ends if no other comes or goes and no kernel shares with it; 0
        once it is over.
        """
        left = end - self._served
        return left * self.moves / self.bytes_per_s if left > NEAR_BYTES else 0.0

    def usec(self, nbytes: int, others: int = 0) -> int:
        """Return the microseconds that a move takes beside `others`."""
        return nbytes * (1 + others) * 1_000_000 // self.bytes_per_s


class Sharer(Protocol):
    """The kernels, as the bus sees them: :class:`backend.soft.engine.Engine`."""

    def share(self, moves: int) -> None:
        """Make kernels share the direction in with this many moves from now on."""

    def take_reached(self) -> int:
        """Return the nanoseconds of the whole bandwidth that kernels had since the last call, up to now."""


class Bus:
    """The bus of one GPU, in trio's time."""

    def __init__(self, out_bytes_per_s: int, in_bytes_per_s: int, kernels: Sharer) -> None:
        self._lanes: Mapping[Way, Lane] = {Way.OUT: Lane(out_bytes_per_s), Way.IN: Lane(in_bytes_per_s)}
        self._changes = {way: trio.lowlevel.ParkingLot() for way in Way}
        self._kernels = kernels

    def moves(self, way: Way) -> int:
        """Return the number of moves that share a direction now."""
        return self._lanes[way].moves

    def usec(self, way: Way, nbytes: int) -> int:
        """Return the microseconds that `nbytes` take in a direction alone."""
        return self._lanes[way].usec(nbytes)

    def expected_usec(self, way: Way, nbytes: int) -> int:
        """Return the microseconds that `nbytes` will take if they begin now, beside the moves under way."""
        return self._lanes[way].usec(nbytes, self._lanes[way].moves)

    async def move(self, way: Way, nbytes: int) -> None:
        """Return once `nbytes` have gone in a direction."""
        lane = self._lanes[way]
        self._advance()
        end = lane.begin(nbytes)
        self._changed(way)
        try:
            await trio.lowlevel.checkpoint()
            while left := lane.left_s(end):
                with trio.move_on_after(left):
                    await self._changes[way].park()
                self._advance()
        finally:
            self._advance()
            lane.end()
            self._changed(way)

    def _advance(self) -> None:
        now, reached = trio.current_time(), self._kernels.take_reached()
        self._lanes[Way.OUT].advance(now)
        self._lanes[Way.IN].advance(now, reached * self._lanes[Way.IN].bytes_per_s / 1e9)

    def _changed(self, way: Way) -> None:
        """Note that a move came to a direction, or left it."""
        if way is Way.IN:
            self._kernels.share(self._lanes[way].moves)
        self._changes[way].unpark_all()
