"""One pass over a mounted tree, into records: its GPUs, slices and processes, with the figures that were asked for.

An open of a control file is four requests to the daemon, so only the files are read that are needed, and what several
of them tell is read once. What a machine cannot tell is None, never 0, and so is what is only in files that were not
needed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from backend.identity import cgroup_of, start_time
from backend.records import MAX
from ggroupfs.client import content, flat, members, numbers, require_tree
from ggroupfs.names import slice_directory, unescape


@attrs.frozen
class Figures:
    """What the control files of a process or slice say, on one GPU. Sizes in bytes; None: not told, or not asked."""

    current: int | None = None
    """Memory on the GPU."""
    peak: int | None = None
    """Highest `current` since the last reset."""
    swap: int | None = None
    """Memory in the host."""
    high: int | None = None
    """gmem.limit.high; MAX: no limit."""
    low: int | None = None
    """gmem.limit.low; MAX: all of it is protected."""
    swap_max: int | None = None
    """gmem.swap.max; MAX: no limit."""
    swapin_bytes: int | None = None
    """Moved to the GPU, ever."""
    swapout_bytes: int | None = None
    """Moved to the host, ever."""
    move_usec: int | None = None
    """Time those moves took, microseconds."""
    unmovable: int | None = None
    """Memory that stays on the GPU whatever the limits say."""
    timeslice: float | None = None
    """compute.timeslice, milliseconds; 0: ``default``."""
    freeze: bool | None = None
    """compute.freeze: what was asked of this very group."""
    frozen: bool | None = None
    """Whether nothing of it can run: it, or a slice above, is frozen."""
    populated: bool | None = None
    """Whether a process of it has a context on the GPU."""
    priority: int | None = None
    """compute.priority."""
    weight: int | None = None
    """compute.weight."""
    submitted: int | None = None
    """Kernels launched, ever."""
    finished: int | None = None
    """Kernels finished, ever."""
    pending: int | None = None
    """Kernels that may still finish."""
    gpu_usec: int | None = None
    """Time on the engine, microseconds."""
    timeslice_usec: int | None = None
    """The timeslice that holds for it now, with all slices above, microseconds."""
    tsgs: int | None = None
    """TSGs of its contexts."""
    channels: int | None = None
    """Channels in them."""
    managed: bool | None = None
    """Whether its memory can be moved."""
    events: Mapping[str, int] | None = None
    """gmem.events."""


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
    start: int
    """When it started, in clock ticks since boot: another process with the same pid has another."""
    command: str
    """Name of the program."""
    slice: str
    """Path of its cgroup."""
    gpu: int
    """Index of the GPU."""
    figures: Figures
    """What its control files say."""
    at: float = 0.0
    """time.monotonic() when they were read: a pass takes its time."""

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


def _size(text: str) -> int:
    return MAX if text == "max" else int(text)


def _stat(text: str) -> dict[str, Any]:
    found: dict[str, Any] = dict(flat(text))
    return {"current": found.pop("resident", None), "swap": found.pop("swapped", None), **found}


def _switches(text: str) -> dict[str, Any]:
    return {key: bool(value) for key, value in flat(text).items()}


def _activity(text: str) -> dict[str, Any]:
    found: dict[str, Any] = dict(flat(text))
    return {**found, "managed": bool(found["managed"])} if "managed" in found else found


@attrs.frozen
class Source:
    """A control file that figures come from."""

    fields: frozenset[str]
    """Those of `Figures` that it tells."""
    parse: Callable[[str], Mapping[str, Any]]
    """Its content -> field and value; others than `fields` are dropped."""


def _one(field: str, parse: Callable[[str], Any]) -> Source:
    return Source(frozenset((field,)), lambda text: {field: parse(text)})


SOURCES: Mapping[str, Source] = {
    "gmem.current": _one("current", int),
    "gmem.swap.current": _one("swap", int),
    "gmem.stat": Source(
        frozenset(("current", "swap", "swapin_bytes", "swapout_bytes", "move_usec", "unmovable")), _stat
    ),
    "gmem.peak": _one("peak", int),
    "gmem.limit.high": _one("high", _size),
    "gmem.limit.low": _one("low", _size),
    "gmem.swap.max": _one("swap_max", _size),
    "gmem.events": _one("events", flat),
    "compute.timeslice": _one("timeslice", lambda text: 0.0 if text == "default" else float(text)),
    "compute.freeze": _one("freeze", lambda text: text == "1"),
    "compute.events": Source(frozenset(("frozen", "populated")), _switches),
    "compute.priority": _one("priority", int),
    "compute.weight": _one("weight", int),
    "gcgroup.stat": Source(
        frozenset(("submitted", "finished", "pending", "gpu_usec", "timeslice_usec", "tsgs", "channels", "managed")),
        _activity,
    ),
}
"""Where each figure is found. Of several files that tell the same, the first is the one for it alone."""

EVERYTHING = frozenset(field.name for field in attrs.fields(Figures))


def files_for(fields: Iterable[str]) -> tuple[str, ...]:
    """The fewest control files that tell these figures. KeyError for what no file tells."""
    wanted = set(fields)
    if unknown := wanted - EVERYTHING:
        raise KeyError(f"no control file tells {', '.join(sorted(unknown))}")
    chosen = []
    while wanted:
        best = max(SOURCES, key=lambda name: len(SOURCES[name].fields & wanted))  # the first of equals
        chosen.append(best)
        wanted -= SOURCES[best].fields
    return tuple(chosen)


def take(mount: Path, fields: Iterable[str] = EVERYTHING, *, slices: bool = True) -> Snapshot:
    """Reads the tree once. Who exits meanwhile is left out. FileNotFoundError where there is no tree."""
    require_tree(mount)
    files = files_for(fields)
    began = time.monotonic()
    gpus = tuple(_gpu(mount, index) for index in numbers(mount / "gpus"))
    found_slices = tuple(_slices(mount, files)) if slices else ()
    processes = tuple(_processes(mount, files))
    took = time.monotonic() - began
    return Snapshot(began + took / 2, took, gpus, found_slices, processes)


def _gpu(mount: Path, index: int) -> GpuUse:
    path = f"{mount}/gpus/{index}"
    return GpuUse(
        index,
        content(f"{path}/uuid"),
        content(f"{path}/name"),
        int(content(f"{path}/gmem.capacity")),
        int(content(f"{path}/gmem.current")),
    )


def _slices(mount: Path, files: Iterable[str]) -> Iterator[SliceUse]:
    """A stack, since a cgroup can be deeper than Python recurses."""
    waiting = ["/"]
    while waiting:
        path = waiting.pop()
        directory = f"{mount}/{slice_directory(path)}"
        with contextlib.suppress(OSError):  # gone since
            for name in sorted(os.listdir(directory), reverse=True):
                if not name.isdigit():
                    waiting.append(f"{path.rstrip('/')}/{unescape(name)}")
            for gpu in numbers(directory):
                yield SliceUse(path, gpu, figures_of(f"{directory}/{gpu}", files))


def _processes(mount: Path, files: Iterable[str]) -> Iterator[ProcessUse]:
    for member in members(mount):
        with contextlib.suppress(OSError):  # it exited while we read
            began = time.monotonic()
            figures = figures_of(os.fspath(member.path), files)
            at, pid = (began + time.monotonic()) / 2, member.pid
            yield ProcessUse(pid, start_time(pid), member.command(), cgroup_of(pid).path, member.gpu, figures, at)


def figures_of(directory: str, files: Iterable[str]) -> Figures:
    """What some control files of a group say. OSError when it is gone."""
    told: dict[str, Any] = {}
    for name in files:
        source = SOURCES[name]
        found = source.parse(content(f"{directory}/{name}"))
        told |= {key: value for key, value in found.items() if key in source.fields}
    return Figures(**told)
