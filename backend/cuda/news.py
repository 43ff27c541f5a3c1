"""The news of one CUDA program: what it is told soon, each by the latest word.

One task of the session sends them, so nothing waits for a program that is slow to take them: what is not told yet is
replaced, not queued.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable

import trio

from backend.cuda.burst import BurstPage
from backend.door.tenants import Line
from backend.door.wire import Message, Op


class News:
    """See the module."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._due = trio.Event()
        self._rooms: dict[int, int] = {}  # gpu -> bytes, not told yet
        self._granted: dict[int, int] = {}  # gpu -> bytes of the host, not told yet
        self._pages: dict[int, BurstPage] = {}  # gpu -> the page on which it says until when others are held
        self._leads: dict[int, int | None] = {}  # gpu -> microseconds, or None for no more; not told yet
        self._follows: dict[tuple[int, int], tuple[BurstPage | None, int]] = {}  # (gpu, slot) -> page, run-ahead; ...

    def wake(self) -> None:
        """Have the task look for what is to be told."""
        self._due.set()

    def room(self, gpu: int, nbytes: int) -> None:
        """Tell the program that so much may come back to a GPU."""
        self._rooms[gpu] = nbytes
        self.wake()

    def grant(self, gpu: int, nbytes: int) -> None:
        """Tell the program what it may have of the host for a GPU."""
        self._granted[gpu] = nbytes
        self.wake()

    def lead(self, gpu: int, hold_us: int | None) -> BurstPage | None:
        """Tell the program whether others go behind it; see :class:`backend.cuda.program.Mover`."""
        self._leads[gpu] = hold_us
        self.wake()
        if hold_us is None:
            if (page := self._pages.pop(gpu, None)) is not None:
                page.close()
            return None
        if gpu not in self._pages:
            self._pages[gpu] = BurstPage()
        return self._pages[gpu]

    def follow(self, gpu: int, slot: int, page: BurstPage | None, ahead_us: int) -> None:
        """Tell the program which one it goes behind; see :class:`backend.cuda.program.Mover`."""
        self._follows[gpu, slot] = page, ahead_us
        self.wake()

    async def run(self, *first: Callable[[], Awaitable[None]]) -> None:
        """Tell what is due, until cancelled; each time those that are `first` send what comes before the rest."""
        while True:
            await self._due.wait()
            self._due = trio.Event()
            for tell in first:
                await tell()
            while self._leads:
                gpu, hold_us = self._leads.popitem()
                page = self._pages.get(gpu)
                await self._hand(
                    Message(Op.LEAD, gpu=gpu, args=(hold_us or 0,)), None if page is None else page.writable
                )
            while self._follows:
                (gpu, slot), (read, ahead_us) = self._follows.popitem()
                message = Message(Op.FOLLOW, gpu=gpu, args=(slot, ahead_us))
                await self._hand(message, None if read is None else read.readable)
            rooms, self._rooms = self._rooms, {}
            for gpu, nbytes in rooms.items():
                await self._line.send(Message(Op.ROOM, gpu=gpu, args=(nbytes,)))
            granted, self._granted = self._granted, {}
            for gpu, nbytes in granted.items():
                await self._line.send(Message(Op.GRANT, gpu=gpu, args=(nbytes,)))

    def close(self) -> None:
        """Close the pages: the connection has ended."""
        for page in self._pages.values():
            page.close()

    async def _hand(self, message: Message, descriptor: int | None) -> None:
        """Send a message with a duplicate of a descriptor, if there is one: while it waits for room the page may be
        given up, and the number be that of another file."""
        own = []
        with contextlib.suppress(OSError):  # none is to be had: as without a page
            own = [] if descriptor is None else [os.dup(descriptor)]
        try:
            await self._line.send(message, own)
        finally:
            for one in own:
                os.close(one)
