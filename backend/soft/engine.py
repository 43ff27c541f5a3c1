"""The engine of a software GPU: its runlist in trio's time, and reports of finished kernels.

It is simulated lazily, up to the present, so shares of engine time are exact however late the daemon is woken; only
the *reports* of completions are as late as that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import trio

from backend.soft.runlist import Runlist, Tsg

REPORT_S = 0.001
"""Shortest time between two reports of completions, in seconds."""

REPORT_MOST_S = 0.01
"""Longest time between two reports of completions, in seconds: behind a long kernel, another TSG may
finish short ones.
"""


class Engine:
    """The engine of one GPU. Before a TSG is changed, :meth:`advance` has to bring the engine up to the present."""

    def __init__(self, switch: int) -> None:
        """`switch` is the engine time lost when another TSG takes over, nanoseconds."""
        self._runlist = Runlist(switch)
        self._progress: dict[Tsg, Callable[[int], None]] = {}
        self._work = trio.Event()
        self._epoch = 0.0

    def __len__(self) -> int:
        """Return the number of its TSGs, runnable or not."""
        return len(self._progress)

    def start(self) -> None:
        """Start the engine's time now."""
        self._epoch = trio.current_time()

    def add(self, tsg: Tsg, progress: Callable[[int], None], space: Hashable = None) -> None:
        """Put a TSG on the runlist, in its space if it is in one. `progress` is called with the number of kernels that
        it has finished so far."""
        self._runlist.add(tsg, space)
        self._progress[tsg] = progress

    def remove(self, tsg: Tsg) -> Callable[[int], None]:
        """Remove a TSG for good; return its `progress`."""
        self._runlist.remove(tsg)
        return self._progress.pop(tsg)

    def advance(self) -> None:
        """Bring the engine up to the present, and report finished kernels."""
        for tsg in self._runlist.advance(int((trio.current_time() - self._epoch) * 1e9)):
            self._progress[tsg](tsg.finished)

    def share(self, moves: int) -> None:
        """Make kernels that reach over the bus share it with this many moves from now on."""
        self.advance()
        self._runlist.share(moves)

    def take_reached(self) -> int:
        """Return the nanoseconds of the whole bus that kernels had since the last call, up to now."""
        self.advance()
        return self._runlist.take_reached()

    def wake(self) -> None:
        """Wake the reporter, as there may be work."""
        self._work.set()

    async def report(self) -> None:
        """Report finished kernels, for ever."""
        while True:
            await self._work.wait()
            wait = self._runlist.until_next_finish()
            if wait is None:
                self._work = trio.Event()
            else:
                await trio.sleep(min(max(REPORT_S, wait / 1e9), REPORT_MOST_S))
                self.advance()
