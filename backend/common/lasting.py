"""Tasks that are to last as long as the mount: a bug in one, or in what it says of one process, ends no other's."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

log = logging.getLogger(__name__)

AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""After so long a task that failed is begun again; each time twice as long, up to the second."""


async def lasting(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs a task until cancelled or until it returns. Where it fails it is logged, and begun again."""
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
