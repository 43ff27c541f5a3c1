"""The engine of a software GPU: its runlist in trio's time, and the reports of what finished.

It is simulated lazily, up to the present, so shares of engine time are exact however late the daemon is woken;
completions are only *reported* when it is.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from backend.soft.runlist import Runlist, Tsg

REPORT_S = 0.001
"""Shortest time between two reports of completions, in seconds."""

REPORT_MOST_S = 0.01
"""Longest time between two reports of completions, in seconds: behind a long kernel, another TSG may finish short
ones."""


class Engine:
    """See the module. Before a TSG is changed the engine is brought up to the present, by :meth:`advance`."""

    def __init__(self, switch: int) -> None:
        """`switch` is the engine time lost when another TSG takes over, nanoseconds."""
        self._runlist = Runlist(switch)
        self._progress: dict[Tsg, Callable[[int], None]] = {}
        self._work = trio.Event()
        self._epoch = 0.0

    def __len__(self) -> int:
        """TSGs that it has, runnable or not."""
        return len(self._progress)

    def start(self) -> None:
        """Its time begins now."""
        self._epoch = trio.current_time()

    def add(self, tsg: Tsg, progress: Callable[[int], None]) -> None:
        """Puts a TSG on the runlist. `progress` is told the kernels that it has finished so far."""
        self._runlist.add(tsg)
        self._progress[tsg] = progress

    def remove(self, tsg: Tsg) -> Callable[[int], None]:
        """Takes a TSG off for good; returns what was told of it."""
        self._runlist.remove(tsg)
        return self._progress.pop(tsg)

    def advance(self) -> None:
        """Brings the engine up to the present and reports what finished."""
        for tsg in self._runlist.advance(int((trio.current_time() - self._epoch) * 1e9)):
            self._progress[tsg](tsg.finished)

    def share(self, moves: int) -> None:
        """Has kernels that reach over the bus share it with so many moves from now on."""
        self.advance()
        self._runlist.share(moves)

    def take_reached(self) -> int:
        """Return the nanoseconds of the whole bus that kernels had, up to now, since it was asked last."""
        self.advance()
        return self._runlist.take_reached()

    def wake(self) -> None:
        """There may be something to do."""
        self._work.set()

    async def report(self) -> None:
        """Reports what finishes, for ever."""
        while True:
            await self._work.wait()
            wait = self._runlist.until_next_finish()
            if wait is None:
                self._work = trio.Event()
            else:
                await trio.sleep(min(max(REPORT_S, wait / 1e9), REPORT_MOST_S))
                self.advance()
