"""The kernel's side of a FUSE mount: aborting it, and its queue (Documentation/filesystems/fuse, "Control filesystem").

A RELEASE, which announces a close, is a request for which no program waits. By default the kernel has at most 12 of
those under way at a time and queues the rest. Where more programs than that read all the time, files are closed more
slowly than they are opened: the queue keeps growing, and with it the daemon's table of open files, by more than a MB a
second with 50 programs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from backend.common import syscalls

BACKGROUND = 32768
"""Background requests, for which no program waits, that may be under way at a time: more than programs that read."""

# asm-generic/unistd.h: the same numbers on every architecture; linux/mount.h
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CREATE, _CLOSE_ON_EXEC = 6, 1  # FSCONFIG_CMD_CREATE; FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC


@contextmanager
def control() -> Iterator[int]:
    """Open the kernel's directory of FUSE connections without a mountpoint, since it may not be mounted anywhere.

    OSError if that is impossible: before Linux 5.2, and for root of a user namespace.
    """
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
    """The kernel's side of one mount.

    It stays that mount's, even though the device number passes to another mount after the unmount (fs/fuse/control.c:
    the inode of a connection that ended leads nowhere).
    """

    def __init__(self, device: int) -> None:
        """OSError if there is no connection with that device number, or no control filesystem."""
        self._abort = os.fdopen(_open(device, "abort"), "wb", buffering=0)

    def abort(self) -> None:
        """End the connection: every present and later request fails with ECONNABORTED. OSError.

        A connection that has already ended stays as it is.
        """
        self._abort.write(b"1\n")

    def fileno(self) -> int:
        """Return the descriptor on which any write aborts the connection."""
        return self._abort.fileno()

    def close(self) -> None:
        """Close the descriptor. The connection goes on."""
        self._abort.close()


def allow_background(mountpoint: str, count: int = BACKGROUND) -> None:
    """Let the kernel have `count` background requests under way at a time. OSError."""
    fd = _open(os.stat(mountpoint).st_dev, "max_background")
    try:
        os.write(fd, b"%d\n" % count)
    finally:
        os.close(fd)


def _open(device: int, name: str) -> int:
    """Open a file of a mount's connection for writing. OSError."""
    with control() as directory:
        return os.open(f"{os.minor(device)}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
