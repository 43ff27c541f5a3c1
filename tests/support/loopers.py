"""Programs of a software GPU below a daemon with its scheduler, which use all of their pages in each step."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import trio

from backend.process.identity import Process
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, Harness
from tests.support.switched import Looper

Spawn = Callable[..., subprocess.Popen[bytes]]


class Programs:
    """Programs that use all of their pages in each step."""

    def __init__(self, h: Harness, gpu: SoftGpu, spawn: Spawn, nursery: trio.Nursery) -> None:
        self.h, self.gpu, self.spawn, self.nursery = h, gpu, spawn, nursery
        self.each: list[Looper] = []

    async def come(self, pages: int, cgroup: str = "/") -> Looper:
        """Start a program with `pages` pages."""
        process = await self.h.arrive(self.spawn().pid, cgroup)
        one = Looper(process, 0, range(0))
        one.tsg = await self.gpu.open_context(process, 1, one.finished, gated=True)
        one.pages = await self.gpu.allocate(process, pages * MIB)
        for page in one.pages:
            one.stamps[page] = page + process.pid
            self.gpu.write(process, page, one.stamps[page])
        self.each.append(one)
        self.nursery.start_soon(one.run, self.gpu)
        return one

    async def steps(self, seconds: float) -> list[int]:
        """Return the number of steps of each program in `seconds` seconds."""
        before = [one.steps for one in self.each]
        await trio.sleep(seconds)
        return [one.steps - start for one, start in zip(self.each, before, strict=True)]

    def check(self) -> None:
        """Check that no content is lost."""
        for one in self.each:
            assert all(self.gpu.read(one.process, page) == stamp for page, stamp in one.stamps.items())

    def turns(self, process: Process) -> int:
        """Return the number of memory turns that a program has had."""
        turned = self.h.controller.population.by_pid(process.pid).records[0].scheduled.turned
        return 0 if turned is None else turned.turns
