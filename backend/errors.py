"""Errors with the number that the caller of a system call is to see."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import trio


def fail(code: int) -> OSError:
    """The OSError (or the subclass of it that Python has for this number) of an errno, with its usual text."""
    return OSError(code, os.strerror(code))


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """ETIMEDOUT where the body takes longer than `seconds`."""
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError:
        raise fail(errno.ETIMEDOUT) from None
