"""Find out whether a process runs: it may be stopped by a signal or a debugger, frozen with its cgroup, or ending.

Whether it is still the same process is the subject of :mod:`backend.process.identity`.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from backend.process import procfs
from backend.process.identity import memberships

LEVELS = 32
"""Levels of cgroups above a process that are looked at. A deeper process counts as frozen once all of
its cgroup is.
"""


def is_ending(pid: int) -> bool:
    """Return whether no thread of a process returns from the kernel: it runs no more, and its files are closed, or
    about to be. That may take seconds if there is GPU memory to free, before it becomes a zombie.
    """
    ending: set[int] = set()
    while threads := set(procfs.threads(pid)) - ending:  # a thread may have made others before it began to end
        if not all(map(partial(_is_thread_ending, pid), threads)):
            return False
        ending |= threads
    return True


def _is_thread_ending(pid: int, tid: int) -> bool:
    try:
        return procfs.status(pid, tid).is_exiting
    except ProcessLookupError:
        return True


def is_stopped(pid: int) -> bool:
    """Return whether a process does nothing that it is asked to, until it is let go on."""
    return is_signalled(pid) or is_frozen(pid)


def is_signalled(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger."""
    try:
        status = procfs.status(pid, pid)
        if status.is_exiting:  # the process may go on without its main thread
            others = (procfs.status(pid, tid) for tid in procfs.threads(pid))
            status = next((other for other in others if not other.is_exiting), status)
        return status.state in (b"T", b"t")
    except OSError:
        return False


def is_frozen(pid: int) -> bool:
    """Return whether the cgroup of a process, or one above it, is frozen (``docker pause``, ``systemctl freeze``) or
    about to be: then no thread of the process returns to its program.
    """
    try:
        found = memberships(pid)
    except OSError:
        return False
    for one in found:
        if one.hierarchy == 0 and _is_frozen2(one.path):
            return True
        if b"freezer" in one.controllers.split(b",") and _is_frozen1(one.path):
            return True
    return False


def _is_frozen2(path: str) -> bool:
    tree = procfs.trees.of("cgroup2")
    if tree is None:
        return False
    for count, level in enumerate(islice(procfs.levels(tree, path), LEVELS)):
        if procfs.says(level, "cgroup.freeze") == b"1":
            return True
        if not count and procfs.keyed(procfs.says(level, "cgroup.events")).get(b"frozen") == b"1":
            return True
    return False


def _is_frozen1(path: str) -> bool:
    """Return whether a cgroup of v1 is frozen. Its state includes that of the cgroups above it
    (freezer-subsystem.rst).
    """
    tree = procfs.trees.of("freezer")
    level = next(procfs.levels(tree, path), "") if tree is not None else ""
    return procfs.says(level, "freezer.state") in (b"FREEZING", b"FROZEN")
