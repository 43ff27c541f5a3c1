"""Deadlines for blocking calls that may never return: NVML and RM can hang in the driver, where no signal reaches."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import trio

from backend.common.threads import in_a_thread

T = TypeVar("T")

LOOK_S = 0.0005
"""Seconds between two looks of a thread that stands aside, to see whether it may go on."""


class Deadline:
    """Runs blocking calls in a thread, one at a time, each with a time limit.

    A call that exceeds its limit is abandoned with OSError(ETIMEDOUT). Until its thread returns, further calls fail
    at once. So a hung driver costs one thread and one wait, instead of one of each per caller.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        # An abandoned thread keeps its token until it returns: there is never more than one.
        self._limiter = trio.CapacityLimiter(1)
        self._turn = trio.Lock()
        self._overdue = False

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, called in a thread. Raises OSError: ETIMEDOUT when it takes too long, EAGAIN
        where no thread can be had.
        """
        async with self._turn:
            if self._overdue and self._limiter.available_tokens == 0:
                raise self._timeout()
            self._overdue = False
            with trio.move_on_after(self._seconds):
                return await in_a_thread(self._what, function, self._limiter)
            self._overdue = True
            raise self._timeout()

    def _timeout(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"{self._what} does not answer")


class Narrow:
    """A section that one thread at a time may enter, for calls that may never return.

    A thread that finds the section taken waits for a limited time. Once one has waited in vain, no other waits until
    the section is free again: otherwise a call that hangs for one program would hold up the threads of all others in
    turn.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._lock = threading.Lock()
        self._late = False

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """Hold the section. Raises OSError(ETIMEDOUT) after a wait in vain."""
        if not self._lock.acquire(timeout=0 if self._late else self._seconds):
            self._late = True
            raise OSError(errno.ETIMEDOUT, f"{self._what} does not answer")
        self._late = False
        try:
            yield
        finally:
            self._lock.release()


class Precedence:
    """Precedence of short work over long work, where both are many calls in threads: each call of the one would wait
    for a call of the other, both for the interpreter and for a lock in the driver.

    Long work stands aside between two calls, for a limited time. Once it has waited in vain, it does not stand aside
    until all short work is over, because a short call, too, may never return. Short work takes no lock: there may be
    a thousand.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at_work: set[object] = set()
        self._late = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Do short work. Several threads may be here at once; all long work stands aside meanwhile."""
        mine = object()
        self._at_work.add(mine)
        try:
            yield
        finally:
            self._at_work.discard(mine)
            if not self._at_work:
                self._late = False

    def stand_aside(self) -> None:
        """Let short work go first; called by long work between two calls."""
        if not self._at_work or self._late:
            return
        until = time.monotonic() + self._seconds
        while self._at_work:
            if time.monotonic() >= until:
                self._late = True
                return
            time.sleep(LOOK_S)
