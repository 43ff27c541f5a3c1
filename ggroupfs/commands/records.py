"""What ``ggroupfs doctor PID`` prints: the record of a process on each GPU, as the daemon of a tree has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ggroupfs.client import content, numbers, require_tree
from ggroupfs.client.reading import require_our_pids


def records(mount: Path, pid: int) -> Mapping[int, str]:
    """Return the records of a process by the index of the GPU. FileNotFoundError where the process has no directory or
    no tree is mounted; RuntimeError where pids are other processes' there; PermissionError for any user but its owner.
    """
    require_tree(mount)
    require_our_pids(mount, "doctor")
    directory = mount / str(pid)
    return {gpu: content(directory / str(gpu) / "gcgroup.record") for gpu in numbers(directory)}


def as_text(found: Mapping[int, str]) -> str:
    """Return the records for people: the values below each other, aligned."""
    rows = [line.partition(" ")[::2] for text in found.values() for line in [*text.splitlines(), ""]]
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows).rstrip()


def as_json(found: Mapping[int, str]) -> list[dict[str, str]]:
    """Return the records for programs: an object a GPU, with the words of the file."""
    return [dict(line.split(" ", 1) for line in text.splitlines()) for text in found.values()]
