"""Reading a mounted tree from outside, as any program can: with open, read and listdir."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from backend.door.client import facts_of, pid_namespace
from backend.process import procfs
from backend.process.identity import ROOT_PATH
from ggroupfs.text.names import is_number, slice_directory, unescape

log = logging.getLogger(__name__)

CONTENT_MOST = 1 << 14
"""Bytes read at once: more than the longest control file."""

GONE = frozenset((errno.ENOENT, errno.ENODEV, errno.ESRCH))
"""Errnos of the files of a group that does not exist, or is gone."""


def content(path: str | os.PathLike[str]) -> str:
    """Return the content of a control file, in one read(2): another one, to see the end, would be another request."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, CONTENT_MOST).decode().rstrip("\n")
    finally:
        os.close(file)


def flat(text: str) -> dict[str, int]:
    """Parse the numbers of a flat keyed file."""
    return {key: int(value) for key, value in (line.split() for line in text.splitlines())}


def require_tree(mount: Path) -> None:
    """Raise FileNotFoundError if there is no tree."""
    if not (mount / "ggroup.backend").exists():
        raise FileNotFoundError(errno.ENOENT, "no ggroup tree is mounted there", os.fspath(mount))


def has_our_pids(mount: Path) -> bool:
    """Whether a pid means the same process in a tree as in this process's /proc.

    A tree has the pids of its daemon's pid namespace; in a container those are the pids of other processes, or of none.
    """
    try:
        in_tree, here = os.readlink(mount / "self"), os.readlink("/proc/self")
    except FileNotFoundError:  # the daemon does not see this process at all
        return False
    if in_tree != here:
        return False
    told = facts_of(mount).get("pidns")
    # This process may have the same pid in both namespaces. If /proc is that of an outer namespace, that one counts.
    return told is None or here != str(os.getpid()) or told == str(pid_namespace())


def require_our_pids(mount: Path, what: str) -> None:
    """Raise RuntimeError if pids mean other processes in the tree than here."""
    if not has_our_pids(mount):
        raise RuntimeError(f"{what}: {ELSEWHERE}")


def say_if_strangers(mount: Path) -> None:
    """Warn that a table will lack the names of processes. FileNotFoundError if there is no tree."""
    require_tree(mount)
    if not has_our_pids(mount):
        log.warning("%s: names and slices of processes are not known", ELSEWHERE)


ELSEWHERE = "this is another pid namespace than that of the tree's daemon, and pids are other processes' there"


@attrs.frozen
class Member:
    """One process on one GPU, as a mounted tree shows it."""

    pid: int
    """Process id."""
    gpu: int
    """Index of the GPU."""
    path: Path
    """Directory of its control files."""

    def read(self, name: str) -> str:
        """Return the content of a control file, without the newline at its end."""
        return content(self.path / name)

    def flat(self, name: str) -> dict[str, int]:
        """Return the numbers of a flat keyed file."""
        return flat(self.read(name))

    def command(self) -> str:
        """Return the name of the program, which may hold any bytes; ``?`` once it is gone."""
        try:
            return os.fsencode(procfs.command(self.pid)).decode(errors="backslashreplace")
        except OSError:
            return "?"


@attrs.frozen
class Branch:
    """One slice on one GPU, as a mounted tree shows it."""

    slice: str
    """Path of its cgroup, beginning with ``/``."""
    gpu: int
    """Index of the GPU."""
    path: Path
    """Directory of its control files."""


def numbers(directory: str | os.PathLike[str]) -> list[int]:
    """Return the names in a directory that are numbers: pids, or indices of GPUs."""
    return sorted(int(name) for name in os.listdir(directory) if is_number(name))


def members(mount: Path) -> Iterator[Member]:
    """Yield every process of a tree, once per GPU. FileNotFoundError if there is no tree."""
    require_tree(mount)
    for pid in numbers(mount):
        with contextlib.suppress(OSError):  # gone since
            for gpu in numbers(mount / str(pid)):
                yield Member(pid, gpu, mount / str(pid) / str(gpu))


def branches(mount: Path, top: str = ROOT_PATH) -> Iterator[Branch]:
    """Yield every slice of a tree but the root, once per GPU and parents first; or only `top` and the slices in it."""
    waiting = [(top, mount / slice_directory(top))]  # a stack, since a cgroup can be deeper than Python recurses
    while waiting:
        name, directory = waiting.pop()
        with contextlib.suppress(OSError):  # gone since
            for entry in sorted(os.listdir(directory), reverse=True):
                if is_number(entry):
                    yield Branch(name, int(entry), directory / entry)
                else:
                    waiting.append((f"{name.rstrip('/')}/{unescape(entry)}", directory / entry))
