"""One pass over a mounted tree, into records: its GPUs, slices and processes, with the figures that were asked for."""

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
    """Its index."""
    uuid: str
    """Its stable name."""
    name: str
    """Product name."""
    capacity: int
    """Bytes of memory that it has."""
    current: int
    """Bytes that its processes have on it."""
    present: bool = True
    """Whether it is there, and not lost."""

    @property
    def directory(self) -> str:
        """Where it is, seen from the mountpoint."""
        return f"gpus/{self.index}"


@attrs.frozen
class SliceUse:
    """A slice on a GPU."""

    path: str
    """Path of the cgroup, ``/batch.slice``."""
    gpu: int
    """Index of the GPU."""
    figures: Figures
    """What its control files say."""

    @property
    def directory(self) -> str:
        """Where its control files are, seen from the mountpoint."""
        return f"{slice_directory(self.path)}/{self.gpu}"


@attrs.frozen
class ProcessUse:
    """A process on a GPU."""

    pid: int
    """Process id."""
    inode: int
    """That of its directory: another process with the same pid has another one, and no number comes again."""
    command: str
    """Name of the program; `NOT_KNOWN` in another pid namespace than the daemon's, where others have those pids."""
    slice: str
    """Path of its cgroup; `NOT_KNOWN` likewise."""
    gpu: int
    """Index of the GPU."""
    figures: Figures
    """What its control files say."""
    at: float = 0.0
    """time.monotonic() when they were read: a pass takes its time."""
    user: str = ""
    """Name of the user that it runs as, or its number where it has none; empty where that is not known."""

    @property
    def directory(self) -> str:
        """Where its control files are, seen from the mountpoint."""
        return f"{self.pid}/{self.gpu}"


@attrs.frozen
class Snapshot:
    """A tree at one moment, or rather during one pass."""

    at: float
    """time.monotonic() in the middle of the pass."""
    took: float
    """How long the pass took, seconds."""
    gpus: tuple[GpuUse, ...] = ()
    """By index."""
    slices: tuple[SliceUse, ...] = ()
    """Each after the one that it is in; empty where they were not asked for."""
    processes: tuple[ProcessUse, ...] = ()
    """By pid and GPU."""
    hidden: int = 0
    """Processes besides, of which /proc tells this user nothing."""


def take(
    mount: Path,
    fields: Iterable[str] = EVERYTHING,
    *,
    slices: bool = True,
    users: bool = False,
    commands: CommandLines | None = None,
) -> Snapshot:
    """One reading of the tree, with the users of processes and their full command lines where those are asked for. A
    process that exits meanwhile is left out. FileNotFoundError where there is no tree."""
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
    """Those that /proc tells of; the pids of the others are put into `hidden`."""
    describe = _identity if has_our_pids(mount) else _stranger
    for member in members(mount):
        pid = member.pid
        try:
            began = time.monotonic()
            figures = figures_of(member.path, files)
            at = (began + time.monotonic()) / 2
            yield ProcessUse(pid, *describe(member), member.gpu, figures, at)
        except OSError:  # it exited while we read
            if describe is _identity and is_hidden(pid):
                hidden.add(pid)


def _identity(member: Member) -> tuple[int, str, str]:
    """Directory, command and slice of a process. Nothing is read that it could have us wait for
    (:mod:`backend.process.looks`)."""
    return member.path.parent.stat().st_ino, member.command(), cgroup_of(member.pid).path


def _user(process: ProcessUse) -> str:
    """The user of a process that is known here; root for one that may not be looked into (proc_pid(5))."""
    uid = owner_of(process.pid) if process.slice != NOT_KNOWN else None
    return "" if uid is None else _user_name(uid)


@functools.cache
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _stranger(member: Member) -> tuple[int, str, str]:
    """Of one that has another number here, or none."""
    return member.path.parent.stat().st_ino, NOT_KNOWN, NOT_KNOWN
