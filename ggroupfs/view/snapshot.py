"""Takes a snapshot of a mounted tree in one pass: its GPUs, slices and processes, with the figures asked for."""

from __future__ import annotations

import contextlib
import functools
import pwd
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

from backend.process.identity import cgroup_of, is_hidden, owner_of
from ggroupfs.client import Member, branches, content, flat, has_our_pids, members, numbers, require_tree
from ggroupfs.text.names import slice_directory
from ggroupfs.view.commandlines import CommandLines
from ggroupfs.view.figures import EVERYTHING, Figures, figures_of, files_for

NOT_KNOWN = "?"


@attrs.frozen
class GpuUse:
    """A GPU."""

    index: int
    """Index of the GPU."""
    uuid: str
    """Stable name."""
    name: str
    """Product name."""
    capacity: int
    """Memory, bytes."""
    current: int
    """Memory held by its processes, bytes."""
    present: bool = True
    """Whether the GPU is present, and not lost."""

    @property
    def directory(self) -> str:
        """Directory, relative to the mountpoint."""
        return f"gpus/{self.index}"


@attrs.frozen
class SliceUse:
    """A slice on a GPU."""

    path: str
    """Path of the cgroup, ``/batch.slice``."""
    gpu: int
    """Index of the GPU."""
    figures: Figures
    """Figures from its control files."""

    @property
    def directory(self) -> str:
        """Directory of its control files, relative to the mountpoint."""
        return f"{slice_directory(self.path)}/{self.gpu}"


@attrs.frozen
class ProcessUse:
    """A process on a GPU."""

    pid: int
    """Process id."""
    inode: int
    """Inode of its directory. Inodes are never reused, so this distinguishes processes with a recycled pid."""
    command: str
    """Name of the program; `NOT_KNOWN` in another pid namespace than the daemon's, where the pids mean other
    processes."""
    slice: str
    """Path of its cgroup; `NOT_KNOWN` as above."""
    gpu: int
    """Index of the GPU."""
    figures: Figures
    """Figures from its control files."""
    at: float = 0.0
    """time.monotonic() when the figures were read, as a pass takes time."""
    user: str = ""
    """Name of its user, or the uid if it has no name; empty if unknown."""

    @property
    def directory(self) -> str:
        """Directory of its control files, relative to the mountpoint."""
        return f"{self.pid}/{self.gpu}"


@attrs.frozen
class Snapshot:
    """A tree at one time, or rather during one pass."""

    at: float
    """time.monotonic() in the middle of the pass."""
    took: float
    """Duration of the pass, seconds."""
    gpus: tuple[GpuUse, ...] = ()
    """GPUs, by index."""
    slices: tuple[SliceUse, ...] = ()
    """Slices, each after its parent; empty if they were not asked for."""
    processes: tuple[ProcessUse, ...] = ()
    """Processes, by pid and GPU."""
    hidden: int = 0
    """Number of further processes that /proc hides from this user."""


def take(
    mount: Path,
    fields: Iterable[str] = EVERYTHING,
    *,
    slices: bool = True,
    users: bool = False,
    commands: CommandLines | None = None,
) -> Snapshot:
    """Read the tree once, with the users and the full command lines of processes if asked for.

    A process that exits during the pass is left out. FileNotFoundError if there is no tree.
    """
    require_tree(mount)
    files = files_for(fields)
    began = time.monotonic()
    gpus = tuple(_gpu(mount, index) for index in numbers(mount / "gpus"))
    found_slices = tuple(_slices(mount, files)) if slices else ()
    hidden: set[int] = set()
    processes = tuple(_processes(mount, files, hidden))
    if users:
        processes = tuple(attrs.evolve(process, user=_user(process)) for process in processes)
    if commands is not None:
        known = [process for process in processes if process.command != NOT_KNOWN]
        full = commands.read(dict.fromkeys((process.pid, process.inode) for process in known))
        processes = tuple(
            attrs.evolve(process, command=full.get((process.pid, process.inode), process.command))
            for process in processes
        )
    took = time.monotonic() - began
    return Snapshot(began + took / 2, took, gpus, found_slices, processes, len(hidden))


def _gpu(mount: Path, index: int) -> GpuUse:
    path = f"{mount}/gpus/{index}"
    return GpuUse(
        index,
        content(f"{path}/uuid"),
        content(f"{path}/name"),
        int(content(f"{path}/gmem.capacity")),
        int(content(f"{path}/gmem.current")),
        flat(content(f"{path}/gpu.events"))["present"] == 1,
    )


def _slices(mount: Path, files: Iterable[str]) -> Iterator[SliceUse]:
    for branch in branches(mount):
        with contextlib.suppress(OSError):  # gone since
            yield SliceUse(branch.slice, branch.gpu, figures_of(branch.path, files))


def _processes(mount: Path, files: Iterable[str], hidden: set[int]) -> Iterator[ProcessUse]:
    """Yield the processes that /proc shows; the pids of hidden ones are added to `hidden`."""
    describe = _identity if has_our_pids(mount) else _stranger
    for member in members(mount):
        pid = member.pid
        try:
            began = time.monotonic()
            figures = figures_of(member.path, files)
            at = (began + time.monotonic()) / 2
            yield ProcessUse(pid, *describe(member), member.gpu, figures, at)
        except OSError:  # it exited during the read
            if describe is _identity and is_hidden(pid):
                hidden.add(pid)


def _identity(member: Member) -> tuple[int, str, str]:
    """Return directory inode, command and slice of a process, reading nothing for which the process could make it wait.

    See :mod:`backend.process.looks`.
    """
    return member.path.parent.stat().st_ino, member.command(), cgroup_of(member.pid).path


def _user(process: ProcessUse) -> str:
    """Return the user of a process of this pid namespace; root for one that may not be inspected (proc_pid(5))."""
    uid = owner_of(process.pid) if process.slice != NOT_KNOWN else None
    return "" if uid is None else _user_name(uid)


@functools.cache
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _stranger(member: Member) -> tuple[int, str, str]:
    """Return the same for a process of another pid namespace, which has another pid here, or none."""
    return member.path.parent.stat().st_ino, NOT_KNOWN, NOT_KNOWN
