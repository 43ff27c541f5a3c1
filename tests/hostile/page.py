"""The page of memory that all programs of a run have mapped: what each counts, is at, and has on the driver's GPUs."""

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
"""Tenants of one round, each of which does two things."""
PLACES = 4
"""Processes of one tenant that may have a context on the driver in memory; the first is the tenant itself."""


class Word(enum.IntEnum):
    """The single words, by number."""

    QUIET = 0
    """Who counts things waits for those that do not: neighbour and operator pause while this is not 0."""
    NEIGHBOUR_QUIET = 1
    """What QUIET was when the neighbour paused."""
    NEIGHBOUR_PID = 3
    NEIGHBOUR_HOLDS = 4
    """Bytes that it has charged."""
    NEIGHBOUR_PLACE = 8
    """Its place at the driver: pid, bytes on GPU 0, bytes on GPU 1."""
    OPERATORS_QUIET = 80
    """The same of each thread of the operator, by what is timed there."""
    METERS = 16
    """Of eight words each."""
    HALVES = 128
    """Of four words each, two for each tenant."""
    PLACES = 256
    """Of four words each: pid, bytes on GPU 0, bytes on GPU 1, whether it waits to be moved."""


class Timed(enum.IntEnum):
    """What is timed: calls of one program, of one sort."""

    CALLS = 0
    """Of the neighbour, to files."""
    CHARGES = 1
    """... for memory, until one is granted."""
    NEWCOMERS = 2
    """... connections that it makes anew, until they are greeted."""
    OPERATOR = 3
    """Of root: what it sets and reads."""
    MOVES = 4
    """... moves of programs to another GPU, which wait for what they say."""
    KEEPER = 5
    """... slices that it makes, removes and gives away."""


SINCE, AT, DONE, WORST_US, WORST_AT, FAILED, FAILED_AT, FAILED_CODE = range(8)


class Page:
    """See the module. Words of 64 bits, each written by one program."""

    def __init__(self, descriptor: int | None = None) -> None:
        """One of its own, or that of the program which handed on the descriptor."""
        self.descriptor = os.memfd_create("hostile", 0) if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self.descriptor, SIZE)
        self.words: Any = memoryview(mmap.mmap(self.descriptor, SIZE)).cast("Q")

    def half(self, tenant: int, half: int) -> int:
        """Where the words of half a tenant are: operations, those refused, lives, whether its program broke."""
        return Word.HALVES + 4 * (2 * tenant + half)

    def place(self, tenant: int, number: int) -> int:
        """Where the words of a process of a tenant at the driver are."""
        return Word.PLACES + 4 * (PLACES * tenant + number)

    def clear_tenants(self) -> None:
        """Before a round: nobody has done anything, and nobody has a context."""
        for at in range(self.half(0, 0), self.half(TENANTS, 0)):
            self.words[at] = 0
        for at in range(self.place(0, 0), self.place(TENANTS, 0)):
            self.words[at] = 0

    def meter(self, timed: Timed) -> Meter:
        """How long calls of one sort take."""
        return Meter(self.words, Word.METERS + 8 * timed)


class Meter:
    """The words of one sort of calls; at most one is under way."""

    def __init__(self, words: Any, base: int) -> None:
        self._words = words
        self._base = base

    @contextlib.contextmanager
    def call(self, at: int, *, judged: bool = True) -> Iterator[None]:
        """One call of the sort; `at` says which, for who reads it. Of one that is not `judged`, since it is not for the
        daemon, it is only told that it is under way."""
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
        """A call had an end that it must not have."""
        self._words[self._base + FAILED] += 1
        self._words[self._base + FAILED_AT], self._words[self._base + FAILED_CODE] = at, code

    def reset(self) -> None:
        """The worst is forgotten."""
        self._words[self._base + WORST_US] = 0

    def __getitem__(self, word: int) -> int:
        return int(self._words[self._base + word])

    @property
    def worst(self) -> float:
        """Seconds of the longest call, that under way included."""
        return max(self[WORST_US] / 1e6, self.under_way)

    @property
    def under_way(self) -> float:
        """Seconds since the call that is under way began; 0 where there is none."""
        since = self[SINCE]
        return time.monotonic() - since / 1e6 if since else 0.0
