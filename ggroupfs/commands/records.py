"""The records that ``ggroupfs doctor PID`` prints: the daemon's view of a process on each GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ggroupfs.client import content, numbers, require_tree
from ggroupfs.client.reading import require_our_pids


def records(mount: Path, pid: int) -> Mapping[int, str]:
    """Return the records of a process by the index of the GPU.

    FileNotFoundError if the process has no directory or no tree is mounted; RuntimeError if the tree is of another pid
    namespace; PermissionError for any user but the owner of the process.
    """
    require_tree(mount)
    require_our_pids(mount, "doctor")
    directory = mount / str(pid)
    return {gpu: content(directory / str(gpu) / "gcgroup.record") for gpu in numbers(directory)}


def as_text(found: Mapping[int, str]) -> str:
    """Return the records for people: values in a column, aligned."""
    rows = [line.partition(" ")[::2] for text in found.values() for line in [*text.splitlines(), ""]]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows).rstrip()


def as_json(found: Mapping[int, str]) -> list[dict[str, str]]:
    """Return the records for programs: one object per GPU, with the words of the file."""
    return [dict(line.split(" ", 1) for line in text.splitlines()) for text in found.values()]
