"""What happened between two passes over a tree, per second. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from ggroupfs.view.figures import Figures
from ggroupfs.view.snapshot import ProcessUse, Snapshot

COUNTERS = ("finished", "gpu_usec", "swapin_bytes", "swapout_bytes", "throttled_usec")
"""What is counted up, and needed for rates."""


@attrs.frozen
class Rates:
    """Of a process, or of all in a slice or on a GPU. None: the machine does not tell, or it was not there before."""

    kernels: float | None = None
    """Kernels finished a second."""
    share: float | None = None
    """Time on the engine, of all there was: 0 to 1, and a little over for what is read in a moment that passes."""
    swapin: float | None = None
    """Bytes moved to the GPU a second."""
    swapout: float | None = None
    """Bytes moved to the host a second."""
    throttled: float | None = None
    """Time for which it was kept from running, for its quota or the turn of another, of all there was: 0 to 1 for each
    process."""


UNKNOWN = Rates()


def between(before: Snapshot | None, after: Snapshot) -> Mapping[str, Rates]:
    """Of each process in `after`, by its directory. One that was not there before is left out."""
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
    """None also for a counter that went back: the books began anew."""
    old, new = getattr(before, field), getattr(after, field)
    return None if old is None or new is None or new < old else (new - old) / seconds


def total(parts: Iterable[Rates]) -> Rates:
    """The sum over processes. One that is not known leaves its figure out of the sum, unless none of them is known.

    Members come and go: the rate of those that were there is the honest one, where a slice's own counters would jump
    with each that joins it.
    """
    every = list(parts)

    def add(field: str) -> float | None:
        known = [value for rates in every if (value := getattr(rates, field)) is not None]
        return sum(known) if known else None

    return Rates(*(add(field.name) for field in attrs.fields(Rates)))
