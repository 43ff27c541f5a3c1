"""Receives FUSE requests: takes several waiting ones in a row, without a turn of trio's loop between them.

For each request pyfuse3 takes a trio lock, which costs a turn of trio's loop, and then waits for /dev/fuse, which costs
another turn, with two calls of epoll: with 150 clients that was half of the daemon's work. Here poll(2) tells whether
the next request is already there. The loop gets a turn when none is, or after `ROW` requests.

pyfuse3 refers to trio by a name in its module, and allows replacing it (its own asyncio.py does).
"""

from __future__ import annotations

import os
import select
from types import SimpleNamespace, TracebackType

import pyfuse3
import trio

from ggroupfs.fs.yielding import shorten_slices

ROW = 32
"""Requests taken before other tasks of the daemon get a turn: about a millisecond."""
WORKERS = 16
"""Tasks kept while they are idle. One task does all the work, unless a write has to wait."""


class Lock:
    """An unfair lock, under which one task at a time waits for requests.

    Unlike with a trio lock, the task that releases it may re-acquire it at once, ahead of the waiting tasks. Those run
    only when that task blocks, so a run of queued requests costs no turn of the loop.
    """

    def __init__(self) -> None:
        self._taken = False
        self._lot = trio.lowlevel.ParkingLot()
        self._woken = False  # a task was woken and has not run yet

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
    """Tells whether a request has arrived."""

    def __init__(self, yields: bool = False) -> None:
        """`yields`: whether to yield the CPU before a row ends, if the kernel makes that cheap (:mod:`.yielding`)."""
        self._yields = yields
        self._left = 0  # requests left in this row
        self._poll = select.poll()

    def _there(self) -> bool:
        """Whether the next request has arrived, or arrives once its program has run.

        A program that was answered is woken, and usually sends its next request before this look. If it waits for this
        very CPU, which a third program keeps busy, it has not run yet, and every request would cost a turn of the loop:
        a write took 2.9 times as long as with a server in C, and takes 1.5 times with the yield. If nothing waits for
        the CPU the yield is just a system call.
        """
        if self._poll.poll(0):
            return True
        if not self._yields:
            return False
        os.sched_yield()  # to the program that was answered
        return bool(self._poll.poll(0))

    async def wait_readable(self, fd: int) -> None:
        """Wait for a request, like trio's function of that name, but at once if one is already there."""
        if self._left and self._there():
            self._left -= 1
            return
        await trio.lowlevel.wait_readable(fd)
        self._poll.register(fd, select.POLLIN)
        self._left = ROW


async def main() -> None:
    """Answer requests until the filesystem is unmounted (:func:`pyfuse3.main`)."""
    lowlevel = SimpleNamespace(**vars(trio.lowlevel) | {"wait_readable": Requests(shorten_slices()).wait_readable})
    pyfuse3.trio = SimpleNamespace(**vars(trio) | {"Lock": Lock, "lowlevel": lowlevel})  # type: ignore[attr-defined]
    try:
        await pyfuse3.main(min_tasks=WORKERS)
    finally:
        pyfuse3.trio = trio  # type: ignore[attr-defined]
