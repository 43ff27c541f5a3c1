"""The file ``ggroup.slices`` from outside: reading the slices that were made, and making one for a while."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs

FILE = "ggroup.slices"
AWAITED = "awaited"
"""State of a slice whose cgroup never came."""


@attrs.frozen
class Made:
    """A slice that was made, or that has settings."""

    path: str
    """Path of its cgroup, ``/batch.slice``."""
    state: str
    """AWAITED, ``there`` or ``unit``."""
    age_s: int
    """Seconds since it was made."""
    left_s: int | None
    """Seconds left for its cgroup to come; None if there is no limit."""


def made(mount: Path) -> Sequence[Made]:
    """Return the slices of a tree that were made, by path; none if the daemon is too old for the file. OSError."""
    try:
        lines = (mount / FILE).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    found = []
    for state, age, left, path in (os.fsdecode(line).split(" ", 3) for line in lines):
        found.append(Made(path, state, int(age), None if left == "-" else int(left)))
    return found


def make_ahead(mount: Path, path: str, ms: int) -> None:
    """Make a slice that goes away unless its cgroup comes within `ms` milliseconds. OSError."""
    # The slash at the end protects a last byte that is a blank in Latin-1 from being stripped.
    (mount / FILE).write_bytes(os.fsencode(f"{ms}ms {path}/\n"))
