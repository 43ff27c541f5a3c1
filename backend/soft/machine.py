"""What the software GPUs of one machine have in common: above all, which of them a program means by a number.

A program that is moved does not know it: its device 0 is another GPU from then on, as in CUDA's restore with a map.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import trio

from backend.process.identity import Process


class Gate:
    """The calls of one process, as cuCheckpointProcessLock sees them: those under way end, others wait outside."""

    def __init__(self) -> None:
        self._inside = 0
        self._shut = False
        self._waiting = trio.lowlevel.ParkingLot()

    @contextlib.asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """A call, as long as it lasts."""
        while self._shut:
            await self._waiting.park()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self._waiting.unpark_all()

    @contextlib.asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """Shut, with no call inside."""
        while self._shut:
            await self._waiting.park()
        self._shut = True
        try:
            while self._inside:
                await self._waiting.park()
            yield
        finally:
            self._shut = False
            self._waiting.unpark_all()


class Machine:
    """See the module. Numbers of GPUs are indices; a program that was never moved means what it says."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        """How many there are."""
        self.tsgs: Iterator[int] = itertools.count(1)
        """Numbers for TSGs: a program that is moved keeps those it knows."""
        self._meant: dict[Process, dict[int, int]] = {}
        self._gates: dict[Process, Gate] = {}

    def meant(self, process: Process, index: int) -> int:
        """The GPU that a program means by an index."""
        return self._meant.get(process, {}).get(index, index)

    def exchange(self, process: Process, one: int, other: int) -> None:
        """What a program meant by either of two GPUs, it means by the other: such maps are one to one."""
        meant = self._meant.setdefault(process, {index: index for index in range(self.gpus)})
        swapped = {one: other, other: one}
        self._meant[process] = {index: swapped.get(gpu, gpu) for index, gpu in meant.items()}

    def gate(self, process: Process) -> Gate:
        """Of the calls of one process."""
        return self._gates.setdefault(process, Gate())

    def forget(self, process: Process) -> None:
        """The process is gone."""
        self._meant.pop(process, None)
        self._gates.pop(process, None)
