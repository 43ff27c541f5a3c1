"""The tables of open files and listings, limited per user because every entry takes memory of the daemon."""

from __future__ import annotations

import errno
from collections import Counter
from typing import TypeVar

from backend.common.errors import fail

T = TypeVar("T")

FILES = 65536
"""Control files that one user may have open; each takes about 1 KB."""
LISTINGS = 1024
"""Directories that one user may have open; each may hold all its names."""


class Opened(dict[int, T]):
    """A table of open objects, by the kernel's number for them (fh)."""

    def __init__(self, most: int) -> None:
        """`most` is the limit for each user other than root, which has none."""
        super().__init__()
        self._most = most
        self._users: dict[int, int] = {}
        self._counts: Counter[int] = Counter()

    def require(self, uid: int) -> None:
        """Raise ENFILE if a user has reached the limit."""
        if uid and self._counts[uid] >= self._most:
            raise fail(errno.ENFILE)

    def add(self, fh: int, thing: T, uid: int) -> None:
        """Add an object that a user opened."""
        self[fh] = thing
        if uid:
            self._users[fh] = uid
            self._counts[uid] += 1

    def close(self, fh: int) -> T:
        """Remove an object and return it."""
        thing = self.pop(fh)
        if uid := self._users.pop(fh, 0):
            self._counts[uid] -= 1
            if not self._counts[uid]:
                del self._counts[uid]
        return thing
