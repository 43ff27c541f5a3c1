"""System calls that Python has no function for, by their numbers."""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    """syscall(2): its result. OSError with the errno that it failed with."""
    result: int = _libc.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def named(name: str, *arguments: object) -> int:
    """As :func:`call`, by the name of libc's function, where it has one: numbers differ between architectures."""
    result: int = getattr(_libc, name)(*arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


STATFS_BYTES = 256
"""Bytes that there are for a struct statfs, which has 120 of them where a long has 8."""


def filesystem(fd: int) -> int:
    """Return the type of the filesystem of a file, of linux/magic.h: the first word of statfs(2). OSError."""
    buffer = ctypes.create_string_buffer(STATFS_BYTES)
    named("fstatfs", fd, buffer)
    word: int = struct.unpack_from("@l", buffer)[0]
    return word & 0xFFFFFFFF
