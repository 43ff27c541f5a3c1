"""The bounds of a cell: the time that it may take, and the end of what it leaves behind.

A cell starts daemons and programs, and a session has few minutes of a GPU: none of them may hang it, or stay on the GPU
beside the next cell. A cell that takes too long is broken off. What it has started and not ended is ended by its pid,
also where its parent is gone (PR_SET_CHILD_SUBREAPER), and waited for; mounts and pages that it left are removed. All
of that is told, and becomes a finding beside the cell's figures.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from backend.process import procfs

PR_SET_CHILD_SUBREAPER = 36
"""prctl(2)."""
MNT_DETACH = 2
"""umount(2)."""
AGAIN_S = 40.0
"""Seconds between two interruptions of a cell that is over its time: its programs have so long to end."""
TERM_S, KILL_S = 10.0, 10.0
"""Seconds that a process has to end after SIGTERM, and after SIGKILL."""
LOOK_S = 0.05
PAGES = Path("/dev/shm")
PAGE = "ggroupfs-t7-"
"""Where pages of programs are, and how their names begin (tests/t7_nvidia/programs.py)."""
TREE = "fuse.ggroupfs"
"""Type of a mounted tree."""

_libc = ctypes.CDLL(None, use_errno=True)


class Overdue(BaseException):
    """A cell took longer than it may. Not an Exception: what ends programs on the way out ignores those."""


Key = tuple[int, int]
"""Pid and start time."""


def adopt() -> None:
    """Become the parent of processes whose own parents end before them. OSError."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def descendants() -> dict[Key, str]:
    """Processes below this one, and their names; without those that have ended and wait for their parent."""
    parents: dict[int, list[tuple[Key, str, str]]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                head, _, rest = Path(f"/proc/{entry}/stat").read_text(errors="replace").rpartition(")")
                state, parent, *fields = rest.split()
                one = (int(entry), int(fields[17])), head.partition("(")[2], state
                parents.setdefault(int(parent), []).append(one)
    found: dict[Key, str] = {}
    below = [os.getpid()]
    while below:
        for key, name, state in parents.get(below.pop(), ()):
            below.append(key[0])
            if state not in "ZX":
                found[key] = name
    return found


def end(those: Mapping[Key, str]) -> list[str]:
    """End processes by pid and wait for them: SIGTERM first, so that daemons unmount and clients of MPS leave. Tells
    which were there, and how each ended."""
    told: dict[Key, str] = {}
    left = dict(those)
    for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        left = {key: name for key, name in left.items() if key in descendants()}
        for key, name in left.items():
            told[key] = f"{name} ({key[0]}) outlived its cell: ended by {number.name}"
            with contextlib.suppress(ProcessLookupError):
                os.kill(key[0], number)
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(key in descendants() for key in left):
            time.sleep(LOOK_S)
    still = descendants()
    for key, name in those.items():
        if key in still:
            told[key] = f"{name} ({key[0]}) is still there after SIGKILL"
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(key[0], os.WNOHANG)
    return list(told.values())


def trees() -> set[str]:
    """Mountpoints of trees."""
    return {mount.point for mount in procfs.mounts() if mount.type == TREE}


def pages() -> set[Path]:
    """Pages of this process's programs."""
    return set(PAGES.glob(f"{PAGE}{os.getpid()}-*"))


@contextlib.contextmanager
def swept() -> Iterator[list[str]]:
    """What is begun while it is entered is ended and removed at its end, and told in the list."""
    told: list[str] = []
    processes, mounts, files = descendants(), trees(), pages()
    try:
        yield told
    finally:
        told += end({key: name for key, name in descendants().items() if key not in processes})
        for point in sorted(trees() - mounts):
            told.append(f"{point} was still mounted")
            _libc.umount2(os.fsencode(point), MNT_DETACH)
            with contextlib.suppress(OSError):
                os.rmdir(point)
        for path in pages() - files:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def timed(seconds: float) -> Iterator[None]:
    """Overdue after so many seconds; again each AGAIN_S after that, all processes below this one killed before: what is
    waited for then ends. For the main thread."""
    count, mine = 0, descendants()

    def over(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 1:
            for pid, _ in descendants().keys() - mine.keys():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        raise Overdue(f"not over after {seconds:.0f} s")

    handler, begun = signal.signal(signal.SIGALRM, over), time.monotonic()
    delay, interval = signal.setitimer(signal.ITIMER_REAL, max(0.001, seconds), AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if delay:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, delay - (time.monotonic() - begun)), interval)


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[list[str]]:
    """Both: what a cell is measured in. Overdue where it takes longer, once all that it left has been ended."""
    with swept() as told, timed(seconds):
        yield told


def on_terminate() -> None:
    """Have SIGTERM end this process as an error does, with what it has started."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
