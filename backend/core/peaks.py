"""Peaks: the most memory that a group ever held, and for each who asks, since that one asked (memory.peak and
memory.swap.peak, Linux 6.12).

The ledger keeps the peak in all, and one since the last reset of anybody. What was before that is kept here for each
open file that has been reset. So nobody takes a peak away from anybody else.
"""

from __future__ import annotations

import errno
from typing import Protocol

from backend.common.errors import fail
from backend.core.records import Books, Peak
from backend.process.identity import Group


class Ledger(Protocol):
    """What is asked of the books."""

    peaks: frozenset[Peak]
    """Those that it keeps."""

    def books(self, group: Group) -> Books:
        """ENODEV when the group is gone."""

    def reset_peak(self, group: Group, peak: Peak) -> None:
        """Starts that peak again."""


class Mark:
    """One asker's own peak, from its first reset on."""

    __slots__ = ("highest", "peak")

    def __init__(self, peak: Peak) -> None:
        self.peak: Peak = peak
        self.highest = 0  # before the last reset of anybody


class Peaks:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._marks: dict[Group, set[Mark]] = {}

    def ever(self, group: Group, peak: Peak) -> int:
        """The most that a group held since it came, in bytes. ENODEV when the group is gone, EOPNOTSUPP where the books
        have no such peak."""
        books = self._books(group, peak)
        return books.peak_ever if peak == "peak" else books.swap_peak_ever

    def highest(self, group: Group, mark: Mark) -> int:
        """The most that a group held since `mark` was reset, in bytes. ENODEV when the group is gone."""
        return max(self._since(group, mark.peak), mark.highest)

    def reset(self, group: Group, mark: Mark) -> None:
        """From now on `mark` knows of nothing that was before; the others go on. ENODEV when the group is gone."""
        since = self._since(group, mark.peak)
        self._ledger.reset_peak(group, mark.peak)
        marks = self._marks.setdefault(group, set())
        for other in marks:
            if other.peak == mark.peak:
                other.highest = max(since, other.highest)
        mark.highest = 0
        marks.add(mark)

    def leave(self, group: Group, mark: Mark) -> None:
        """Nobody asks for that one any more."""
        marks = self._marks.get(group, set())
        marks.discard(mark)
        if not marks:
            self._marks.pop(group, None)

    def forget(self, group: Group) -> None:
        """The group is gone."""
        self._marks.pop(group, None)

    def _since(self, group: Group, peak: Peak) -> int:
        books = self._books(group, peak)
        return books.peak if peak == "peak" else books.swap_peak

    def _books(self, group: Group, peak: Peak) -> Books:
        books = self._ledger.books(group)
        if peak not in self._ledger.peaks:
            raise fail(errno.EOPNOTSUPP)
        return books
