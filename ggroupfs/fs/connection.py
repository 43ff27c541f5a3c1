"""What the kernel lets wait in its connection to us (Documentation/filesystems/fuse, "Control filesystem").

A RELEASE, which tells of a close, is a request that none waits for. Of those the kernel has 12 under way at a time
unless it is told otherwise, and lets the others wait behind them. Where more programs than that read all the time,
files are closed slower than they are opened: the queue grows for as long as they do, and with it our table of open
files, by more than a MB a second with 50 of them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

BACKGROUND = 32768
"""Requests that no program waits for, under way at a time: more than programs that read."""

# asm-generic/unistd.h: the same numbers on every architecture; linux/mount.h
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CREATE, _CLOSE_ON_EXEC = 6, 1  # FSCONFIG_CMD_CREATE, FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: object) -> int:
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


@contextmanager
def control() -> Iterator[int]:
    """The kernel's directory of FUSE connections, in no place of the file system, since it may be mounted nowhere.
    OSError where it cannot be had: before Linux 5.2, and for root of a user namespace."""
    context = _call(_FSOPEN, b"fusectl", _CLOSE_ON_EXEC)
    try:
        _call(_FSCONFIG, context, _CREATE, None, None, 0)
        directory = _call(_FSMOUNT, context, _CLOSE_ON_EXEC, 0)
    finally:
        os.close(context)
    try:
        yield directory
    finally:
        os.close(directory)


def abort(device: int) -> None:
    """Ends the connection of a mount, by the number of its device: every request comes back with ECONNABORTED, now and
    from now on. OSError."""
    _tell(device, "abort", 1)


def allow_background(mountpoint: str, count: int = BACKGROUND) -> None:
    """Has so many of them be under way. OSError."""
    _tell(os.stat(mountpoint).st_dev, "max_background", count)


def _tell(device: int, name: str, value: int) -> None:
    """Writes a number to a file of a mount's connection."""
    with control() as directory:
        fd = os.open(f"{os.minor(device)}/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        with os.fdopen(fd, "w") as file:
            file.write(f"{value}\n")
