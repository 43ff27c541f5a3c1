"""Peaks: the most memory that a group ever held, and for each who asks, since that one asked (memory.peak, Linux 6.12).

The ledger keeps one peak of a group, since the last reset of anybody. What was before is kept here: in all, and for
each open file that has been reset. So nobody takes a peak away from anybody else.
"""

from __future__ import annotations

from typing import Protocol

from backend.identity import Group
from backend.records import Books


class Ledger(Protocol):
    """What is asked of the books."""

    def books(self, group: Group) -> Books:
        """ENODEV when the group is gone."""

    def reset_peak(self, group: Group) -> None:
        """Starts its peak again."""


class Mark:
    """One asker's own peak, from its first reset on."""

    __slots__ = ("highest",)

    def __init__(self) -> None:
        self.highest = 0  # before the last reset of anybody


class Peaks:
    """See the module."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._highest: dict[Group, int] = {}  # before the last reset of anybody
        self._marks: dict[Group, set[Mark]] = {}

    def highest(self, group: Group, mark: Mark | None = None) -> int:
        """The most that a group held, in bytes, in all, or since `mark` was reset. ENODEV when the group is gone."""
        since = self._ledger.books(group).peak
        return max(since, self._highest.get(group, 0) if mark is None else mark.highest)

    def reset(self, group: Group, mark: Mark) -> None:
        """From now on `mark` knows of nothing that was before; the others go on. ENODEV when the group is gone."""
        since = self._ledger.books(group).peak
        self._ledger.reset_peak(group)
        self._highest[group] = max(since, self._highest.get(group, 0))
        marks = self._marks.setdefault(group, set())
        for other in marks:
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
        self._highest.pop(group, None)
        self._marks.pop(group, None)
