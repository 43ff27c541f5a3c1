"""A program's own access to the driver: with its open files, so that RM cannot tell the test from the program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from backend.nvidia import levers, linux, rm
from backend.nvidia.discover import Census, ClientCounter, Handles, Tsg
from backend.nvidia.levers import Controls
from backend.process.identity import Process, identify


@attrs.define
class Inside:
    """Access with a program's open files; see the module."""

    system: linux.System
    process: Process
    handles: Handles

    @contextmanager
    def own(self) -> Iterator[tuple[Controls, list[Tsg]]]:
        """Yield its open files, and the TSGs that it has through them."""
        self.handles.wide(force=True)
        with rm.borrowed(self.system, self.process, self.handles.fds()) as controls:
            tsgs = [*self.handles.tsgs()]
            assert tsgs
            yield controls, tsgs

    def timeslices(self) -> list[int]:
        """Return the timeslices of its GR TSGs from the driver, in microseconds."""
        with self.own() as (controls, tsgs):
            return sorted(levers.timeslices(controls, levers.shares(tsgs, 0)).values())


@contextmanager
def insides() -> Iterator[Callable[[int], Inside]]:
    """Yield a function for the pids of programs that start afterwards, so that the place of their clients is known."""
    system = linux.LinuxSystem()
    counter = ClientCounter(system)

    def of(pid: int) -> Inside:
        process = identify(pid)
        return Inside(system, process, Census(system, counter).of(process))

    try:
        yield of
    finally:
        counter.close()
        system.end()
