"""``ggroupfs show``: a table of who uses what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backend.identity import cgroup_of
from ggroupfs.client import Member, members
from ggroupfs.mounts import DEFAULT_MOUNTPOINT

COLUMNS = ("pid", "gpu", "command", "slice", "current", "high", "swap", "timeslice", "frozen", "finished")
NUMBERS = {"pid", "gpu", "current", "high", "swap", "timeslice", "finished"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it is told."""
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    rows = list(collect(arguments.mount))
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        print(table(rows))
    return 0


def collect(mount: Path) -> Iterator[dict[str, Any]]:
    """One row a process and GPU: bytes, milliseconds; None for ``max`` and for what the machine cannot tell."""
    for member in members(mount):
        try:
            yield _row(member)
        except (OSError, ProcessLookupError):
            continue  # it exited while we read


def _row(member: Member) -> dict[str, Any]:
    high = member.read("gmem.limit.high")
    return {
        "pid": member.pid,
        "gpu": member.gpu,
        "command": member.command(),
        "slice": cgroup_of(member.pid).path,
        "current": int(member.read("gmem.current")),
        "high": None if high == "max" else int(high),
        "swap": int(member.read("gmem.swap.current")),
        "timeslice": float(member.read("compute.timeslice")),
        "frozen": bool(member.flat("compute.events")["frozen"]),
        "finished": member.flat("gcgroup.stat").get("finished"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for people: sizes in powers of 1024, numbers to the right."""
    cells = [[name.upper() for name in COLUMNS], *([_cell(name, row[name]) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if name in NUMBERS else text.ljust(width)
            for name, text, width in zip(COLUMNS, line, widths, strict=True)
        ).rstrip()
        for line in cells
    )


def _cell(name: str, value: Any) -> str:
    if name == "high" and value is None:
        return "max"
    if value is None:
        return "-"
    if name in ("current", "high", "swap"):
        return human(value)
    if name == "timeslice":
        return f"{value:g} ms"
    if name == "frozen":
        return "frozen" if value else "-"
    return str(value)


def human(nbytes: float) -> str:
    """A size as people read it: ``512.0M``."""
    for suffix in ("", "K", "M", "G"):
        if nbytes < 1024:
            return f"{nbytes:.0f}" if not suffix else f"{nbytes:.1f}{suffix}"
        nbytes /= 1024
    return f"{nbytes:.1f}T"
