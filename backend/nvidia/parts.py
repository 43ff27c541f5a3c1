"""What each program of a space had of the engine, as a part of what the space had.

The clients of an MPS server run in one context. So the trace of context switches has the time of all of them under one
name: that of the server, or of one of them, which may have ended since. What the space had since the last look is split
among its programs that had kernels pending then: in equal parts, as nothing tells more. The parts add up to what the
space had.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

import attrs

from backend.process.identity import Process
from backend.space.space import Space


@attrs.frozen
class Shared:
    """The programs of a space, at one look."""

    space: Space
    """The space."""
    names: Collection[int]
    """The pids under which the trace may have their time: those of the servers, and theirs."""
    pending: Mapping[Process, bool]
    """Whether each of them has kernels pending."""


class Parts:
    """The parts of the programs of all spaces of a GPU."""

    def __init__(self, age: int) -> None:
        """`age` is the number of looks by which the trace is late."""
        self._age = age
        self._had: dict[Process, float] = {}  # microseconds
        self._pending: dict[Process, deque[bool]] = {}  # at each of the last looks, the oldest first
        self._used: dict[Space, dict[int, int]] = {}  # by name, at the last look; names of programs that ended, too

    def usec(self, process: Process) -> int | None:
        """Return the microseconds of a program of a space; None for one that is in none."""
        had = self._had.get(process)
        return None if had is None else int(had)

    def look(self, spaces: Iterable[Shared], used: Callable[[int], int]) -> Collection[int]:
        """Split what each space had since the last look. `used` returns the microseconds that the trace has under a
        name. Return the names that are not asked for any more: those of spaces that are gone.
        """
        before, self._used = self._used, {}
        had, pending = self._had, self._pending
        self._had, self._pending = {}, {}
        for one in spaces:
            known = before.pop(one.space, {})
            names = self._used[one.space] = {pid: used(pid) for pid in {*known, *one.names}}
            grew = sum(max(0, now - known.get(pid, now)) for pid, now in names.items())
            for process, is_pending in one.pending.items():
                self._had[process] = had.get(process, 0.0)
                looks = self._pending[process] = pending.get(process) or deque(maxlen=self._age + 1)
                looks.append(is_pending)
            busy = [process for process in one.pending if self._pending[process][0]] or list(one.pending)
            for process in busy:
                self._had[process] += grew / len(busy)
        return {pid for names in before.values() for pid in names}

    def forget(self, process: Process) -> None:
        """Forget a program that has ended. Its name stays with its space."""
        self._had.pop(process, None)
        self._pending.pop(process, None)
