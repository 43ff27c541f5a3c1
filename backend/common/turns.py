"""One piece of work after the other, and whoever has but a question is answered in between.

trio runs everything that can run before it looks again who wants something, and one request of the kernel's is taken
each time it does. When hundreds of programs come at once, and each has a piece of work to be done for it, everybody who
reads a file, systemd's watchdog among them, would wait for hundreds of pieces, and do so for each of his requests.
"""

from __future__ import annotations

import trio


class Turns:
    """Lets one task go on each time that the event loop goes round; first come, first served."""

    def __init__(self) -> None:
        self._lock = trio.Lock()

    async def turn(self) -> None:
        """Returns when it is the caller's turn, for one piece of work that waits for nothing."""
        async with self._lock:
            await trio.lowlevel.checkpoint()
