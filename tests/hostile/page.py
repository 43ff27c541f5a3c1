"""The page of memory that all programs of a run map: counts, present calls, and memory on the driver's GPUs."""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import time
from collections.abc import Iterator
from typing import Any

SIZE = 1 << 15
TENANTS = 12
"""Number of tenants of a round, each of which does two things."""
PLACES = 4
"""Processes of a tenant that may have a context on the driver in memory; the first is the tenant itself."""


class Word(enum.IntEnum):
    """Numbers of the single words."""

    QUIET = 0
    """Not 0 while neighbour and operator have to pause, so that the books can be counted."""
    NEIGHBOUR_QUIET = 1
    """Value of QUIET when the neighbour paused."""
    NEIGHBOUR_PID = 3
    NEIGHBOUR_HOLDS = 4
    """Bytes that the neighbour has charged."""
    NEIGHBOUR_PLACE = 8
    """Its place at the driver: pid, bytes on GPU 0, bytes on GPU 1."""
    OPERATORS_QUIET = 80
    """Value of QUIET when each thread of the operator paused, by what is timed there."""
    METERS = 16
    """First of the meters, of eight words each."""
    HALVES = 128
    """First of the halves, of four words each, two for each tenant."""
    PLACES = 256
    """First of the places, of four words each: pid, bytes on GPU 0, bytes on GPU 1, whether it waits to be moved."""


class Timed(enum.IntEnum):
    """What is timed: calls of one program, of one sort."""

    CALLS = 0
    """Calls of the neighbour to files."""
    CHARGES = 1
    """Calls of the neighbour for memory, until one is granted."""
    NEWCOMERS = 2
    """New connections of the neighbour, until they are greeted."""
    OPERATOR = 3
    """Root's settings and reads."""
    MOVES = 4
    """Root's moves of programs to another GPU, which wait for the programs."""
    KEEPER = 5
    """Root's slices: made, removed and given away."""


SINCE, AT, DONE, WORST_US, WORST_AT, FAILED, FAILED_AT, FAILED_CODE = range(8)


class Page:
    """The page; see the module. Words have 64 bits, and each is written by one program."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Make a page, or map the one whose descriptor another program has passed on."""
        self.descriptor = os.memfd_create("hostile", 0) if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, SIZE)
        self.words: Any = memoryview(mmap.mmap(self.descriptor, SIZE)).cast("Q")

    def half(self, tenant: int, half: int) -> int:
        """Return the index of the words of half a tenant: operations, refusals, lives, whether its program broke."""
        return Word.HALVES + 4 * (2 * tenant + half)

    def place(self, tenant: int, number: int) -> int:
        """Return the index of the words of a tenant's process at the driver."""
        return Word.PLACES + 4 * (PLACES * tenant + number)

    def clear_tenants(self) -> None:
        """Clear the tenants' words before a round."""
        for at in range(self.half(0, 0), self.half(TENANTS, 0)):
            self.words[at] = 0
        for at in range(self.place(0, 0), self.place(TENANTS, 0)):
            self.words[at] = 0

    def meter(self, timed: Timed) -> Meter:
        """Return the meter of one sort of calls."""
        return Meter(self.words, Word.METERS + 8 * timed)


class Meter:
    """The words of one sort of calls; at most one is in progress."""

    def __init__(self, words: Any, base: int) -> None:
        self._words = words
        self._base = base

    @contextlib.contextmanager
    def call(self, at: int, *, judged: bool = True) -> Iterator[None]:
        """Enclose a call; `at` identifies it for a reader. A call that is not `judged`, since it is not for the daemon,
        is only marked as in progress."""
        began = time.monotonic_ns() // 1000
        self._words[self._base + AT] = at
        self._words[self._base + SINCE] = began
        try:
            yield
        finally:
            took = time.monotonic_ns() // 1000 - began
            self._words[self._base + SINCE] = 0
            self._words[self._base + DONE] += 1
            if judged and took > self._words[self._base + WORST_US]:
                self._words[self._base + WORST_US], self._words[self._base + WORST_AT] = took, at

    def failed(self, at: int, code: int) -> None:
        """Note that a call had an end that it must not have."""
        self._words[self._base + FAILED] += 1
        self._words[self._base + FAILED_AT], self._words[self._base + FAILED_CODE] = at, code

    def reset(self) -> None:
        """Forget the longest call."""
        self._words[self._base + WORST_US] = 0

    def __getitem__(self, word: int) -> int:
        return int(self._words[self._base + word])

    @property
    def worst(self) -> float:
        """Return the seconds of the longest call, including the present one."""
        return max(self[WORST_US] / 1e6, self.under_way)

    @property
    def under_way(self) -> float:
        """Return the seconds since the present call began; 0 if there is none."""
        since = self[SINCE]
        return time.monotonic() - since / 1e6 if since else 0.0
