"""What the host has left for the GPU memory of one process.

A checkpoint puts that into the process's own host memory, charged to its memory cgroup, whose limit ends the process
with the OOM killer in the middle of it. So a caller that wants one asks first.
"""

from __future__ import annotations

from pathlib import Path

from backend.core.records import MAX
from backend.process import procfs
from backend.process.identity import ROOT_PATH, Process, cgroup_of

LIMITS = ("memory.max", "memory.high")
"""Over the first it is killed, over the second slowed down to a crawl while it is locked (cgroup-v2.rst)."""
GIVEN = (b"inactive_file",)
"""Of memory.stat: counted, and given back without a process noticing."""


def host_room(process: Process, root: Path = Path("/")) -> int:
    """Bytes that this process may have in addition: what the machine has available, or the tightest cgroup of its path
    has left. 0 when nothing is. ProcessLookupError when the process is gone."""
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
    """What one cgroup has left; MAX for one without the memory controller, or without limits."""
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


def _available(file: Path) -> int:
    """MemAvailable (proc_meminfo(5)): free, and what can be made free without swapping."""
    return int(procfs.keyed(procfs.content(file)).get(b"MemAvailable", 0)) * 1024
