"""The identity of processes, slices and groups.

A pid is a name, not an identity: Linux recycles it. A :class:`Process` is the pid *and* the clock tick at which it
started (field 22 of ``/proc/<pid>/stat``), so a recycled pid inherits nothing. A group is a process, or a slice of
the cgroup tree, on one GPU.
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
    """One process, alive or dead, which never compares equal to another one."""

    pid: int
    """Thread group id, in the pid namespace of the daemon."""

    start: int
    """Start time in clock ticks since boot (proc_pid_stat(5), ``starttime``)."""


@attrs.frozen(cache_hash=True)
class Slice:
    """A cgroup, known only by its path; it need not exist yet."""

    path: str
    """Absolute path in the cgroup2 tree: ``/`` for the root, and no trailing slash otherwise."""

    @property
    def parent(self) -> Slice | None:
        """The cgroup above, or None for the root."""
        if self.path == ROOT_PATH:
            return None
        return Slice(self.path.rpartition("/")[0] or ROOT_PATH)

    def contains(self, other: Slice) -> bool:
        """Return whether `other` is this cgroup or lies below it."""
        if self.path == ROOT_PATH:
            return True
        return other.path == self.path or other.path.startswith(self.path + "/")


ROOT = Slice(ROOT_PATH)

Node = Process | Slice


@attrs.frozen(cache_hash=True)
class Member:
    """A process on one GPU."""

    process: Process
    """The process itself."""

    gpu: int
    """Index of the GPU, as NVML numbers them."""

    @property
    def node(self) -> Process:
        """The process; the counterpart of a slice's node."""
        return self.process


@attrs.frozen(cache_hash=True)
class SliceOn:
    """A slice on one GPU. ``SliceOn(ROOT, n)`` is the GPU itself."""

    slice: Slice
    """The slice itself."""

    gpu: int
    """Index of the GPU, as NVML numbers them."""

    @property
    def node(self) -> Slice:
        """The slice; the counterpart of a process's node."""
        return self.slice


Group = Member | SliceOn
"""The unit of accounting. Both kinds have `gpu` and `node`; code that acts on one kind names that kind."""


def group_on(node: Node, gpu: int) -> Group:
    """Return the group of a node on a GPU, for a node whose kind is not known, as those of a journal or the
    kernel module.
    """
    return Member(node, gpu) if isinstance(node, Process) else SliceOn(node, gpu)


def start_time(pid: int) -> int:
    """Return the start time of `pid` in clock ticks since boot. Raises ProcessLookupError when there is no such
    process.

    In some kernels a process can keep a reader of its start time waiting for as long as it likes. So this is for
    programs that no other program waits for. The daemon asks through :mod:`backend.process.looks`, which says why.
    """
    return started(procfs.stat(pid))


def started(stat: procfs.Stat) -> int:
    """Return the start time of a live process from its stat. Raises ProcessLookupError for one that has ended."""
    if stat.has_ended:
        raise fail(errno.ESRCH)
    return stat.start


def tgid_of(tid: int) -> int:
    """Return the process that thread `tid` belongs to. Raises ProcessLookupError when it is gone."""
    return procfs.tgid(tid)


def identify(pid: int) -> Process:
    """Return the live process that has `pid` now. Raises ProcessLookupError when there is none, or `pid` is not a
    thread group id. Waits as :func:`start_time` does.
    """
    start = start_time(pid)
    if tgid_of(pid) != pid:
        raise fail(errno.ESRCH)
    return Process(pid, start)


def is_alive(process: Process) -> bool:
    """Return whether that very process, not a later one with its pid, still runs. Waits as :func:`start_time` does."""
    try:
        return start_time(process.pid) == process.start
    except ProcessLookupError:
        return False


def is_borne(pid: int) -> bool:
    """Return whether some live process has that pid, which may be another one than was meant. Does not wait for any
    process. Raises OSError where this process lacks a resource.
    """
    try:
        return not procfs.status(pid).has_ended
    except ProcessLookupError:
        return False


def has_exited(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended (pidfd_open(2)). Does not wait for any process."""
    exited = select.poll()
    exited.register(pidfd, select.POLLIN)
    return bool(exited.poll(0))


def is_hidden(pid: int) -> bool:
    """Return whether there is such a process, but /proc hides it from this user (``hidepid``, proc(5))."""
    try:
        procfs.status(pid)
    except PermissionError:
        return True
    except ProcessLookupError:
        try:
            os.kill(pid, 0)  # asks the process itself, not /proc
        except PermissionError:
            return True
        except ProcessLookupError:
            return False
        return True
    return False


def owner_of(pid: int) -> int | None:
    """Return the user that a process runs as: root for one that may not be looked into, None when it is gone."""
    try:
        return os.stat(f"{procfs.PROC}/{pid}").st_uid
    except OSError:
        return None


REMOVED = " (deleted)"
"""Suffix of the path of a removed cgroup, in which nothing can run; a user may also name a cgroup so."""


def cgroup_of(pid: int) -> Slice:
    """Return the cgroup of `pid` (cgroups(7), ``/proc/<pid>/cgroup``). Raises ProcessLookupError when it is gone.

    The cgroup2 line ``0::`` decides. On a hybrid host systemd's own v1 hierarchy, ``name=systemd``, is the fallback
    while the cgroup2 tree is unused (everything in its root).
    """
    return _slice_of(_told_cgroups(pid))


@functools.lru_cache(maxsize=1024)
def _slice_of(told: bytes) -> Slice:
    """Return the slice in the kernel's text about a process. The text is cached, since few processes
    are ever moved.
    """
    fallback = ROOT
    for one in procfs.parse_cgroups(told):
        slice_ = slice_at(one.path)
        if one.hierarchy == 0 and slice_ is not None and slice_ != ROOT:
            return slice_
        if one.controllers == b"name=systemd" and slice_ is not None:
            fallback = slice_
    return fallback


def memberships(pid: int) -> Sequence[procfs.Membership]:
    """Return the position of `pid` in each hierarchy. Raises ProcessLookupError when it is gone, or ends in a
    removed cgroup.
    """
    return procfs.parse_cgroups(_told_cgroups(pid))


def _told_cgroups(pid: int) -> bytes:
    """Return the kernel's text about the cgroups of a process.

    A thread that ends keeps its old cgroup in that text. So if the main thread has ended, as in a program that goes
    on without it, another thread speaks for the process: the first one found alive after it was asked.
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
    """Return the slice of a cgroup path, or None for one outside our view (``/../other``, cgroup_namespaces(7))."""
    parts = [part for part in path.split("/") if part]
    if any(part in (".", "..") for part in parts):
        return None
    return Slice("/" + "/".join(parts))
