"""What is asked of a manager of units, and which cgroups are units of it.

systemd is one (:mod:`ggroupfs.units.systemd`); tests have another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from backend.process.identity import Slice

SLICE = ".slice"
KINDS = (SLICE, ".service", ".scope")
"""Units that have a cgroup and may have a section."""


@attrs.frozen
class News:
    """Something that a manager tells."""

    unit: str | None
    """Whose state may have changed; None: everything was loaded again."""
    loaded: bool = False
    """The unit was loaded or unloaded: its files may say something else."""
    active: bool | None = None
    """Whether it was started, or is being started or stopped; None where that is to be asked for."""
    run: bytes = b""
    """Another each time it is started, and until then its cgroup is where it is; empty where it is not told."""


class Connection(Protocol):
    """A way to a manager. Calls may run at the same time; ConnectionError once it is lost."""

    answered: int
    """Calls that it has answered."""

    async def run(self, tell: Callable[[News], None]) -> None:
        """Serves the calls, and tells what happens, in its order. Returns once the connection is lost."""

    async def subscribe(self) -> None:
        """From its return on, everything that happens is told."""

    async def active(self) -> Sequence[str]:
        """The names of units of :data:`KINDS` that are active."""

    async def files(self, unit: str) -> Sequence[Path]:
        """Fragment and drop-ins of a unit, in the order in which they count; none of a unit that is not loaded."""

    async def is_active(self, unit: str) -> bool:
        """Whether a unit was started, or is being started or stopped."""

    async def cgroup(self, unit: str) -> str:
        """The path of the cgroup of a unit, empty where it has none."""


class Manager(Protocol):
    """Where the units are."""

    @property
    def name(self) -> str:
        """Shown in ``ggroup.backend``."""

    async def connect(self) -> Connection:
        """A new connection, whose `run` is to be called; OSError where there is nobody."""


def unit_of(slice_: Slice) -> str | None:
    """The unit of the system manager that a cgroup is, None for one that is none.

    Slices are below slices only; what is below a service or scope is the business of who is in it.
    """
    *above, name = slice_.path.split("/")[1:]
    if not all(part.endswith(SLICE) for part in above) or not name.endswith(KINDS) or not name.isascii():
        return None
    return name.removeprefix("_")  # systemd escapes what could be a kernel's file: cg_escape()
