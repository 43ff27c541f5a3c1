"""Peaks: the most memory that a group ever held, and the most since each reader's own reset.

These are memory.peak and memory.swap.peak of Linux 6.12. The ledger keeps the peak of all time, and one since the last
reset by any reader. For each open file that was reset, the peak up to that last reset is kept here. So no reader's
reset takes a peak away from another.
"""

from __future__ import annotations

import errno
from typing import Protocol

from backend.common.errors import fail
from backend.core.records import Books, Peak
from backend.process.identity import Group


class Ledger(Protocol):
    """The part of the ledger that peaks are read from."""

    peaks: frozenset[Peak]
    """The peaks that it keeps."""

    def books(self, group: Group) -> Books:
        """Return the books of a group. ENODEV when the group is gone."""

    def reset_peak(self, group: Group, peak: Peak) -> None:
        """Start a peak of a group anew."""


class Mark:
    """One reader's own peak, from its first reset on."""

    __slots__ = ("highest", "peak")

    def __init__(self, peak: Peak) -> None:
        self.peak: Peak = peak
        self.highest = 0  # bytes, up to the last reset by any reader


class Peaks:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._marks: dict[Group, set[Mark]] = {}

    def ever(self, group: Group, peak: Peak) -> int:
        """Return the most bytes that a group held since it came. ENODEV when the group is gone, EOPNOTSUPP where the
        books have no such peak."""
        books = self._books(group, peak)
        return books.peak_ever if peak == "peak" else books.swap_peak_ever

    def highest(self, group: Group, mark: Mark) -> int:
        """Return the most bytes that a group held since `mark` was reset. ENODEV when the group is gone."""
        return max(self._since(group, mark.peak), mark.highest)

    def reset(self, group: Group, mark: Mark) -> None:
        """Reset `mark`; the peaks of other marks stay. ENODEV when the group is gone."""
        since = self._since(group, mark.peak)
        self._ledger.reset_peak(group, mark.peak)
        marks = self._marks.setdefault(group, set())
        for other in marks:
            if other.peak == mark.peak:
                other.highest = max(since, other.highest)
        mark.highest = 0
        marks.add(mark)

    def leave(self, group: Group, mark: Mark) -> None:
        """Drop a mark whose reader is gone."""
        marks = self._marks.get(group, set())
        marks.discard(mark)
        if not marks:
            self._marks.pop(group, None)

    def forget(self, group: Group) -> None:
        """Drop the marks of a group that is gone."""
        self._marks.pop(group, None)

    def _since(self, group: Group, peak: Peak) -> int:
        books = self._books(group, peak)
        return books.peak if peak == "peak" else books.swap_peak

    def _books(self, group: Group, peak: Peak) -> Books:
        books = self._ledger.books(group)
        if peak not in self._ledger.peaks:
            raise fail(errno.EOPNOTSUPP)
        return books
