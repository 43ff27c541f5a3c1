"""Whether a process runs: stopped by a signal or a debugger, frozen with its cgroup, or on its way out.

Who it is, and whether it is still that one, is :mod:`backend.process.identity`.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

from backend.process import procfs
from backend.process.identity import memberships

LEVELS = 32
"""Cgroups above a process that are looked at. One that is deeper counts as frozen once all of its cgroup is."""


def is_ending(pid: int) -> bool:
    """Whether no thread of it comes back from the kernel: it runs no more, and its files are closed, or about to be.
    That may take seconds where there is a GPU's memory to give back, and it is no zombie before."""
    ending: set[int] = set()
    while threads := set(procfs.threads(pid)) - ending:  # one that was not may have made others before it was
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
    """Whether it does nothing that it is asked to, until somebody lets it go on."""
    return is_signalled(pid) or is_frozen(pid)


def is_signalled(pid: int) -> bool:
    """Whether it is stopped by a signal or a debugger."""
    try:
        status = procfs.status(pid, pid)
        if status.is_exiting:  # it may go on without its main thread
            others = (procfs.status(pid, tid) for tid in procfs.threads(pid))
            status = next((other for other in others if not other.is_exiting), status)
        return status.state in (b"T", b"t")
    except OSError:
        return False


def is_frozen(pid: int) -> bool:
    """Whether its cgroup is frozen, or one above that (``docker pause``, ``systemctl freeze``), or is about to be: no
    thread of it comes back to its program then."""
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
    """freezer-subsystem.rst: the state of a cgroup says what those above it add, too."""
    tree = procfs.trees.of("freezer")
    level = next(procfs.levels(tree, path), "") if tree is not None else ""
    return procfs.says(level, "freezer.state") in (b"FREEZING", b"FROZEN")
