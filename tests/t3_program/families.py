"""What the tests of families share: a family, how a process asks for it, and where that is then."""

from __future__ import annotations

import os

from backend.core.families import Family
from backend.process.identity import Process, identify
from tests.support.harness import MIB, Harness

USER = os.geteuid()
ONE = Family(0x1234, USER, {"high": 8 * MIB})
"""A family of this user, of 8 MiB."""
NAME = ONE.name
"""What its slice is called."""


async def ask(h: Harness, pid: int, *families: Family, everywhere: bool = False) -> Process:
    """A process names its families."""
    process = identify(pid)
    await h.controller.bookkeeper.ask(process, families, everywhere=everywhere)
    return process


def where(h: Harness, process: Process) -> str:
    """The path of the slice of a process."""
    resident = h.controller.population.resident(process)
    assert resident is not None
    return resident.slice.path
