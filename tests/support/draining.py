"""Programs that fill behind another and drain when their turns end, on a software GPU with a scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import trio

from backend.core.member import Record
from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.process.identity import Member, Process
from tests.support.contenders import Bench, Programs
from tests.support.harness import MIB, Spawn, running

KERNEL_US = 5_000
"""Length of a filler's kernel, in microseconds."""
AHEAD = 4
"""Kernels that a filler launches ahead: 20 ms, its run-ahead and one kernel."""
SIZE = 8 * MIB
"""Bytes that each filler holds."""


class Fillers(Programs):
    """Programs that a gate holds back."""

    async def filler(self, cgroup: str = "/jobs", *, kernel_us: int = KERNEL_US, ahead: int = AHEAD) -> Process:
        """Start a program that always has work, uses all of its memory, and waits until it may launch."""
        process = await self.h.arrive(self.spawn().pid, cgroup)
        number = await self.gpu.open_context(process, 8, lambda finished: None, gated=True)
        pages = await self.gpu.allocate(process, SIZE)
        self.nursery.start_soon(self._fill, process, number, kernel_us, ahead, pages)
        await self.h.write(f"{process.pid}/0/compute.priority", 9)
        return process

    async def _fill(self, process: Process, number: int, kernel_us: int, ahead: int, pages: range) -> None:
        queue = self.gpu._tenants[process].tsgs[number].queue
        with contextlib.suppress(OSError):
            while True:
                if len(queue) < ahead:
                    await self.gpu.launch(process, number, 1, kernel_us, pages)
                else:
                    await trio.sleep(0.002)
                    self.gpu.activity(process)

    async def lead(self) -> Process:
        """Start a program of better priority that is always busy."""
        process = await self.batch(kernel_us=20_000)
        await self.h.write(f"{process.pid}/0/compute.priority", 0)
        return process

    def is_off(self, process: Process) -> bool:
        """Return whether a process is off the runlist for its turn."""
        return self.gpu._tenants[process].engines is Engines.GR

    def record(self, process: Process) -> Record:
        """Return the daemon's record of a process."""
        return self.h.controller.population.record(Member(process, 0))

    async def stat(self, process: Process, name: str) -> int:
        """Return a figure of a process's gmem.stat; 0 where it is absent."""
        said = dict(line.split() for line in (await self.h.read(f"{process.pid}/0/gmem.stat")).splitlines())
        return int(said.get(name, 0))


class Lagging(Bench):
    """A software GPU whose figures are LAG_S old when read, ten times a second, as those of a trace are."""

    LAG_S = 0.2

    def __init__(self) -> None:
        super().__init__()
        self._heard: dict[Process, list[tuple[float, int]]] = {}

    def activity(self, process: Process) -> Activity:
        found = super().activity(process)
        if found.gpu_usec is None:
            return found
        heard = self._heard.setdefault(process, [(0.0, 0)])
        at = int(10 * trio.current_time()) / 10 - self.LAG_S
        while len(heard) > 1 and heard[1][0] <= at:
            del heard[0]
        return attrs.evolve(found, gpu_usec=heard[0][1])

    async def follow(self) -> None:
        """Write the trace for ever; so the figures are never older, whatever programs do."""
        while True:
            for process in self._tenants:
                self._heard.setdefault(process, [(0.0, 0)]).append((trio.current_time(), self.used(process)))
            await trio.sleep(0.005)

    def used(self, process: Process) -> int:
        used = super().activity(process).gpu_usec
        assert used is not None
        return used


class Untold(Bench):
    """A software GPU whose driver refuses the trace: the time that a process uses is unknown."""

    is_traced = False
    """Whether there is a trace all the same."""

    def activity(self, process: Process) -> Activity:
        found = super().activity(process)
        return found if self.is_traced else attrs.evolve(found, gpu_usec=None, stays=None)

    def used(self, process: Process) -> int:
        used = super().activity(process).gpu_usec
        assert used is not None
        return used


class Sampled(Untold):
    """A software GPU that estimates once a second what a process used, as from samples of NVML."""

    def __init__(self) -> None:
        super().__init__()
        self._estimates: dict[Process, tuple[int, int]] = {}  # by process: the second, and the estimate

    def activity(self, process: Process) -> Activity:
        second, (at, estimate) = int(trio.current_time()), self._estimates.get(process, (-1, 0))
        if at != second:
            estimate = super().used(process)
            self._estimates[process] = second, estimate
        return attrs.evolve(super().activity(process), gpu_usec_estimate=estimate)


@contextlib.asynccontextmanager
async def fillers(spawn: Spawn, gpu: Bench | None = None) -> AsyncIterator[Fillers]:
    """A GPU, its daemon with a scheduler, and the programs on it."""
    gpu = gpu or Bench()
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        if isinstance(gpu, Lagging):
            nursery.start_soon(gpu.follow)
        yield Fillers(h, gpu, spawn, nursery)
        nursery.cancel_scope.cancel()
