"""How long somebody waits."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import trio

from backend.errors import fail


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """ETIMEDOUT where the body takes longer than `seconds`."""
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError:
        raise fail(errno.ETIMEDOUT) from None
