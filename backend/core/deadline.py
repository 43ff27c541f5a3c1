"""How long somebody waits."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

import trio

from backend.common.errors import fail


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[trio.CancelScope]:
    """ETIMEDOUT where the body takes longer than `seconds`, or than the deadline of the scope says by then."""
    try:
        with trio.fail_after(seconds) as scope:
            yield scope
    except trio.TooSlowError:
        raise fail(errno.ETIMEDOUT) from None
