"""Who may make cgroups below a cgroup: the owner of its directory (cgroup-v2.rst, "Delegation")."""

from __future__ import annotations

import os

from backend.identity import ROOT, Slice

HIERARCHIES = ("/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup")
"""Where systemd, and whoever else mounts them, has the hierarchy that slices are of: beside those of version 1 (on a
hybrid host: ``cgroup_of`` in :mod:`backend.identity`), or alone."""


def delegate_of(cgroup: Slice) -> int:
    """The user whose a cgroup is, by its directory or, where that has gone, the nearest above; root where none is."""
    level: Slice | None = cgroup
    while level is not None and level != ROOT:
        for hierarchy in HIERARCHIES:
            try:
                return os.stat(hierarchy + level.path, follow_symlinks=False).st_uid
            except OSError:
                pass
        level = level.parent
    return 0
