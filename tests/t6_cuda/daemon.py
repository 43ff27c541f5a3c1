"""The daemon's end of the socket of CUDA programs, with a stub program at the other end."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from backend.core.protocols import Bookkeeping
from backend.core.records import Activity, Footprint
from backend.cuda import server
from backend.cuda.managed import Managed
from backend.cuda.peers import Peers
from backend.door import tenants
from backend.process.identity import Member, Process, identify
from tests.support.harness import Harness, StubGpu, World, running

GIB, MIB = 1 << 30, 1 << 20


class CudaStub(StubGpu):
    """A GPU of 80 GiB whose programs are managed, without a driver."""

    def __init__(self) -> None:
        super().__init__(capacity=80 * GIB)
        self.info = attrs.evolve(self.info, uuid="GPU-50f79900-0000-4000-8000-000000000000", granule=2 * MIB)
        self.managed = Managed(self.info)

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self.managed.bookkeeper = bookkeeper
        await super().run(bookkeeper, task_status=task_status)

    def activity(self, process: Process) -> Activity:
        submitted, finished = self.managed.counts(process) or (None, None)
        return Activity(submitted=submitted, finished=finished, managed=process in self.managed)

    def manages(self, process: Process) -> bool:
        return process in self.managed

    def spoken(self, process: Process) -> float:
        return self.managed.spoken(process)

    def footprint(self, process: Process) -> Footprint:
        return self.managed.footprint(process) if process in self.managed else Footprint(movable=0)

    def offer(self, room: Callable[[Process], int]) -> None:
        self.managed.offer(room)

    def rank(self, behind: Mapping[Process, Sequence[Process]], hold_us: int) -> None:
        self.managed.rank(behind, hold_us)

    async def reclaim(self, process: Process, nbytes: int) -> int:
        return await self.managed.reclaim(process, nbytes)

    def forget(self, process: Process) -> None:
        self.managed.forget(process)


class Program:
    """A running daemon_main.c."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen
        self.process = identify(popen.pid)

    async def do(self, *words: object) -> list[int]:
        """Send a command; return the numbers of the answer."""
        return await trio.to_thread.run_sync(partial(self._do, " ".join(map(str, words))))

    def _do(self, line: str) -> list[int]:
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.popen.stdin.write(line.encode() + b"\n")
        self.popen.stdin.flush()
        return [int(word) for word in self.popen.stdout.readline().split()]


@attrs.define
class Daemon:
    h: Harness
    gpu: CudaStub

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 10) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"never: {what}"
            await trio.sleep(0.005)

    def books(self, program: Program) -> tuple[int, int]:
        """Return the MiB that are on the GPU, and in the host, by the books."""
        books = self.h.ledger.books(Member(program.process, 0))
        return books.current // MIB, books.swap // MIB

    def away(self, program: Program) -> int:
        """Return the bytes that it reported as possibly off the GPU for a moment."""
        return self.gpu.managed._programs[program.process].holding.away

    def lent(self, program: Program) -> int:
        """Return the bytes that it reported as held by others through descriptors alone."""
        return self.gpu.managed._programs[program.process].holding.lent


@contextlib.asynccontextmanager
async def serving(path: Path, peers: Peers | None = None) -> AsyncIterator[Daemon]:
    """Run a daemon at `path`."""
    gpu = CudaStub()
    with tenants.listening(path) as listener:
        async with running(gpu, world=World()) as h, trio.open_nursery() as nursery:
            nursery.start_soon(server.serve, listener, {0: gpu.managed}, 0, peers)
            yield Daemon(h, gpu)
            nursery.cancel_scope.cancel()
