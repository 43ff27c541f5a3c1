"""Turns for pieces of work, so that quick requests are answered in between.

trio runs every task that can run before it looks for new events, and takes one request of the kernel each time. When
hundreds of programs arrive at once, and each needs a piece of work, every process that reads a file, systemd's
watchdog among them, would wait for hundreds of pieces, and again for each of its requests.
"""

from __future__ import annotations

import trio


class Turns:
    """A queue that lets one task go on per round of the event loop, first come, first served."""

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def turn(self) -> None:
        """Return when it is the caller's turn, for one piece of work that waits for nothing."""
        async with self._lock:
            await trio.lowlevel.checkpoint()
