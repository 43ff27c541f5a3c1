"""System calls that Python has no function for, by their numbers."""

from __future__ import annotations

import ctypes
import os

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
