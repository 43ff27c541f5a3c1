"""Busy time: how long processes had the engine of a GPU and work for it, which is less than they had the engine.

A context stays on the engine until another one is due (residency.py): a program that is alone and idle has all of the
time there. What of that it worked is told by its kernels. A program with the library counts those on its page, and each
look finds some pending or none: the time since the last look is busy, or is not. One without it is in NVML's samples,
which are of the driver, and coarse (sampling.py); how much comes from them is told.

Where there is no trace the engine's time is not known, and all of the time counts in which kernels were pending: also
while they waited for those of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

import attrs

from backend.process.identity import Process

Used = Callable[[Process], int | None]
"""Microseconds that a process had the engine, until some time ago; None where that is not told."""


CARRIED_US = 1_000_000
"""Microseconds of samples, and of the engine, that are kept to be matched with each other: those are a second late."""


@attrs.define
class Work:
    """What is known of one process."""

    pending: deque[bool]
    """Whether kernels of it were, at the last looks, the oldest first."""
    used: int = 0
    """Microseconds that it had the engine, at the last look."""
    counted: float = 0.0
    """Busy by its own count of its kernels, microseconds."""
    sampled: float = 0.0
    """Busy by samples, microseconds."""
    counts: bool = False
    """Whether it ever counted its kernels."""
    unmatched: tuple[float, float] = (0.0, 0.0)
    """What was sampled beyond what it had the engine, and the other way round, microseconds; up to CARRIED_US."""

    def match(self, sampled: float, used: float) -> float:
        """Return how much more it was busy by samples: what was sampled, but no more than it had the engine. The two
        are not of the same time."""
        sampled, used = sampled + self.unmatched[0], used + self.unmatched[1]
        least = min(sampled, used)
        self.unmatched = min(CARRIED_US, sampled - least), min(CARRIED_US, used - least)
        return least


class BusyTime:
    """See the module. `used` of a process is as old as `age` looks; it is matched with what was pending then."""

    def __init__(self, age: int) -> None:
        self._age = age
        self._known: dict[Process, Work] = {}

    def usec(self, process: Process) -> int | None:
        """Microseconds that a process was busy; None where nothing tells."""
        work = self._known.get(process)
        return int(work.counted) + int(work.sampled) if work is not None else None

    def sampled_usec(self, process: Process) -> int | None:
        """What of that comes from samples."""
        work = self._known.get(process)
        return int(work.sampled) if work is not None else None

    def look(self, programs: Iterable[tuple[Process, bool | None]], used: Used, window_us: float) -> None:
        """A look at whose kernels are pending, `window_us` microseconds after the last; None: it does not count."""
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
        """What samples say since the last time, microseconds by pid: they are of those that do not count."""
        for process, pending in programs:
            if pending is not None:
                continue
            work, now = self._work(process), used(process)
            busy = sampled.get(process.pid, 0.0)
            work.sampled += busy if now is None else work.match(busy, max(0, now - work.used))
            work.used = work.used if now is None else now

    def rest(self, process: Process, used: int) -> int:
        """Microseconds that a process which has ended was busy besides, of what it had the engine by then: as at the
        last look at its kernels."""
        work = self._known.get(process)
        return max(0, used - work.used) if work is not None and work.counts and work.pending[-1] else 0

    def forget(self, process: Process) -> None:
        """The process is gone."""
        self._known.pop(process, None)

    def _work(self, process: Process) -> Work:
        work = self._known.get(process)
        if work is None:
            work = self._known[process] = Work(deque(maxlen=self._age + 1))
        return work
