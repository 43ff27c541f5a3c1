"""Room that the host has left for GPU memory: on the machine, and in the memory cgroups of a process.

A checkpoint puts GPU memory into the process's own host memory, which is charged to its memory cgroup. At the limit of
that cgroup the OOM killer ends the process in the middle of the checkpoint. So a caller that wants a checkpoint asks
here first. What the library moves out is pinned by the driver, and charged to no cgroup (:mod:`backend.cuda.grants`).
"""

from __future__ import annotations

from pathlib import Path

from backend.core.records import MAX
from backend.process import procfs
from backend.process.identity import ROOT_PATH, Process, Slice, cgroup_of

LIMITS = ("memory.max", "memory.high")
"""Limits of a memory cgroup. Over the first, a process is killed; over the second, it is slowed down to a crawl while
it is locked (cgroup-v2.rst).
"""
GIVEN = (b"inactive_file",)
"""Keys of memory.stat for memory that is counted, and that the kernel gives back unnoticed."""


def host_room(process: Process, root: Path = Path("/")) -> int:
    """Return the bytes that a process may have in addition: what the machine has available, or what the tightest cgroup
    of its path has left; 0 if nothing is left. ProcessLookupError when the process is gone.
    """
    room = min([available(root), *(left(slice_, root) for slice_ in path_of(process))])
    return max(0, room)


def path_of(process: Process) -> list[Slice]:
    """Return the cgroup of a process and those above it, without the root. ProcessLookupError when the process is
    gone.
    """
    slice_: Slice | None = cgroup_of(process.pid)
    path = []
    while slice_ is not None and slice_.path != ROOT_PATH:
        path.append(slice_)
        slice_ = slice_.parent
    return path


def left(slice_: Slice, root: Path = Path("/")) -> int:
    """Return the bytes that one cgroup has left, negative if it is over its limits; MAX for a cgroup without the memory
    controller or without limits.
    """
    cgroup = root / "sys/fs/cgroup" / slice_.path.lstrip("/")
    limits = [limit for name in LIMITS if (limit := _number(cgroup / name)) is not None]
    current = _number(cgroup / "memory.current")
    if not limits or current is None:
        return MAX
    return min(limits) - current + _given(cgroup / "memory.stat")


def _number(file: Path) -> int | None:
    """Return the number in a file; None for ``max``, and if there is no such file."""
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


def available(root: Path = Path("/")) -> int:
    """Return MemAvailable (proc_meminfo(5)), bytes: memory that is free, or can be made free without swapping."""
    return int(procfs.keyed(procfs.content(root / "proc/meminfo")).get(b"MemAvailable", 0)) * 1024
