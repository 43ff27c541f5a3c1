"""Busy time: how long a process had the engine of a GPU and also work for it.

This is less than the time on the engine, since a context stays there until another one is due (residency.py): a
program that is alone and idle has the engine all the time. Kernels tell how much of that time was work. A program
with the library counts its kernels on its page; each look finds some pending or none, and the time since the last
look counts as busy or not. A program without the library appears in NVML's samples, which are the driver's own and
coarse (sampling.py); the part of busy time that comes from them is reported.

Without a trace, the time on the engine is unknown. Then all time counts during which kernels were pending, even while
they waited for those of other programs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import attrs

from backend.process.identity import Process

Used = Callable[[Process], int | None]
"""Returns the microseconds that a process had the engine, up to some time ago; None where that is unknown."""


CARRIED_US = 1_000_000
"""Sampled time, and engine time, that is kept to be matched with the other, microseconds: samples
are a second late.
"""


@attrs.define
class Work:
    """The busy time of one process."""

    pending: deque[bool]
    """Whether kernels of the process were pending, at each of the last looks, the oldest first."""
    used: int = 0
    """Time on the engine at the last look, microseconds."""
    counted: float = 0.0
    """Busy time by the program's own count of its kernels, microseconds."""
    sampled: float = 0.0
    """Busy time by samples, microseconds."""
    counts: bool = False
    """Whether the program ever counted its kernels."""
    unmatched: tuple[float, float] = (0.0, 0.0)
    """Sampled time in excess of engine time, and engine time in excess of sampled time, microseconds; each up
    to CARRIED_US.
    """

    def match(self, sampled: float, used: float) -> float:
        """Return the additional busy time by samples, microseconds: the sampled time, limited to the time on the
        engine. What is left of either is kept, since the two figures are not of the same moment.
        """
        sampled, used = sampled + self.unmatched[0], used + self.unmatched[1]
        least = min(sampled, used)
        self.unmatched = min(CARRIED_US, sampled - least), min(CARRIED_US, used - least)
        return least


class BusyTime:
    """Busy time of the processes of one GPU. `used` is `age` looks old, so it is matched with what
    was pending then.
    """

    def __init__(self, age: int) -> None:
        self._age = age
        self._known: dict[Process, Work] = {}

    def usec(self, process: Process) -> int | None:
        """Return the microseconds that a process was busy; None where nothing tells."""
        work = self._known.get(process)
        return int(work.counted) + int(work.sampled) if work is not None else None

    def sampled_usec(self, process: Process) -> int | None:
        """Return the part of them that comes from samples."""
        work = self._known.get(process)
        return int(work.sampled) if work is not None else None

    def look(self, programs: Iterable[tuple[Process, bool | None]], used: Used, window_us: float) -> None:
        """Record which programs have kernels pending, `window_us` microseconds after the last look; None for a
        program that does not count its kernels.
        """
        for process, pending in programs:
            if pending is None:
                continue
            work = self._work(process)
            work.counts = True
            work.pending.append(pending)
            now = used(process)
            if pending if now is None else work.pending[0]:
                work.counted += window_us if now is None else max(0, now - work.used)
            work.used = work.used if now is None else now

    def sample(self, programs: Iterable[tuple[Process, bool | None]], used: Used, sampled: Mapping[int, float]) -> None:
        """Add what samples say since the last call, in microseconds by pid, for programs that do not count
        their kernels.
        """
        for process, pending in programs:
            if pending is not None:
                continue
            work, now = self._work(process), used(process)
            busy = sampled.get(process.pid, 0.0)
            work.sampled += busy if now is None else work.match(busy, max(0, now - work.used))
            work.used = work.used if now is None else now

    def rest(self, process: Process, used: int) -> int:
        """Return the additional microseconds that a process was busy before it ended, given its total time on the
        engine. They count as the last look at its kernels found it.
        """
        work = self._known.get(process)
        return max(0, used - work.used) if work is not None and work.counts and work.pending[-1] else 0

    def forget(self, process: Process) -> None:
        """Forget a process that has ended."""
        self._known.pop(process, None)

    def _work(self, process: Process) -> Work:
        work = self._known.get(process)
        if work is None:
            work = self._known[process] = Work(deque(maxlen=self._age + 1))
        return work
