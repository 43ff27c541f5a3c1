"""Identify the cgroup that is at a path now: a path is only a name, like a pid, and a cgroup made anew
is another one.
"""

from __future__ import annotations

import errno
import os
import stat

from backend.process import procfs
from backend.process.delegated import HIERARCHIES
from backend.process.identity import Slice

WITNESS = "cgroup.procs"
"""A file that every cgroup has, the root of a hierarchy included. If it is visible, so is everything below."""


MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errnos that say that there is no such cgroup, and can be none."""


def ids(slice_: Slice) -> tuple[int, ...] | None:
    """Return the identities of the cgroups at a path: one, several where the host is hybrid, none where there is no
    such cgroup. Return None where that cannot be told, because no hierarchy that is mounted here shows the path, or
    it may not be looked at.

    The identity is the inode number of the directory, which kernfs does not give again in the life of a hierarchy
    (fs/kernfs/dir.c, ``__kernfs_new_node()``).
    """
    found: list[int] = []
    shown = hidden = False
    try:
        trees = [procfs.trees.of(hierarchy) for hierarchy in HIERARCHIES]
    except OSError:  # no descriptor is left to find out where they are mounted
        return None
    for tree in trees:
        place = next(procfs.levels(tree, slice_.path), None) if tree is not None else None
        if tree is None or place is None:
            hidden = hidden or tree is not None  # only a part of it is mounted here, without that path
            continue
        try:
            status = os.stat(place, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):  # not a control file, which has a name, too
                found.append(status.st_ino)
        except OSError as error:
            if error.errno not in MISSING or not _is_shown(tree):
                return None
        shown = True
    return tuple(found) if found or (shown and not hidden) else None


def _is_shown(tree: procfs.Mount) -> bool:
    """Return whether a hierarchy is still where it was found: if not, the lack of a file in it means nothing."""
    try:
        os.stat(f"{tree.point}/{WITNESS}")
    except OSError:
        return False
    return True
