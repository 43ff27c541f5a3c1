"""What a program finds out about a mounted tree before it connects to it."""

from __future__ import annotations

import os
from pathlib import Path

from backend.process import procfs


def facts_of(mount: str | os.PathLike[str]) -> dict[str, str]:
    """What its ``ggroup.backend`` says. FileNotFoundError where there is no tree."""
    facts = {}
    for line in map(os.fsdecode, procfs.lines(procfs.content(Path(mount, "ggroup.backend")))):
        key, _, value = line.partition(" ")
        facts[key] = value
    return facts


def pid_namespace() -> int:
    """The pid namespace of this process, by the number of its inode (namespaces(7)); 0 where it cannot be told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
