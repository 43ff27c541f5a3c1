"""What takes how long, whoever else wants the processors.

A time on the clock says how busy the machine is as well. The kernel keeps for each thread how long it was ready to run
and had no processor (the second number of /proc/<pid>/task/<tid>/schedstat). Without that, it is the time in which the
processes that take part computed, slept and waited for each other.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self, *pids: int) -> None:
        """`pids` are of the processes that take part, besides this one."""
        self._pids = [os.getpid(), *pids]
        self._waited: dict[Path, int] = {}
        """What each thread has waited, nanoseconds; of one that has ended the last that was seen."""
        self._before = self._waits()
        """... of that before it was made, or knew of the process."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Up to now. Of what a process waited before it ended that counts which was there at a look before."""
        elapsed = time.monotonic() - self._began
        return elapsed - (self._waits() - self._before) / 1e9

    def add(self, pid: int) -> None:
        """A process that takes part from now on."""
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
