"""A space: the programs of one user in one slice that run on the GPUs side by side, for the scheduler as one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs

from backend.process.identity import Process, Slice

SUFFIX = ".mps"
"""Suffix of the directory of a tree's spaces, in place of that of its socket: the library derives the one from the
other (``daemon/space.c``)."""
SOCKET = ".sock"
"""Suffix of a socket that is replaced; any other is kept."""
RECORD = ".record"
"""Suffix of the file that describes a space, beside its directory."""


@attrs.frozen
class Space:
    """One space, and the name of its directory."""

    slice: Slice
    """The outermost slice with compute.spatial."""
    uid: int
    """The user of its programs, and of its server."""
    number: int
    """A random number of 32 bits, never 0. It names the directory, and programs are told it."""

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"{self.number:08x}"


def directory_for(socket: Path) -> Path:
    """Return the directory of the spaces of the tree with this socket."""
    return socket.with_name(socket.name.removesuffix(SOCKET) + SUFFIX)


@attrs.frozen
class Record:
    """What outlives the daemon of a space: which one it is, and the process that was started for it."""

    space: Space
    """The space."""
    control: Process | None
    """Its control daemon; None while there is none."""
    is_over: bool = False
    """Whether it takes no further program, as its control daemon was told to quit."""

    def write(self, directory: Path) -> None:
        """Keep the record in the directory of the spaces, whole or not at all. OSError."""
        path = directory / f"{self.space.name}{RECORD}"
        control = None if self.control is None else [self.control.pid, self.control.start]
        words = {"slice": self.space.slice.path, "uid": self.space.uid, "control": control, "over": self.is_over}
        beside = path.with_name(f".{path.name}")
        beside.write_text(json.dumps(words), encoding="utf-8", errors="surrogateescape")
        beside.replace(path)


def read_records(directory: Path) -> list[Record]:
    """Return the records of a directory; none where it is missing, or belongs to another user. Only its owner writes
    there.
    """
    try:
        if directory.stat().st_uid not in (0, os.geteuid()):
            return []
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    found = []
    for name in names:
        if name.endswith(RECORD) and not name.startswith("."):
            try:
                text = (directory / name).read_text(encoding="utf-8", errors="surrogateescape")
                words, number = json.loads(text), int(name.removesuffix(RECORD), 16)
                control = None if words["control"] is None else Process(*map(int, words["control"]))
                space = Space(Slice(str(words["slice"])), int(words["uid"]), number)
                found.append(Record(space, control, bool(words.get("over"))))
            except (OSError, ValueError, LookupError, TypeError):
                continue
    return found
