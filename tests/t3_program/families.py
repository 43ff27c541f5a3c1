"""Shared by tests of families: a family, how a process asks for it, and the slice that the process is in afterwards."""

from __future__ import annotations

import os

from backend.core.families import Family
from backend.process.identity import Process, identify
from tests.support.harness import MIB, Harness

USER = os.geteuid()
ONE = Family(0x1234, USER, {"high": 8 * MIB})
"""A family of this user, limited to 8 MiB."""
NAME = ONE.name
"""Name of its slice."""


async def ask(h: Harness, pid: int, *families: Family, everywhere: bool = False) -> Process:
    """Have a process name its families."""
    process = identify(pid)
    await h.controller.bookkeeper.ask(process, families, everywhere=everywhere)
    return process


def where(h: Harness, process: Process) -> str:
    """Return the path of a process's slice."""
    resident = h.controller.population.resident(process)
    assert resident is not None
    return resident.slice.path
