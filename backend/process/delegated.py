"""Who may make cgroups below a cgroup: the owner of its directory (cgroup-v2.rst, "Delegation")."""

from __future__ import annotations

import os

from backend.process import procfs
from backend.process.identity import ROOT, Slice

HIERARCHIES = ("cgroup2", "name=systemd")
"""Those that slices are of: cgroup2, or systemd's own beside it on a hybrid host (``cgroup_of`` in
:mod:`backend.process.identity`)."""


def delegate_of(cgroup: Slice) -> int:
    """The user whose a cgroup is, by its directory or, where that has gone, the nearest above; root where none is."""
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
