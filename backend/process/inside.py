"""What is in a program: whether our library is, whether or not that speaks to us."""

from __future__ import annotations

from functools import partial

from backend.process.looks import look

LIBRARY = b"libggroup-cuda.so"


async def has_library(pid: int) -> bool:
    """Whether it is in a program. OSError where that cannot be looked at (:mod:`backend.process.looks`): then it is not
    known."""
    return await look(pid, partial(in_maps, pid))


def in_maps(pid: int) -> bool:
    """Whether it is mapped. May not return."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return any(LIBRARY in line for line in maps)
    except (FileNotFoundError, ProcessLookupError):
        return False
