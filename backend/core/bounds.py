"""Bounds on the number and depth of a user's slices: a delegate makes them, requests wait for them, a restart reads
them.

The kernel module has the same bounds in its books (kmod/uapi/ggroup.h) and refuses with the same errno, that of
cgroup.max.descendants and cgroup.max.depth (cgroup-v2.rst). Slices of families are counted apart: any user may ask for
them, and root in a container is uid 0 like root outside.
"""

from __future__ import annotations

import errno
from collections import Counter

from backend.common.errors import fail
from backend.process.identity import Slice

SLICES_MOST = 4096
"""Most slices of one user other than root (GGROUP_MAX_SLICES_PER_USER)."""
DEPTH_MOST = 32
"""Greatest depth of a user's slice, in levels below the root (GGROUP_MAX_DEPTH)."""
DEPTH_MOST_ROOT = 128
"""Greatest depth of a slice of root's, in levels below the root (GGROUP_MAX_DEPTH_ROOT). Code that walks the levels may
recurse: this is far below Python's limit."""

FAMILIES_OF_USER = 4096
"""Most slices of families of one user, root included."""
FAMILIES_OF_ALL = 16_384
"""Most slices of families of all users: a quarter of the groups that a GPU has in the kernel's books (65536), since any
user may make them."""

REFUSALS = frozenset((errno.EAGAIN, errno.ENOSPC, errno.ENAMETOOLONG))
"""Errnos that mean that a slice is too deep, one too many, or has too long a path, here or in the kernel's books."""


def require_depth(user: int, depth: int) -> None:
    """Raise EAGAIN where a user can have no slice of so many levels."""
    if depth > (DEPTH_MOST if user else DEPTH_MOST_ROOT):
        raise fail(errno.EAGAIN)


class Bounds:
    """The number of slices of each user, those of families excepted. The number of root's slices has no bound."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def require(self, user: int, depth: int) -> None:
        """Raise EAGAIN where a user can have no more slices, or none of so many levels."""
        require_depth(user, depth)
        if user and self._counts[user] >= SLICES_MOST:
            raise fail(errno.EAGAIN)

    def take(self, user: int) -> None:
        """Count one more slice of a user."""
        self._counts[user] += 1

    def give(self, user: int) -> None:
        """Count one slice of a user less."""
        self._counts[user] -= 1
        if not self._counts[user]:
            del self._counts[user]


class Places:
    """The number of slices of families of each user: those that exist, and those promised to processes that have not
    come to a GPU yet. A slice that is promised several times, or promised and there, counts once."""

    def __init__(self) -> None:
        self._holds: dict[Slice, tuple[int, int]] = {}  # times that a slice is held, and the user that it counts for
        self._counts: Counter[int] = Counter()

    def require(self, slice_: Slice, user: int, depth: int) -> None:
        """Raise EAGAIN where a user, or all users together, can have no more families, and where the slice is too
        deep."""
        require_depth(user, depth)
        if slice_ not in self._holds and (
            self._counts[user] >= FAMILIES_OF_USER or len(self._holds) >= FAMILIES_OF_ALL
        ):
            raise fail(errno.EAGAIN)

    def hold(self, slice_: Slice, user: int) -> None:
        """Count a slice as there, or promised, once more."""
        times, of = self._holds.get(slice_, (0, user))
        if not times:
            self._counts[of] += 1
        self._holds[slice_] = times + 1, of

    def let_go(self, slice_: Slice) -> None:
        """Count a slice as there, or promised, once less."""
        times, of = self._holds.pop(slice_)
        if times > 1:
            self._holds[slice_] = times - 1, of
            return
        self._counts[of] -= 1
        if not self._counts[of]:
            del self._counts[of]
