"""Facts about a mounted tree that a program needs before it connects."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from backend.process import procfs


def facts_of(mount: str | os.PathLike[str]) -> dict[str, str]:
    """Return the keys and values of a tree's ``ggroup.backend``. Raises FileNotFoundError where there is no tree."""
    try:
        content = procfs.content(Path(mount, "ggroup.backend"))
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no ggroup tree is mounted there", os.fspath(mount)) from error
    facts = {}
    for line in map(os.fsdecode, procfs.lines(content)):
        key, _, value = line.partition(" ")
        facts[key] = value
    return facts


def pid_namespace() -> int:
    """Return the inode number of this process's pid namespace (namespaces(7)); 0 where it cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
