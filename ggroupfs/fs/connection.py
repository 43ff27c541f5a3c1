"""What the kernel lets wait in its connection to us (Documentation/filesystems/fuse, "Control filesystem").

A RELEASE, which tells of a close, is a request that none waits for. Of those the kernel has 12 under way at a time
unless it is told otherwise, and lets the others wait behind them. Where more programs than that read all the time,
files are closed slower than they are opened: the queue grows for as long as they do, and with it our table of open
files, by more than a MB a second with 50 of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from backend.common import syscalls

BACKGROUND = 32768
"""Requests that no program waits for, under way at a time: more than programs that read."""

# asm-generic/unistd.h: the same numbers on every architecture; linux/mount.h
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CREATE, _CLOSE_ON_EXEC = 6, 1  # FSCONFIG_CMD_CREATE, FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC


@contextmanager
def control() -> Iterator[int]:
    """The kernel's directory of FUSE connections, in no place of the file system, since it may be mounted nowhere.
    OSError where it cannot be had: before Linux 5.2, and for root of a user namespace."""
    context = syscalls.call(_FSOPEN, b"fusectl", _CLOSE_ON_EXEC)
    try:
        syscalls.call(_FSCONFIG, context, _CREATE, None, None, 0)
        directory = syscalls.call(_FSMOUNT, context, _CLOSE_ON_EXEC, 0)
    finally:
        os.close(context)
    try:
        yield directory
    finally:
        os.close(directory)


class Connection:
    """The kernel's side of a mount: that very one's, while the number of its device is given to the next mount once
    it is unmounted (fs/fuse/control.c: the inode of a connection that ended leads nowhere)."""

    def __init__(self, device: int) -> None:
        """OSError where there is no connection of that number, or no directory of them."""
        self._abort = os.fdopen(_open(device, "abort"), "wb", buffering=0)

    def abort(self) -> None:
        """Ends it: every request comes back with ECONNABORTED, now and from now on. One that has ended stays so.
        OSError."""
        self._abort.write(b"1\n")

    def fileno(self) -> int:
        """The descriptor that aborts it, by whatever is written there."""
        return self._abort.fileno()

    def close(self) -> None:
        """Lets go of it, and changes nothing."""
        self._abort.close()


def allow_background(mountpoint: str, count: int = BACKGROUND) -> None:
    """Has so many of them be under way. OSError."""
    fd = _open(os.stat(mountpoint).st_dev, "max_background")
    try:
        os.write(fd, b"%d\n" % count)
    finally:
        os.close(fd)


def _open(device: int, name: str) -> int:
    """A file of the connection of a mount, to be written."""
    with control() as directory:
        return os.open(f"{os.minor(device)}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
