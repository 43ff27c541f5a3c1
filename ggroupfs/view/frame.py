"""Frame: one reading of ``ggroupfs top``, and its output as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ggroupfs.view import columns, outline, rates, snapshot
from ggroupfs.view.commandlines import CommandLines

FIELDS = columns.fields(columns.WATCHED) | {*rates.COUNTERS, "undone", "populated", "over", "memory_waits"}
"""Fields of the figures that a frame needs."""


@attrs.frozen
class Frame:
    """The content of the screen at one moment."""

    snapshot: snapshot.Snapshot
    """The reading of the tree."""
    seconds: float | None
    """Time over which its rates are taken, seconds; None if there are no rates yet."""
    gpus: tuple[outline.Node, ...]
    """The GPUs with everything on them, unsorted."""


@attrs.define
class Wishes:
    """Parts of a frame that are shown on demand."""

    commands: CommandLines | None = None
    """Reader of full command lines; None to show the names of programs."""
    unused: bool = False
    """Whether to show a process also on GPUs that it does not use."""


def look(
    mount: Path,
    before: snapshot.Snapshot | None = None,
    wishes: Wishes | None = None,
    previous: Frame | None = None,
) -> Frame:
    """Read the tree once more. Rates are since `before`, and histories continue those of the frame `previous`. OSError
    if the tree is gone.
    """
    wishes = wishes or Wishes()
    after = snapshot.take(mount, FIELDS, users=True, commands=wishes.commands)
    seconds = after.at - before.at if before is not None else None
    past = outline.histories(previous.gpus) if previous is not None else outline.NO_PAST
    nodes = outline.build(after, rates.between(before, after), unused=wishes.unused, past=past)
    return Frame(after, seconds, nodes)


def summary(frame: Frame) -> str:
    """Return the number of processes, in words."""
    pids = {process.pid for process in frame.snapshot.processes}
    frozen = {process.pid for process in frame.snapshot.processes if process.figures.frozen}
    fighting = {process.pid for process in frame.snapshot.processes if process.figures.undone}
    words = f"{len(pids)} process{'' if len(pids) == 1 else 'es'}"
    words += f", {len(frozen)} frozen" if frozen else ""
    words += f", {len(fighting)} undid what was set" if fighting else ""
    return f"{words}, {frame.snapshot.hidden} more hidden by /proc" if frame.snapshot.hidden else words


BESIDE_BARS = len("GPU 00  mem  1023.9G/1023.9G  busy  100%")


def gauges(gpu: outline.Node, width: int) -> str:
    """Return the bars of a GPU: its memory, and the fraction of time in which its engine works, if known."""
    use = gpu.use
    assert isinstance(use, snapshot.GpuUse)
    long = max((width - BESIDE_BARS) // 2, 4)
    memory = f"{columns.human(use.current)}/{columns.human(use.capacity)}"
    busy = gpu.rates.share
    told = columns.NOT_TOLD if busy is None else columns.percent(busy)
    if not use.present:
        return f"GPU {use.index:<2}  mem {columns.bar(0, long)} {memory:<15} lost"
    return (
        f"GPU {use.index:<2}  mem {columns.bar(use.current / max(use.capacity, 1), long)} {memory:<15} "
        f"busy {columns.bar(busy, long) if busy is not None else ' ' * long} {told:>4}"
    )


PLAIN_WIDTH = 80


def plain(frame: Frame) -> str:
    """Return a frame as text, with every column."""
    bars = "\n".join(gauges(gpu, PLAIN_WIDTH) for gpu in frame.gpus)
    lines = outline.lines(frame.gpus, "memory")
    return f"{summary(frame)}\n{bars}\n\n{columns.tree(lines, columns.WATCHED)}"


def as_json(frame: Frame) -> Mapping[str, Any]:
    """Return a frame for programs: bytes, milliseconds, shares of 1; null for ``max`` and for unknown values."""
    found: dict[str, Any] = {"seconds": frame.seconds, "gpus": [], "slices": [], "processes": []}
    found["hidden"] = frame.snapshot.hidden
    for line in outline.lines(frame.gpus, "pid"):
        use = line.node.use
        values = columns.as_json(line.node, columns.WATCHED)
        if isinstance(use, snapshot.GpuUse):
            of_gpu = {"current", "swap"} | {field.name for field in attrs.fields(rates.Rates)}
            own = {
                "gpu": use.index,
                "uuid": use.uuid,
                "name": use.name,
                "capacity": use.capacity,
                "present": use.present,
            }
            found["gpus"].append(own | {key: value for key, value in values.items() if key in of_gpu})
        elif isinstance(use, snapshot.SliceUse):
            found["slices"].append({"slice": use.path, "gpu": use.gpu, **values})
        else:
            process = {"pid": use.pid, "gpu": use.gpu, "command": use.command, "slice": use.slice}
            found["processes"].append(process | dict(values))
    return found
