"""State that the software GPUs of one machine share: above all, the GPU that a program means by an index.

A program that is migrated does not know it: its device 0 is another GPU from then on, as in CUDA's restore with a
map.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import trio

from backend.process.identity import Process


class Gate:
    """A gate for the calls of one process, like cuCheckpointProcessLock: calls under way end, others wait outside."""

    def __init__(self) -> None:
        self._inside = 0
        self._shut = False
        self._waiting = trio.lowlevel.ParkingLot()

    @contextlib.asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Be inside the gate for the length of a call."""
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
        """Keep the gate shut, with no call inside."""
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
    """The software GPUs of one machine, by index. A program that was never migrated means the indices that it says."""

    def __init__(self, gpus: int = 1) -> None:
        self.gpus = gpus
        """Number of GPUs."""
        self.tsgs: Iterator[int] = itertools.count(1)
        """Numbers for TSGs, unique on the machine: a program that is migrated keeps those it knows."""
        self._meant: dict[Process, dict[int, int]] = {}
        self._gates: dict[Process, Gate] = {}

    def meant(self, process: Process, index: int) -> int:
        """Return the GPU that a program means by an index."""
        return self._meant.get(process, {}).get(index, index)

    def exchange(self, process: Process, one: int, other: int) -> None:
        """Swap the two GPUs in what a program means by an index, so that the mapping stays one to one."""
        meant = self._meant.setdefault(process, {index: index for index in range(self.gpus)})
        swapped = {one: other, other: one}
        self._meant[process] = {index: swapped.get(gpu, gpu) for index, gpu in meant.items()}

    def gate(self, process: Process) -> Gate:
        """Return the gate of a process."""
        return self._gates.setdefault(process, Gate())

    def forget(self, process: Process) -> None:
        """Forget a process that is gone."""
        self._meant.pop(process, None)
        self._gates.pop(process, None)
