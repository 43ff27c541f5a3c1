"""System calls that Python has no function for, by their numbers."""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """Make a system call (syscall(2)) and return its result. Raises OSError with the errno of a failure."""
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def named(name: str, *arguments: object) -> int:
    """As :func:`call`, through the libc function `name`: numbers differ between architectures."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


STATFS_BYTES = 256
"""Size of the buffer for a struct statfs, bytes; the struct takes 120 where a long has 8."""


def filesystem(fd: int) -> int:
    """Return the type of the filesystem of a file, as in linux/magic.h: the first word of statfs(2).
    Raises OSError.
    """
    buffer = ctypes.create_string_buffer(STATFS_BYTES)
    named("fstatfs", fd, buffer)
    word: int = struct.unpack_from("@l", buffer)[0]
    return word & 0xFFFFFFFF
