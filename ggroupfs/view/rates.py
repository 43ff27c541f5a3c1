"""Computes rates per second from two passes over a tree. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from ggroupfs.view.figures import Figures
from ggroupfs.view.snapshot import ProcessUse, Snapshot

COUNTERS = ("finished", "gpu_usec", "swapin_bytes", "swapout_bytes", "throttled_usec")
"""Fields of counters from which rates are made."""


@attrs.frozen
class Rates:
    """The rates of a process, or of all in a slice or on a GPU.

    None if the machine cannot tell, or the process was not there before.
    """

    kernels: float | None = None
    """Kernels finished per second."""
    share: float | None = None
    """Fraction of the time on the engine: 0 to 1, or slightly more, since reading the files takes time."""
    swapin: float | None = None
    """Bytes moved to the GPU per second."""
    swapout: float | None = None
    """Bytes moved to the host per second."""
    throttled: float | None = None
    """Fraction of the time for which a quota or another's turn kept the process from running: 0 to 1 per process."""


UNKNOWN = Rates()


def between(before: Snapshot | None, after: Snapshot) -> Mapping[str, Rates]:
    """Return the rates of each process in `after`, by directory. A process missing from `before` is left out."""
    if before is None:
        return {}
    then = {process.directory: process for process in before.processes}
    found = {}
    for process in after.processes:
        old = then.get(process.directory)
        if old is not None and old.inode == process.inode and process.at > old.at:
            found[process.directory] = _rates(old, process, process.at - old.at)
    return found


def _rates(before: ProcessUse, after: ProcessUse, seconds: float) -> Rates:
    def rate(field: str) -> float | None:
        return _rate(before.figures, after.figures, field, seconds)

    def part(field: str) -> float | None:
        usec = rate(field)
        return None if usec is None else usec / 1e6

    moved = rate("swapin_bytes"), rate("swapout_bytes")
    return Rates(rate("finished"), part("gpu_usec"), *moved, part("throttled_usec"))


def _rate(before: Figures, after: Figures, field: str, seconds: float) -> float | None:
    """Return a rate; None also for a counter that went back because the books began anew."""
    old, new = getattr(before, field), getattr(after, field)
    return None if old is None or new is None or new < old else (new - old) / seconds


def total(parts: Iterable[Rates]) -> Rates:
    """Return the sum over processes. An unknown rate is left out of the sum, unless all are unknown.

    Members come and go, so the sum over those present throughout is accurate; a slice's own counters would jump
    whenever a process joins.
    """
    every = list(parts)

    def add(field: str) -> float | None:
        known = [value for rates in every if (value := getattr(rates, field)) is not None]
        return sum(known) if known else None

    return Rates(*(add(field.name) for field in attrs.fields(Rates)))
