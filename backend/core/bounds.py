"""How many slices a user can have, and how deep: what a delegate makes, others wait for, and a restart reads.

The kernel module refuses the same in its books (kmod/uapi/ggroup.h), with the same errno: that of
cgroup.max.descendants and cgroup.max.depth (cgroup-v2.rst). Families are counted apart: any user may ask for them,
and root in a container is uid 0 as root outside is.
"""

from __future__ import annotations

import errno
from collections import Counter

from backend.common.errors import fail
from backend.process.identity import Slice

SLICES_MOST = 4096
"""Slices of one user other than root (GGROUP_MAX_SLICES_PER_USER)."""
DEPTH_MOST = 32
"""Levels of slices below the root that a user's slice may be deep (GGROUP_MAX_DEPTH)."""
DEPTH_MOST_ROOT = 128
"""Levels that a slice of root may be deep (GGROUP_MAX_DEPTH_ROOT). What goes through the levels may recurse: this is
far below what Python lets it."""

FAMILIES_OF_USER = 4096
"""Slices of families of one user, root too."""
FAMILIES_OF_ALL = 16_384
"""Slices of families of all users: a quarter of the groups that a GPU has in the kernel's books (65536), since any user
may make them."""

REFUSALS = frozenset((errno.EAGAIN, errno.ENOSPC, errno.ENAMETOOLONG))
"""What a slice is refused with that is too deep, too many, or has too long a path: here or in the kernel's books."""


def require_depth(user: int, depth: int) -> None:
    """EAGAIN where a user can have no slice of so many levels."""
    if depth > (DEPTH_MOST if user else DEPTH_MOST_ROOT):
        raise fail(errno.EAGAIN)


class Bounds:
    """Counts the slices of each user but those of families. Those of root are not bounded in number."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def require(self, user: int, depth: int) -> None:
        """EAGAIN where a user can have no more slices, or none of so many levels."""
        require_depth(user, depth)
        if user and self._counts[user] >= SLICES_MOST:
            raise fail(errno.EAGAIN)

    def take(self, user: int) -> None:
        """A user has one more."""
        self._counts[user] += 1

    def give(self, user: int) -> None:
        """One of a user's is gone."""
        self._counts[user] -= 1
        if not self._counts[user]:
            del self._counts[user]


class Places:
    """Counts the slices of families, by the user of each: those that there are, and those that were promised to
    processes which have not come to a GPU yet. One that is promised several times, or is there already, is one."""

    def __init__(self) -> None:
        self._holds: dict[Slice, tuple[int, int]] = {}  # how often a slice is held, and for which user it counts
        self._counts: Counter[int] = Counter()

    def require(self, slice_: Slice, user: int, depth: int) -> None:
        """EAGAIN where a user can have no more families, where there are as many as there can be, and where a slice is
        too deep."""
        require_depth(user, depth)
        if slice_ not in self._holds and (
            self._counts[user] >= FAMILIES_OF_USER or len(self._holds) >= FAMILIES_OF_ALL
        ):
            raise fail(errno.EAGAIN)

    def hold(self, slice_: Slice, user: int) -> None:
        """A slice is there, or is promised, once more."""
        times, of = self._holds.get(slice_, (0, user))
        if not times:
            self._counts[of] += 1
        self._holds[slice_] = times + 1, of

    def let_go(self, slice_: Slice) -> None:
        """A slice is there, or is promised, once less."""
        times, of = self._holds.pop(slice_)
        if times > 1:
            self._holds[slice_] = times - 1, of
            return
        self._counts[of] -= 1
        if not self._counts[of]:
            del self._counts[of]
