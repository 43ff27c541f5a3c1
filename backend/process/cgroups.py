"""Which cgroup is at a path now. A path is a name, as a pid is: a cgroup that is removed and made again is another."""

from __future__ import annotations

import errno
import os
import stat

from backend.process import procfs
from backend.process.delegated import HIERARCHIES
from backend.process.identity import Slice

WITNESS = "cgroup.procs"
"""File of every cgroup, the root of a hierarchy among them: where it can be looked at, so can what is below."""


MISSING = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors that say that there is no such cgroup, nor can be."""


def ids(slice_: Slice) -> tuple[int, ...] | None:
    """Return the identities of the cgroups at a path: one, several where the host is hybrid, none where there is no
    such cgroup. None where that cannot be told: no hierarchy that is mounted here shows the path, or it may not be
    looked at.

    The identity is the number of the directory's inode, which kernfs gives to no other in the life of a hierarchy
    (fs/kernfs/dir.c, ``__kernfs_new_node()``).
    """
    found: list[int] = []
    shown = hidden = False
    try:
        trees = [procfs.trees.of(hierarchy) for hierarchy in HIERARCHIES]
    except OSError:  # no descriptor is left to read where they are
        return None
    for tree in trees:
        place = next(procfs.levels(tree, slice_.path), None) if tree is not None else None
        if tree is None or place is None:
            hidden = hidden or tree is not None  # of which a part is mounted here that has not that path
            continue
        try:
            status = os.stat(place, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):  # and no control file, which has a name, too
                found.append(status.st_ino)
        except OSError as error:
            if error.errno not in MISSING or not _is_shown(tree):
                return None
        shown = True
    return tuple(found) if found or (shown and not hidden) else None


def _is_shown(tree: procfs.Mount) -> bool:
    """Whether a hierarchy is where it was found once: else nothing is known of what is not there."""
    try:
        os.stat(f"{tree.point}/{WITNESS}")
    except OSError:
        return False
    return True
