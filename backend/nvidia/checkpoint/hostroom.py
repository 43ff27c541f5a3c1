"""Compute the room that the host has for the GPU memory of one process.

A checkpoint puts that memory into the process's own host memory, charged to its memory cgroup. If it exceeds the
limit, the OOM killer ends the process in the middle of the checkpoint. So the room is checked before each checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from backend.core.records import MAX
from backend.process import procfs
from backend.process.identity import ROOT_PATH, Process, cgroup_of

LIMITS = ("memory.max", "memory.high")
"""Limits of a memory cgroup. Above the first, a process is killed; above the second, it is slowed down to a crawl
while it is locked (cgroup-v2.rst).
"""
GIVEN = (b"inactive_file",)
"""Keys of memory.stat: memory that is counted, and can be reclaimed without any process noticing."""


def host_room(process: Process, root: Path = Path("/")) -> int:
    """Return the additional bytes that a process may have in the host: the smallest of what the machine has
    available and what each cgroup of its path has left; 0 if there are none. Raises ProcessLookupError when the
    process is gone.
    """
    room = _available(root / "proc/meminfo")
    mount = root / "sys/fs/cgroup"
    slice_ = cgroup_of(process.pid)
    while slice_.path != ROOT_PATH:
        room = min(room, _left(mount / slice_.path.lstrip("/")))
        above = slice_.parent
        assert above is not None, "only the root has none"
        slice_ = above
    return max(0, room)


def _left(cgroup: Path) -> int:
    """Return the bytes that one cgroup has left; MAX for a cgroup without the memory controller, or
    without limits.
    """
    limits = [limit for name in LIMITS if (limit := _number(cgroup / name)) is not None]
    current = _number(cgroup / "memory.current")
    if not limits or current is None:
        return MAX
    return min(limits) - current + _given(cgroup / "memory.stat")


def _number(file: Path) -> int | None:
    """Return the number in a file; None for ``max``, and where there is no such file."""
    try:
        text = procfs.text(file)
    except OSError:
        return None
    return None if text == "max" else int(text)


def _given(file: Path) -> int:
    try:
        stat = procfs.keyed(procfs.content(file))
    except OSError:
        return 0
    return sum(int(stat.get(key, 0)) for key in GIVEN)


def _available(file: Path) -> int:
    """Return MemAvailable (proc_meminfo(5)) in bytes: memory that is free, or can be freed without swapping."""
    return int(procfs.keyed(procfs.content(file)).get(b"MemAvailable", 0)) * 1024
