"""Threads for what blocks. That none is to be had, at a limit of tasks, is an error like any other, and no bug."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


async def in_a_thread(what: str, function: Callable[[], T], limiter: trio.CapacityLimiter | None = None) -> T:
    """The result of `function`, called in a thread; who is cancelled leaves it behind. OSError(EAGAIN), which says that
    `what` is not asked, where no thread is to be had: pthread_create(3), which Python makes a RuntimeError."""
    began = False

    def work() -> T:
        nonlocal began
        began = True
        return function()

    try:
        return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=limiter)
    except RuntimeError as error:
        if began:
            raise  # its own
        raise OSError(errno.EAGAIN, f"{what} is not asked: {error}") from None
