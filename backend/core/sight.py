"""The size of a GPU as shown to its programs: how much memory there is in all, and how much of that is free. Pure.

Programs keep the first figure, so it stays as it was when they first asked (backend/cuda/library/daemon/sight.h). A
hard limit is what they can ever have; a high may be rewritten every second, and the free figure follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend.core.records import Books
from backend.core.settings import MAX

WHOLE = (1 << 64) - 1
"""Number of bytes that stands for all that the GPU has."""


def total(levels: Sequence[Books], capacity: int) -> int:
    """Return the bytes that a GPU of `capacity` bytes appears to have: the least gmem.limit.max on the path or, if
    there is none, the least gmem.limit.high; `WHOLE` where none is below the capacity. `levels` are the books on the
    path, the GPU's root last, as :meth:`backend.core.protocols.Bookkeeping.levels` returns them."""
    hard = min((books.limit_max for books in levels[:-1]), default=MAX)
    high = min((books.high for books in levels[:-1]), default=MAX)
    least = hard if hard < capacity else high
    return least if least < capacity else WHOLE


def limits(levels: Sequence[Books], capacity: int) -> tuple[int, int]:
    """Return the lowest limit of either kind on the path, or `WHOLE`, and the bytes that are free under all of them, or
    0 where there is no limit. `levels` as in :func:`total`."""
    limited = [books for books in levels[:-1] if books.limit < capacity]
    if not limited:
        return WHOLE, 0
    return min(books.limit for books in limited), max(0, min(books.limit - books.current for books in limited))


def view(levels: Sequence[Books], capacity: int) -> tuple[int, int]:
    """Return the bytes that are free under all limits of either kind on the path, or `WHOLE` where there is none, and
    what the level with the least of them holds, the lowest of several; 0 where there is none. `levels` as in
    :func:`total`."""
    limited = [books for books in levels[:-1] if books.limit < capacity]
    if not limited:
        return WHOLE, 0
    return limits(levels, capacity)[1], min(limited, key=lambda books: books.limit).current
