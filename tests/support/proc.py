"""What the kernel tells of any process, in /proc (proc(5))."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

WITHOUT_MAIN_THREAD = (
    "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    "ctypes.CDLL(None).syscall(60, 0)"  # exit, of one thread
)
"""A Python program that outlives its main thread."""


def stat_of(pid: int) -> Sequence[str]:
    """The fields of ``/proc/<pid>/stat`` from the third on: the state. OSError when it is gone."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def child_of(pid: int) -> int:
    """The one child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def children_of(pid: int, words: bytes) -> Sequence[int]:
    """The children of a process with those words in their command line. One that goes meanwhile is none."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if words in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found
