"""Blocking calls that may never return: NVML and RM can hang in the driver, where no signal reaches a thread."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


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
        """The result of `function`, called in a thread. OSError(ETIMEDOUT) when it takes too long."""
        async with self._turn:
            if self._overdue and self._limiter.available_tokens == 0:
                raise self._timeout()
            self._overdue = False
            with trio.move_on_after(self._seconds):
                return await trio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=self._limiter)
            self._overdue = True
            raise self._timeout()

    def _timeout(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"{self._what} does not answer")
