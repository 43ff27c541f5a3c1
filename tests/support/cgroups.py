"""Real cgroups of this machine, for tests that put real processes into them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from backend.process import procfs
from backend.process.identity import cgroup_of
from tests.support.mounted import eventually


def cgroup2() -> Path:
    """Return the mountpoint of cgroup2 (cgroups(7)); AssertionError on a machine where it is missing or read-only."""
    mount = procfs.cgroup2()
    assert mount is not None, "this machine has no cgroup2 mount: slices cannot be tested on it"
    assert os.access(mount.point, os.W_OK), "run these tests as root where cgroup2 is writable"
    return Path(mount.point)


OURS = f"ggrouptest{os.getpid()}.slice"
"""Name of the cgroup of this process: several test processes run at once."""


@contextlib.contextmanager
def cgroup(name: str = OURS) -> Iterator[Path]:
    """Yield a cgroup below our own; the processes left in it at the end are moved out."""
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
    """Move every process of a cgroup to another."""
    for pid in (path / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            enter(int(pid), to)


@contextlib.contextmanager
def frozen(path: Path) -> Iterator[None]:
    """Stop the processes of a cgroup, as ``docker pause`` does."""
    (path / "cgroup.freeze").write_text("1")
    try:
        eventually(lambda: "frozen 1\n" in (path / "cgroup.events").read_text(), f"{path} is frozen")
        yield
    finally:
        (path / "cgroup.freeze").write_text("0")


def enter(pid: int, path: Path) -> None:
    """Put a process into a cgroup."""
    (path / "cgroup.procs").write_text(str(pid))


def slice_path(path: Path) -> str:
    """Return a cgroup's path as in /proc/<pid>/cgroup, without the leading slash."""
    return os.fspath(path.relative_to(cgroup2()))


def answer(call: Callable[[], object]) -> object:
    """Return the result of a call, or the name of its errno."""
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
