"""What is open, by the kernel's number for it; each user's is bounded, since every one is memory of the daemon."""

from __future__ import annotations

import errno
from collections import Counter
from typing import TypeVar

from backend.common.errors import fail

T = TypeVar("T")

FILES = 65536
"""Control files that one user may have open: about 1 KB each."""
LISTINGS = 1024
"""Directories that one user may have open: each may have all its names."""


class Opened(dict[int, T]):
    """A table of open things."""

    def __init__(self, most: int) -> None:
        """`most` is what one user may have; root may have more."""
        super().__init__()
        self._most = most
        self._users: dict[int, int] = {}
        self._counts: Counter[int] = Counter()

    def require(self, uid: int) -> None:
        """ENFILE where a user has too many."""
        if uid and self._counts[uid] >= self._most:
            raise fail(errno.ENFILE)

    def add(self, fh: int, thing: T, uid: int) -> None:
        """One more."""
        self[fh] = thing
        if uid:
            self._users[fh] = uid
            self._counts[uid] += 1

    def close(self, fh: int) -> T:
        """One less."""
        thing = self.pop(fh)
        if uid := self._users.pop(fh, 0):
            self._counts[uid] -= 1
            if not self._counts[uid]:
                del self._counts[uid]
        return thing
