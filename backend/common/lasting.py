"""Tasks that last as long as the mount: a bug in one, or in its work for one process, does not end the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""Seconds until a failed task is begun again: the first delay, which doubles with each failure, and its maximum."""


async def lasting(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task until it returns or is cancelled. If it fails, the error is logged and the task is begun again."""
    wait = AGAIN_S
    while True:
        began = trio.current_time()
        try:
            return await run()
        except Exception:
            if trio.current_time() - began > AGAIN_MOST_S:
                wait = AGAIN_S
            log.exception("%s failed, and goes on in %g s", what, wait)
        await trio.sleep(wait)
        wait = min(AGAIN_MOST_S, 2 * wait)
