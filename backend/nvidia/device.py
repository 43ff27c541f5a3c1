"""Recognise files of the NVIDIA device by asking only the kernel, never the server of a file.

A descriptor in a program may belong to a file system that the program itself serves (FUSE, in a user namespace of its
own), under any name. To ask for the attributes of such a file, to open it, or to close a duplicate of it, is to wait
for that program, where no signal reaches.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct

CONTROL_DEVICE = "/dev/nvidiactl"
CONTROL_NUMBER = os.makedev(195, 255)
"""Number of the control device: NV_MAJOR_DEVICE_NUMBER and NV_MINOR_DEVICE_NUMBER_CONTROL_DEVICE (nv.h)."""

AT_FDCWD = -100
AT_NO_AUTOMOUNT = 0x800
AT_EMPTY_PATH = 0x1000
AT_STATX_DONT_SYNC = 0x4000
"""Flag of statx(2): return what the kernel has cached (linux/fcntl.h)."""
STATX_TYPE = 1

_STATX = struct.Struct("=28xH98xII120x")
"""struct statx (linux/stat.h): mode@28, major and minor of a device@128; 256 bytes."""

_libc = ctypes.CDLL(None, use_errno=True)


def number_of(place: int | str) -> int | None:
    """Return the number of the character device that an open file is, or that a path leads to; None for any other
    file, or one that may not be looked at. Asks only the kernel.
    """
    where, path = (place, b"") if isinstance(place, int) else (AT_FDCWD, os.fsencode(place))
    flags = AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT | (0 if path else AT_EMPTY_PATH)
    found = ctypes.create_string_buffer(_STATX.size)
    if _libc.statx(where, path, flags, STATX_TYPE, found):
        return None
    mode, major, minor = _STATX.unpack(found.raw)
    return os.makedev(major, minor) if stat.S_ISCHR(mode) else None


def is_usable(fd: int, number: int) -> bool:
    """Return whether an open file of this process is of device `number` and takes requests: one that was opened
    with O_PATH does not.
    """
    return not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH and number_of(fd) == number


def is_open_at(pid: int, fd: str, number: int) -> bool:
    """Return whether a program has such a file at descriptor `fd`. Raises OSError where this
    process lacks a resource.
    """
    if number_of(f"/proc/{pid}/fd/{fd}") != number:
        return False
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as file:
            (flags,) = (line.split()[1] for line in file if line.startswith(b"flags:"))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):  # closed meanwhile
            return False
        raise
    return not int(flags, 8) & os.O_PATH
