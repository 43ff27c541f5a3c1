"""The interface to a manager of units, and the names of cgroups that are units.

systemd is one (:mod:`ggroupfs.units.systemd`); the tests have another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from backend.process.identity import Slice

SLICE = ".slice"
KINDS = (SLICE, ".service", ".scope")
"""Kinds of units that have a cgroup and may have a section."""


@attrs.frozen
class News:
    """A change reported by a manager."""

    unit: str | None
    """Unit that may have changed its state; None: everything was loaded again."""
    loaded: bool = False
    """Whether the unit was loaded or unloaded, so that its files may have changed."""
    active: bool | None = None
    """Whether the unit is active, activating or deactivating; None: ask the manager."""
    run: bytes = b""
    """A value that differs for each start of the unit, during which its cgroup stays in place; empty if unknown."""


class Connection(Protocol):
    """A connection to a manager. Calls may run concurrently; they raise ConnectionError once the connection is lost."""

    answered: int
    """Number of calls that the manager has answered."""

    async def run(self, tell: Callable[[News], None]) -> None:
        """Serve the calls and report changes in order. Returns once the connection is lost."""

    async def subscribe(self) -> None:
        """From the return of this call on, every change is reported."""

    async def active(self) -> Sequence[str]:
        """Return the names of active units of :data:`KINDS`."""

    async def files(self, unit: str) -> Sequence[Path]:
        """Return fragment and drop-ins of a unit, in the order of application; none if the unit is not loaded."""

    async def is_active(self, unit: str) -> bool:
        """Whether a unit is active, activating or deactivating."""

    async def cgroup(self, unit: str) -> str:
        """Return the path of a unit's cgroup; empty if it has none."""


class Manager(Protocol):
    """A manager of units."""

    @property
    def name(self) -> str:
        """Name shown in ``ggroup.backend``."""

    async def connect(self) -> Connection:
        """Return a new connection; its `run` has to be called. OSError if there is no manager."""


def unit_of(slice_: Slice) -> str | None:
    """Return the unit of the system manager that a cgroup belongs to; None if it is not a unit.

    Slices are below slices only; what is below a service or scope is managed by the programs in it.
    """
    *above, name = slice_.path.split("/")[1:]
    if not all(part.endswith(SLICE) for part in above) or not name.endswith(KINDS) or not name.isascii():
        return None
    return name.removeprefix("_")  # systemd escapes names that could be kernel files: cg_escape()
