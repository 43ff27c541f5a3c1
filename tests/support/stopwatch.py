"""A stopwatch that leaves out the time in which other processes kept the processors busy.

Wall-clock time also measures how busy the machine is. For each thread the kernel counts how long it was ready to run
and had no processor (the second number of /proc/<pid>/task/<tid>/schedstat). Without that time, what remains is the
time in which the processes that take part computed, slept and waited for each other.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


class Stopwatch:
    """A watch that runs from its creation."""

    def __init__(self, *pids: int) -> None:
        """`pids` are the processes that take part, besides this one."""
        self._pids = [os.getpid(), *pids]
        self._waited: dict[Path, int] = {}
        """Nanoseconds that each thread has waited; for a thread that has ended, the last figure read."""
        self._before = self._waits()
        """The sum at the start of the watch, including what a process that was added later had waited by then."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds up to now. A process's waiting time before its end counts as far as it was read before."""
        elapsed = time.monotonic() - self._began
        return elapsed - (self._waits() - self._before) / 1e9

    def add(self, pid: int) -> None:
        """Add a process that takes part from now on."""
        now = self._waits()
        self._pids.append(pid)
        self._before += self._waits() - now

    def _waits(self) -> int:
        for pid in self._pids:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    with contextlib.suppress(OSError):
                        self._waited[task] = int((task / "schedstat").read_bytes().split()[1])
        return sum(self._waited.values())
