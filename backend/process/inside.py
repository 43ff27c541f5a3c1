"""Find out whether our library is in a program, whether or not it speaks to us."""

from __future__ import annotations

from functools import partial

from backend.process.looks import look

LIBRARY = b"libggroup-cuda.so"


async def has_library(pid: int) -> bool:
    """Return whether the library is in a program. Raises OSError where the program cannot be looked at
    (:mod:`backend.process.looks`), so that it is not known.
    """
    return await look(pid, partial(in_maps, pid))


def in_maps(pid: int) -> bool:
    """Return whether the library is mapped in a process. May not return."""
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            return any(LIBRARY in line for line in maps)
    except (FileNotFoundError, ProcessLookupError):
        return False
