"""Real cgroups of this machine, to put real processes into."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from backend.identity import cgroup_of


def cgroup2() -> Path:
    """Where cgroup2 is mounted (cgroups(7)); AssertionError on a machine without it."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    raise AssertionError("this machine has no cgroup2 mount: slices cannot be tested on it")


OURS = f"ggrouptest{os.getpid()}.slice"
"""Tests of several processes run at once."""


@contextlib.contextmanager
def cgroup(name: str = OURS) -> Iterator[Path]:
    """A cgroup below our own; whoever is in it at the end is moved out."""
    above = cgroup2() / cgroup_of(os.getpid()).path.lstrip("/")
    path = above / name
    path.mkdir()
    try:
        yield path
    finally:
        for directory in sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True):
            evacuate(directory, above)
            directory.rmdir()
        evacuate(path, above)
        path.rmdir()


def evacuate(path: Path, to: Path) -> None:
    """Moves every process of a cgroup to another."""
    for pid in (path / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            enter(int(pid), to)


def enter(pid: int, path: Path) -> None:
    """Puts a process into a cgroup."""
    (path / "cgroup.procs").write_text(str(pid))


def slice_path(path: Path) -> str:
    """A cgroup's path as /proc/<pid>/cgroup has it, without the first slash."""
    return os.fspath(path.relative_to(cgroup2()))
