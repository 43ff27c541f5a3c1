"""Reading a mounted tree from outside, as any program would: with open, read and listdir."""

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
"""Bytes of the longest control file, and more."""

GONE = frozenset((errno.ENOENT, errno.ENODEV, errno.ESRCH))
"""The errnos that files of a group give which is not there, or has gone since."""


def content(path: str | os.PathLike[str]) -> str:
    """What a control file says, in one read(2): another one, to see the end, is a request more to the daemon."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, CONTENT_MOST).decode().rstrip("\n")
    finally:
        os.close(file)


def flat(text: str) -> dict[str, int]:
    """The numbers of a flat keyed file."""
    return {key: int(value) for key, value in (line.split() for line in text.splitlines())}


def require_tree(mount: Path) -> None:
    """FileNotFoundError where there is no tree."""
    if not (mount / "ggroup.backend").exists():
        raise FileNotFoundError(errno.ENOENT, "no ggroup tree is mounted there", os.fspath(mount))


def has_our_pids(mount: Path) -> bool:
    """Whether a number means the same process in a tree and in our /proc. The tree has those of its daemon's pid
    namespace: in a container they are the numbers of other processes, or of none."""
    try:
        in_tree, here = os.readlink(mount / "self"), os.readlink("/proc/self")
    except FileNotFoundError:  # the daemon does not see us at all
        return False
    if in_tree != here:
        return False
    told = facts_of(mount).get("pidns")
    # Two namespaces may have one number for us. (With the /proc of one above ours, that is what we go by.)
    return told is None or here != str(os.getpid()) or told == str(pid_namespace())


def require_our_pids(mount: Path, what: str) -> None:
    """RuntimeError where numbers mean other processes in the tree than here."""
    if not has_our_pids(mount):
        raise RuntimeError(f"{what}: {ELSEWHERE}")


def say_if_strangers(mount: Path) -> None:
    """A line for the reader of a table of processes without names. FileNotFoundError where there is no tree."""
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
    """Its directory of control files."""

    def read(self, name: str) -> str:
        """The content of a control file, without the newline at its end."""
        return content(self.path / name)

    def flat(self, name: str) -> dict[str, int]:
        """The numbers of a flat keyed file."""
        return flat(self.read(name))

    def command(self) -> str:
        """The name of the program, which may hold any bytes; ``?`` once it is gone."""
        try:
            return os.fsencode(procfs.command(self.pid)).decode(errors="backslashreplace")
        except OSError:
            return "?"


@attrs.frozen
class Branch:
    """One slice on one GPU, as a mounted tree shows it."""

    slice: str
    """Path of its cgroup, ``/`` first."""
    gpu: int
    """Index of the GPU."""
    path: Path
    """Its directory of control files."""


def numbers(directory: str | os.PathLike[str]) -> list[int]:
    """The names in a directory that are numbers: pids, or GPUs."""
    return sorted(int(name) for name in os.listdir(directory) if is_number(name))


def members(mount: Path) -> Iterator[Member]:
    """Every process of a tree, on each of its GPUs. FileNotFoundError where there is no tree."""
    require_tree(mount)
    for pid in numbers(mount):
        with contextlib.suppress(OSError):  # gone since
            for gpu in numbers(mount / str(pid)):
                yield Member(pid, gpu, mount / str(pid) / str(gpu))


def branches(mount: Path, top: str = ROOT_PATH) -> Iterator[Branch]:
    """Every slice of a tree but the root, on each GPU, those above before those below; or `top` and those in it."""
    waiting = [(top, mount / slice_directory(top))]  # a stack, since a cgroup can be deeper than Python recurses
    while waiting:
        name, directory = waiting.pop()
        with contextlib.suppress(OSError):  # gone since
            for entry in sorted(os.listdir(directory), reverse=True):
                if is_number(entry):
                    yield Branch(name, int(entry), directory / entry)
                else:
                    waiting.append((f"{name.rstrip('/')}/{unescape(entry)}", directory / entry))
