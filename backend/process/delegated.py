"""The user that may make cgroups below a cgroup: the owner of its directory (cgroup-v2.rst, "Delegation")."""

from __future__ import annotations

import os

from backend.process import procfs
from backend.process.identity import ROOT, Slice

HIERARCHIES = ("cgroup2", "name=systemd")
"""The hierarchies that slices belong to: cgroup2, or systemd's own beside it on a hybrid host (``cgroup_of`` in
:mod:`backend.process.identity`).
"""


def delegate_of(cgroup: Slice) -> int:
    """Return the owner of a cgroup's directory or, where that is gone, of the nearest one above; root where
    there is none.
    """
    trees = [tree for tree in map(procfs.trees.of, HIERARCHIES) if tree is not None]
    level: Slice | None = cgroup
    while level is not None and level != ROOT:
        for place in (next(procfs.levels(tree, level.path), None) for tree in trees):
            if place is not None:
                try:
                    return os.stat(place, follow_symlinks=False).st_uid
                except OSError:
                    pass
        level = level.parent
    return 0
