"""Reading a mounted tree from outside, as any program would: with open, read and listdir."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import attrs


@attrs.frozen
class Member:
    """One process on one GPU, as a mounted tree shows it."""

    pid: int
    """Process id."""
    gpu: int
    """Index of the GPU."""
    path: Path
    """Its directory of control files."""

    def read(self, name: str) -> str:
        """The content of a control file, without the newline at its end."""
        return (self.path / name).read_text().rstrip("\n")

    def flat(self, name: str) -> dict[str, int]:
        """The numbers of a flat keyed file."""
        return {key: int(value) for key, value in (line.split() for line in self.read(name).splitlines())}

    def command(self) -> str:
        """The name of the program; ``?`` once it is gone."""
        try:
            return Path(f"/proc/{self.pid}/comm").read_text().strip()
        except OSError:
            return "?"


def members(mount: Path) -> Iterator[Member]:
    """Every process of a tree, on each of its GPUs. FileNotFoundError where there is no tree."""
    if not (mount / "ggroup.backend").exists():
        raise FileNotFoundError(errno.ENOENT, "no ggroup tree is mounted there", os.fspath(mount))
    for pid in sorted(int(name) for name in os.listdir(mount) if name.isdigit()):
        with contextlib.suppress(OSError):  # gone since
            for gpu in sorted(int(name) for name in os.listdir(mount / str(pid))):
                yield Member(pid, gpu, mount / str(pid) / str(gpu))
