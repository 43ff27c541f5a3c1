"""Whose pid it is, and what a group is: a process, or a slice of the cgroup tree, on one GPU.

A pid is a name, not an identity: Linux recycles it. A :class:`Process` is the pid *and* the clock
tick at which it started (field 22 of ``/proc/<pid>/stat``), so a recycled pid inherits nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
from collections.abc import Sequence

import attrs

from backend.common.errors import fail
from backend.process import procfs

ROOT_PATH = "/"


@attrs.frozen(cache_hash=True)
class Process:
    """One process, alive or dead, that never compares equal to another one."""

    pid: int
    """Thread group id, in the pid namespace of the daemon."""

    start: int
    """Start time in clock ticks since boot (proc_pid_stat(5), ``starttime``)."""


@attrs.frozen(cache_hash=True)
class Slice:
    """A cgroup, known by its path and nothing else: it need not exist yet."""

    path: str
    """Absolute path in the cgroup2 tree, ``/`` for the root, never a trailing slash."""

    @property
    def parent(self) -> Slice | None:
        """The cgroup above, or None for the root."""
        if self.path == ROOT_PATH:
            return None
        return Slice(self.path.rpartition("/")[0] or ROOT_PATH)

    def contains(self, other: Slice) -> bool:
        """Whether `other` is this cgroup or lies below it."""
        if self.path == ROOT_PATH:
            return True
        return other.path == self.path or other.path.startswith(self.path + "/")


ROOT = Slice(ROOT_PATH)

Node = Process | Slice


@attrs.frozen(cache_hash=True)
class Member:
    """A process on one GPU."""

    process: Process
    """The process."""

    gpu: int
    """Index of the GPU, as NVML numbers them."""

    @property
    def node(self) -> Process:
        """The process: what a member has in the place of a slice."""
        return self.process


@attrs.frozen(cache_hash=True)
class SliceOn:
    """A slice on one GPU. ``SliceOn(ROOT, n)`` is the GPU itself."""

    slice: Slice
    """The slice."""

    gpu: int
    """Index of the GPU, as NVML numbers them."""

    @property
    def node(self) -> Slice:
        """The slice: what it has in the place of a process."""
        return self.slice


Group = Member | SliceOn
"""The unit of accounting. What both have is `gpu` and `node`; what acts on one of them says which."""


def group_on(node: Node, gpu: int) -> Group:
    """The group of a node that is known by name only, as those of a journal or of the kernel module are."""
    return Member(node, gpu) if isinstance(node, Process) else SliceOn(node, gpu)


def start_time(pid: int) -> int:
    """Start time of `pid` in clock ticks since boot; ProcessLookupError when there is no such process.

    A process can have a reader of that wait for as long as it likes, in some kernels. So it is for programs that
    no other program waits for; for those of the daemon it is asked by :mod:`backend.process.looks`, which says why.
    """
    return started(procfs.stat(pid))


def started(stat: procfs.Stat) -> int:
    """Of a process that lives, by what is said of it. ProcessLookupError for another."""
    if stat.has_ended:
        raise fail(errno.ESRCH)
    return stat.start


def tgid_of(tid: int) -> int:
    """The process that thread `tid` belongs to; ProcessLookupError when it is gone."""
    return procfs.tgid(tid)


def identify(pid: int) -> Process:
    """The live process that now bears `pid`, which must be a thread group id; ProcessLookupError otherwise. Waits as
    :func:`start_time` does."""
    start = start_time(pid)
    if tgid_of(pid) != pid:
        raise fail(errno.ESRCH)
    return Process(pid, start)


def is_alive(process: Process) -> bool:
    """Whether that very process, not a later bearer of its pid, still runs. Waits as :func:`start_time` does."""
    try:
        return start_time(process.pid) == process.start
    except ProcessLookupError:
        return False


def is_borne(pid: int) -> bool:
    """Whether some process that lives bears that pid, be it another one than was meant. Waits for no process. OSError
    where something is short here."""
    try:
        return not procfs.status(pid).has_ended
    except ProcessLookupError:
        return False


def has_exited(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended (pidfd_open(2)). Waits for no process."""
    exited = select.poll()
    exited.register(pidfd, select.POLLIN)
    return bool(exited.poll(0))


def is_hidden(pid: int) -> bool:
    """Whether there is such a process, and /proc tells this user nothing of it (``hidepid``, proc(5))."""
    try:
        procfs.status(pid)
    except PermissionError:
        return True
    except ProcessLookupError:
        try:
            os.kill(pid, 0)  # which is asked of the process, and not of /proc
        except PermissionError:
            return True
        except ProcessLookupError:
            return False
        return True
    return False


def owner_of(pid: int) -> int | None:
    """The user that a process runs as; root for one that may not be looked into. None when it is gone."""
    try:
        return os.stat(f"{procfs.PROC}/{pid}").st_uid
    except OSError:
        return None


REMOVED = " (deleted)"
"""Ends the path of a cgroup that was removed, in which nothing that runs can be; and of one that a user calls so."""


def cgroup_of(pid: int) -> Slice:
    """The cgroup of `pid` (cgroups(7), ``/proc/<pid>/cgroup``); ProcessLookupError when it is gone.

    The cgroup2 line ``0::`` decides. On a hybrid host systemd's own v1 hierarchy, ``name=systemd``, is
    the fallback while the cgroup2 tree is unused (everything in its root).
    """
    return _slice_of(_told_cgroups(pid))


@functools.lru_cache(maxsize=1024)
def _slice_of(told: bytes) -> Slice:
    """The same of what is told of a process. Every process is looked at again and again, and few are ever moved."""
    fallback = ROOT
    for one in procfs.parse_cgroups(told):
        slice_ = slice_at(one.path)
        if one.hierarchy == 0 and slice_ is not None and slice_ != ROOT:
            return slice_
        if one.controllers == b"name=systemd" and slice_ is not None:
            fallback = slice_
    return fallback


def memberships(pid: int) -> Sequence[procfs.Membership]:
    """Where `pid` is in each hierarchy; ProcessLookupError when it is gone, or ends in a cgroup that is gone."""
    return procfs.parse_cgroups(_told_cgroups(pid))


def _told_cgroups(pid: int) -> bytes:
    """The same, as the kernel tells it.

    A thread that ends stays, in what is told of it, where it was. So where that is the main one, as in a program that
    goes on without it, another thread speaks for the process: the first one that is found to live after it was asked.
    """
    found = procfs.told_cgroups(pid)
    if not procfs.status(pid, pid).is_exiting:
        return found
    for tid in procfs.threads(pid):
        with contextlib.suppress(ProcessLookupError):
            others = procfs.told_cgroups(pid, tid)
            if not procfs.status(pid, tid).is_exiting:
                return others
    if any(one.path.endswith(REMOVED) for one in procfs.parse_cgroups(found)):
        raise fail(errno.ESRCH)
    return found


def slice_at(path: str) -> Slice | None:
    """The slice named by a cgroup path, or None for one outside our view (``/../other``, cgroup_namespaces(7))."""
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        return None
    return Slice("/" + "/".join(parts))
