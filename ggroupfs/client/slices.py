"""The slices of a mounted tree that were made, as ``ggroup.slices`` has them, and how one is made for a while."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import attrs

FILE = "ggroup.slices"
AWAITED = "awaited"
"""State of one whose cgroup never came."""


@attrs.frozen
class Made:
    """A slice that was made, or on which something was set."""

    path: str
    """Path of its cgroup, ``/batch.slice``."""
    state: str
    """AWAITED, ``there`` or ``unit``."""
    age_s: int
    """Seconds since it was made."""
    left_s: int | None
    """Seconds that an awaited cgroup has; None where there is no end."""


def made(mount: Path) -> Sequence[Made]:
    """Return the slices of a tree that were made, by path; none where its daemon is older than that file. OSError."""
    try:
        lines = (mount / FILE).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    found = []
    for state, age, left, path in (os.fsdecode(line).split(" ", 3) for line in lines):
        found.append(Made(path, state, int(age), None if left == "-" else int(left)))
    return found


def make_ahead(mount: Path, path: str, ms: int) -> None:
    """Have a slice be there, which goes unless its cgroup comes in so many milliseconds. OSError."""
    # A slash ends it, else a last byte that is a blank in Latin-1 would be one around the value.
    (mount / FILE).write_bytes(os.fsencode(f"{ms}ms {path}/\n"))
