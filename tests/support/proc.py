"""Readers of /proc (proc(5)) that work for any process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

WITHOUT_MAIN_THREAD = (
    "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); "
    "ctypes.CDLL(None).syscall(60, 0)"  # exit(2), which ends one thread
)
"""Words that start a Python program that outlives its main thread."""


def stat_of(pid: int) -> Sequence[str]:
    """Return the fields of ``/proc/<pid>/stat`` from the third, the state, on. OSError when the process is gone."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()


def child_of(pid: int) -> int:
    """Return the only child of a process."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def children_of(pid: int, words: bytes) -> Sequence[int]:
    """Return the children of a process with those words in their command line, without those that end meanwhile."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if words in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found
