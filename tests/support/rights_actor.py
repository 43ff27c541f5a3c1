"""Try every operation on some files and directories as the current user, and print one JSON object with the results.

This is a program of its own that needs only Python's standard library, because it runs in namespaces without anything
else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

GIVEN = 4242
"""The user that files are given to."""
VALUES = {
    "compute.freeze": b"0",
    "compute.migrate": b"0",
    "compute.priority": b"8",
    "compute.timeslice": b"default",
    "compute.weight": b"100",
    "compute.wait.max": b"default",
    "compute.spatial": b"0",
    "gmem.limit.low": b"0",
    "gmem.oom.group": b"0",
    "ggroup.slices": b"infinity /gone.slice/",
    "gmem.reclaim": b"0",
}
"""Values that leave a file as it is when they are written; ``max`` for the files not listed."""

libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def read(path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd, contextlib.suppress(BlockingIOError):  # a usermemfd has no record
        os.read(fd, 4096)


def write(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, VALUES.get(path.name, b"max"))
    if path.name == "ggroup.slices":
        (path.parent / "slice/gone.slice").rmdir()


def read_and_write(path: Path) -> None:
    with opened(path, os.O_RDWR):
        pass


def chmod(path: Path) -> None:
    before = path.stat().st_mode & 0o7777
    path.chmod(before ^ 0o010)
    path.chmod(before)


def chown(path: Path) -> None:
    """Change the owner; of a link, its own."""
    before = path.lstat()
    os.lchown(path, GIVEN, -1)
    os.lchown(path, before.st_uid, -1)


def chgrp(path: Path) -> None:
    """Change the group to one that the current user is in."""
    before = path.lstat()
    os.lchown(path, -1, os.getgid())
    os.lchown(path, -1, before.st_gid)


def poll(path: Path) -> None:
    with opened(path, os.O_RDONLY) as fd:
        poller = select.poll()
        poller.register(fd, select.POLLPRI)
        poller.poll(0)


def shared_map(path: Path) -> None:
    """Call mmap(2) directly, because Python's looks at st_size first."""
    libc.mmap.restype = ctypes.c_void_p
    with opened(path, os.O_RDONLY) as fd:
        where = libc.mmap(None, ctypes.c_size_t(4096), mmap.PROT_READ, mmap.MAP_SHARED, fd, ctypes.c_long(0))
        if where == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        libc.munmap(ctypes.c_void_p(where), ctypes.c_size_t(4096))


def make_and_remove(path: Path) -> None:
    (path / "made").mkdir()
    (path / "made").rmdir()


FILE: dict[str, Callable[[Path], object]] = {
    "read": read,
    "write": write,
    "open to read and write": read_and_write,
    "truncate": lambda path: os.truncate(path, 0),
    "poll": poll,
    "mmap": shared_map,
    "chmod": chmod,
    "chown": chown,
    "chgrp": chgrp,
    "utimes": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, "user.x", b""),
    "unlink": os.unlink,
    "rename": lambda path: os.rename(path, path.parent / "renamed"),
    "link": lambda path: os.link(path, path.parent / "linked"),
}
DIRECTORY: dict[str, Callable[[Path], object]] = {
    "list": os.listdir,
    "mkdir and rmdir": make_and_remove,
    "make a file": lambda path: os.close(os.open(path / "made", os.O_WRONLY | os.O_CREAT)),
    "make a fifo": lambda path: os.mkfifo(path / "made"),
    "symlink": lambda path: os.symlink("x", path / "made"),
    "rename": lambda path: os.rename(path, path.parent / "renamed"),
    "rmdir": os.rmdir,
    "chmod": chmod,
    "chown": chown,
    "chgrp": chgrp,
}

LINK: dict[str, Callable[[Path], object]] = {
    "readlink": os.readlink,
    "follow": os.stat,
    "chown": chown,
    "chgrp": chgrp,
    "utimes": lambda path: os.utime(path, (1, 1), follow_symlinks=False),
    "unlink": os.unlink,
    "rename": lambda path: os.rename(path, path.parent / "renamed"),
    "link": lambda path: os.link(path, path.parent / "linked", follow_symlinks=False),
}


def answer(call: Callable[[Path], object], path: Path) -> str:
    """Return ``yes``, or the name of the errno."""
    try:
        call(path)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "yes"


def main(asked: str) -> None:
    """Try `asked`, a list ``[[operation, path], ...]``; a leading ``self`` in a path is replaced by the target of
    `self`.
    """
    answers = []
    for operation, name in json.loads(asked):
        path = Path(name)
        operations = LINK if path.is_symlink() else DIRECTORY if path.is_dir() else FILE
        answers.append(answer(operations[operation], path))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.stdin.readline())
