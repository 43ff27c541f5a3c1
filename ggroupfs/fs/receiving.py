"""How requests are received: those that wait are taken in a row.

pyfuse3 takes a lock of trio's for each request, which is a turn of trio's loop, and then waits for /dev/fuse, which is
another, with two calls of epoll: with 150 clients that was half of what the daemon did. Here a look with poll(2) says
whether the next request is there already, and the loop has its turn when none is, or after `ROW` of them.

pyfuse3 knows trio by a name in its module, and lets others put something else there (its own asyncio.py does).
"""

from __future__ import annotations

import os
import select
from types import SimpleNamespace, TracebackType

import pyfuse3
import trio

from ggroupfs.fs.yielding import shorten_slices

ROW = 32
"""Requests that are taken before others in the daemon have a turn: about a millisecond."""
WORKERS = 16
"""Tasks that are kept when they have nothing to do. One does it all, unless a write has to wait."""


class Lock:
    """A lock under which one task at a time waits for requests.

    Unlike with a lock of trio's, the task that lets go may take it again before the tasks that wait: these have it when
    that one has to wait itself, and nothing in between is a turn of the loop."""

    def __init__(self) -> None:
        self._taken = False
        self._lot = trio.lowlevel.ParkingLot()
        self._woken = False  # a task that has not run yet

    async def __aenter__(self) -> None:
        while self._taken:
            await self._lot.park()
            self._woken = False
        self._taken = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._taken = False
        if not self._woken and self._lot.unpark():
            self._woken = True


class Requests:
    """Whether one is there."""

    def __init__(self, yields: bool = False) -> None:
        """`yields`: give the CPU away before the row ends, which the kernel is to make cheap (:mod:`.yielding`)."""
        self._yields = yields
        self._left = 0  # of a row
        self._poll = select.poll()

    def _there(self) -> bool:
        """Whether the next request has come, or comes as soon as its program has run.

        A program that was answered is woken, and mostly asks again before this looks. Where it waits for this very CPU,
        which a third program keeps busy, it has not run yet, and each request cost a turn of the loop: a write took
        2.9 times the time of a server in C, and takes 1.5 with the yield. That is a system call where nothing waits.
        """
        if self._poll.poll(0):
            return True
        if not self._yields:
            return False
        os.sched_yield()  # to the program that was answered
        return bool(self._poll.poll(0))

    async def wait_readable(self, fd: int) -> None:
        """Waits for one, like trio's function of that name, but with no turn of the loop where it is there already."""
        if self._left and self._there():
            self._left -= 1
            return
        await trio.lowlevel.wait_readable(fd)
        self._poll.register(fd, select.POLLIN)
        self._left = ROW


async def main() -> None:
    """Answers requests until the filesystem is unmounted (:func:`pyfuse3.main`)."""
    lowlevel = SimpleNamespace(**vars(trio.lowlevel) | {"wait_readable": Requests(shorten_slices()).wait_readable})
    pyfuse3.trio = SimpleNamespace(**vars(trio) | {"Lock": Lock, "lowlevel": lowlevel})  # type: ignore[attr-defined]
    try:
        await pyfuse3.main(min_tasks=WORKERS)
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
