"""What is in a program, read where a program can have its reader wait: in threads, for a limited time.

Whoever reads ``/proc/<pid>/maps`` takes the program's mmap lock, which it can hold for as long as it likes: until
Linux 6.17 by a page fault on a file that it serves itself. So that is not read in the event loop.
"""

from __future__ import annotations

import errno
import math
import threading
from functools import partial

import trio

from backend.identity import owner_of
from backend.threads import in_a_thread

LIBRARY = b"libggroup-cuda.so"

ANSWER_S = 1.0
"""Seconds for one look, which takes 1 ms."""
STUCK = 4
"""Looks at programs of one user that may be under way: of one that has as many nobody else is looked at, until one of
them comes back."""

_lock = threading.Lock()
_under_way: dict[threading.Event, int | None] = {}  # whose


async def has_library(pid: int) -> bool:
    """Whether our library is in a program, whether or not that speaks to us. OSError where it cannot be looked at: then
    it is not known."""
    uid = owner_of(pid)
    with _lock:
        if list(_under_way.values()).count(uid) >= STUCK:
            raise OSError(errno.EBUSY, "programs of its user do not let themselves be looked at")
        began = threading.Event()
        _under_way[began] = uid
    try:
        with trio.move_on_after(ANSWER_S):
            return await in_a_thread("what is in a program", partial(_look, pid, began), _threads())
    finally:
        if not began.is_set():
            _over(began)
    raise OSError(errno.EBUSY, "it does not let itself be looked at")


def _look(pid: int, began: threading.Event) -> bool:
    began.set()
    try:
        return in_maps(pid)
    finally:
        _over(began)


def _over(began: threading.Event) -> None:
    with _lock:
        _under_way.pop(began, None)


def _threads() -> trio.CapacityLimiter:
    """None of those that others count on: how many there are is bounded by user."""
    return trio.CapacityLimiter(math.inf)


def in_maps(pid: int) -> bool:
    """Whether it is mapped. May not return."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return any(LIBRARY in line for line in maps)
    except (FileNotFoundError, ProcessLookupError):
        return False
