"""Threads for blocking calls. At a limit of tasks, the lack of a thread is an ordinary error, not a bug."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def in_a_thread(what: str, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None) -> T:
    """Return the result of `function`, called in a thread; a caller that is cancelled leaves the thread behind.
    Raises OSError(EAGAIN), which says that `what` was not asked, where no thread can be had: pthread_create(3) fails,
    and Python makes that a RuntimeError.
    """
    began = False

    def work() -> T:
        nonlocal began
        began = True
        return function()

    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except RuntimeError as error:
        if began:
            raise  # the function's own
        raise OSError(errno.EAGAIN, f"{what} is not asked: {error}") from None
