"""How many slices a user can have, and how deep: what a delegate makes, others wait for, and a restart reads.

The kernel module refuses the same in its books (kmod/uapi/ggroup.h), with the same errno: that of
cgroup.max.descendants and cgroup.max.depth (cgroup-v2.rst).
"""

from __future__ import annotations

import errno
from collections import Counter

from backend.common.errors import fail

SLICES_MOST = 4096
"""Slices of one user other than root (GGROUP_MAX_SLICES_PER_USER)."""
DEPTH_MOST = 32
"""Levels of slices below the root that a user's slice may be deep (GGROUP_MAX_DEPTH)."""
DEPTH_MOST_ROOT = 128
"""... and one of root (GGROUP_MAX_DEPTH_ROOT). What goes through the levels may recurse: this is far below what Python
lets it."""

REFUSALS = frozenset((errno.EAGAIN, errno.ENOSPC, errno.ENAMETOOLONG))
"""What a slice is refused with that is too deep, too many, or has too long a path: here or in the kernel's books."""


class Bounds:
    """Counts the slices of each user. Those of root are not bounded in number."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def require(self, user: int, depth: int) -> None:
        """EAGAIN where a user can have no more slices, or none of so many levels."""
        if depth > (DEPTH_MOST if user else DEPTH_MOST_ROOT) or (user and self._counts[user] >= SLICES_MOST):
            raise fail(errno.EAGAIN)

    def take(self, user: int) -> None:
        """A user has one more."""
        self._counts[user] += 1

    def give(self, user: int) -> None:
        """One of a user's is gone."""
        self._counts[user] -= 1
        if not self._counts[user]:
            del self._counts[user]
