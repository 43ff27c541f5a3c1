"""Programs that contend for one software GPU, as a daemon with a scheduler has them, in virtual time."""

from __future__ import annotations

import contextlib
import errno
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from backend.core.reasons import Engines
from backend.core.settings import Lever
from backend.process.identity import Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, Harness

Spawn = Callable[..., subprocess.Popen[bytes]]

REQUEST_US = 8600
"""Engine time of one request of a service, in microseconds."""
LOOK_S = 0.0005
"""Seconds by which the end of a request may be noticed late."""


class Bench(SoftGpu):
    """A software GPU that records each move of a lever."""

    def __init__(self) -> None:
        super().__init__(0, SoftConfig(capacity=64 * MIB))
        self.moved: list[float] = []
        """Times of the moves, in seconds."""
        self.broken: set[Process] = set()
        """Processes whose TSGs cannot be detached."""
        self.ranks: list[tuple[Mapping[Process, Sequence[Process]], int]] = []
        """Arguments of each `rank`: which programs follow which, and how long they are held."""

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        self.ranks.append((behind, hold_us))

    async def set_lever(self, lever: Lever, process: Process, value: int) -> None:
        self.moved.append(trio.current_time())
        await super().set_lever(lever, process, value)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        self.moved.append(trio.current_time())
        if process in self.broken:
            raise OSError(errno.EIO, "the driver")
        await super().detach(process, engines)

    async def attach(self, process: Process) -> None:
        self.moved.append(trio.current_time())
        await super().attach(process)

    def calls(self, since: float) -> int:
        """Return how many moves were made at or after `since`."""
        return sum(at >= since for at in self.moved)

    def used(self, process: Process) -> int:
        """Return the engine time that a process has used, in microseconds."""
        used = self.activity(process).gpu_usec
        assert used is not None
        return used

    def timeslices(self, process: Process) -> int:
        """Return the sum of the timeslices of a process's TSGs, in microseconds."""
        return sum(tsg.timeslice for tsg in self._tenants[process].tsgs.values()) // 1000

    def is_attached(self, process: Process) -> bool:
        """Return whether a process's TSGs are on the runlist."""
        return self.activity(process).attached > 0


@attrs.define
class Programs:
    """Programs of one GPU."""

    h: Harness
    gpu: Bench
    spawn: Spawn
    nursery: trio.Nursery

    async def batch(self, cgroup: str = "/", *, contexts: int = 1, kernel_us: int = 500, idle: bool = False) -> Process:
        """Start a program that always has work, unless it is `idle`."""
        process = await self.h.arrive(self.spawn().pid, cgroup)
        for _ in range(contexts):
            number = await self.gpu.open_context(process, 8, lambda finished: None)
            if not idle:
                self.nursery.start_soon(self._feed, process, number, kernel_us)
        return process

    async def _feed(self, process: Process, number: int, kernel_us: int) -> None:
        tsg = self.gpu._tenants[process].tsgs[number]
        with contextlib.suppress(OSError):
            while True:
                if len(tsg.queue) < 1 + 100_000 // kernel_us:
                    await self.gpu.launch(process, number, 1 + 100_000 // kernel_us, kernel_us, range(0))
                await trio.sleep(0.05)

    async def service(self, cgroup: str = "/", *, load: float = 0.35) -> tuple[Process, list[float]]:
        """Start a program that gets requests of 8.6 ms at random; return it, and a list of their latencies, seconds."""
        process = await self.h.arrive(self.spawn().pid, cgroup)
        waiting: list[float] = []
        latencies: list[float] = []

        def finished(count: int) -> None:
            while len(latencies) < count:
                latencies.append(trio.current_time() - waiting[len(latencies)])

        number = await self.gpu.open_context(process, 8, finished)
        queue = self.gpu._tenants[process].tsgs[number].queue

        async def requests() -> None:
            chance = random.Random(1)
            with contextlib.suppress(OSError):
                while True:
                    await trio.sleep(chance.expovariate(load * 1e6 / REQUEST_US))
                    waiting.append(trio.current_time())
                    await self.gpu.launch(process, number, 1, REQUEST_US, range(0))

        async def look() -> None:
            """Look whenever a request may be done, which is not before the engine has had time for the rest of it.
            Completions are reported at a look, and up to 10 ms late beside long kernels."""
            while True:
                left_s = queue[0] / 1e9 if queue else REQUEST_US / 1e6
                await trio.sleep(max(LOOK_S, left_s))
                self.gpu.activity(process)

        self.nursery.start_soon(requests)
        self.nursery.start_soon(look)
        return process, latencies

    async def shares(self, processes: Sequence[Process], seconds: float) -> list[float]:
        """Return the share of the time that each process uses."""
        before = [self.gpu.used(process) for process in processes]
        await trio.sleep(seconds)
        return [(self.gpu.used(p) - b) / seconds / 1e6 for p, b in zip(processes, before, strict=True)]
