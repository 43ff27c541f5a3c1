"""What the host has left for GPU memory: the machine, and the memory cgroups of a process.

A checkpoint puts that into the process's own host memory, charged to its memory cgroup, whose limit ends the process
with the OOM killer in the middle of it. So what wants one asks first. What the library moves out is pinned by the
driver, and charged to no cgroup (:mod:`backend.cuda.grants`).
"""

from __future__ import annotations

from pathlib import Path

from backend.core.records import MAX
from backend.process import procfs
from backend.process.identity import ROOT_PATH, Process, Slice, cgroup_of

LIMITS = ("memory.max", "memory.high")
"""Over the first it is killed, over the second slowed down to a crawl while it is locked (cgroup-v2.rst)."""
GIVEN = (b"inactive_file",)
"""Of memory.stat: counted, and given back unnoticed."""


def host_room(process: Process, root: Path = Path("/")) -> int:
    """Bytes that this process may have in addition: what the machine has available, or the tightest cgroup of its path
    has left. 0 when nothing is. ProcessLookupError when the process is gone."""
    room = min([available(root), *(left(slice_, root) for slice_ in path_of(process))])
    return max(0, room)


def path_of(process: Process) -> list[Slice]:
    """The cgroup of a process and those above it, but for the root. ProcessLookupError when it is gone."""
    slice_: Slice | None = cgroup_of(process.pid)
    path = []
    while slice_ is not None and slice_.path != ROOT_PATH:
        path.append(slice_)
        slice_ = slice_.parent
    return path


def left(slice_: Slice, root: Path = Path("/")) -> int:
    """Bytes that one cgroup has left, less than 0 where it is over its limits; MAX for one without the memory
    controller, or without limits."""
    cgroup = root / "sys/fs/cgroup" / slice_.path.lstrip("/")
    limits = [limit for name in LIMITS if (limit := _number(cgroup / name)) is not None]
    current = _number(cgroup / "memory.current")
    if not limits or current is None:
        return MAX
    return min(limits) - current + _given(cgroup / "memory.stat")


def _number(file: Path) -> int | None:
    """None for ``max``, and where there is no such file."""
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
    """MemAvailable (proc_meminfo(5)), bytes: free, and what can be made free without swapping."""
    return int(procfs.keyed(procfs.content(root / "proc/meminfo")).get(b"MemAvailable", 0)) * 1024
