"""Blocking calls that may never return: NVML and RM can hang in the driver, where no signal reaches a thread."""

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
"""Who stands aside looks so often whether it may go on."""


class Deadline:
    """Runs blocking calls in a thread, one at a time, each for a limited time.

    A call that outlives its time is abandoned with OSError(ETIMEDOUT). Until its thread comes back the others fail at
    once, so that a hung driver costs one thread and one wait, not one of each per caller.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        # An abandoned thread keeps its token until it returns: there is never more than one.
        self._limiter = trio.CapacityLimiter(1)
        self._turn = trio.Lock()
        self._overdue = False

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, called in a thread. OSError: ETIMEDOUT when it takes too long, EAGAIN where no
        thread is to be had."""
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
    """Where one thread at a time may be, in calls that may never return.

    Who finds another in it waits for a limited time, and once somebody did so in vain nobody waits until it is free
    again: a call that hangs for one program shall not stop the threads of all others one after the other.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what = what
        self._seconds = seconds
        self._lock = threading.Lock()
        self._late = False

    @contextlib.contextmanager
    def passed(self) -> Iterator[None]:
        """For the one that is in it. OSError(ETIMEDOUT)."""
        if not self._lock.acquire(timeout=0 if self._late else self._seconds):
            self._late = True
            raise OSError(errno.ETIMEDOUT, f"{self._what} does not answer")
        self._late = False
        try:
            yield
        finally:
            self._lock.release()


class Precedence:
    """Short work before long, where both are a lot of calls in threads: each call of the one would wait beside one of
    the other, for the interpreter as for a lock in the driver.

    Long work stands aside between two calls, for a limited time. Once somebody did so in vain nobody does until all
    short work is over: of that, too, a call may never return. Who is short takes no lock: there may be a thousand.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._at_work: set[object] = set()
        self._late = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """For the short. Several may be at it; none may stand aside meanwhile."""
        mine = object()
        self._at_work.add(mine)
        try:
            yield
        finally:
            self._at_work.discard(mine)
            if not self._at_work:
                self._late = False

    def stand_aside(self) -> None:
        """For the long, between two calls."""
        if not self._at_work or self._late:
            return
        until = time.monotonic() + self._seconds
        while self._at_work:
            if time.monotonic() >= until:
                self._late = True
                return
            time.sleep(LOOK_S)
