"""Programs with the library on a GPU that takes as long as an H200, and the daemon's own parts, on dilated clocks.

The double of the driver (``tests/t6_cuda/fake/timed.c``) has one engine, a bus of two directions and the driver's lock,
which all programs share. Memory has no contents, so that programs are as large as real ones. Figures: what was measured
on an H200 with the stock driver. All clocks, of programs and of the daemon, are DILATION times as slow as real time.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterator
from ctypes import c_uint32, c_uint64
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import attrs
import trio

from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.core.turns import TurnEnd
from backend.core.workingset import WorkingSet
from backend.cuda import server
from backend.cuda.peers import Peers
from backend.door import tenants
from backend.door.wire import CUDA_ALL
from backend.nvidia.opening import CHUNK
from backend.process.identity import Process, Slice, identify
from ggroupfs.client.reading import flat
from tests.support.harness import Harness, World, running
from tests.t6_cuda.daemon import CudaStub
from tests.t6_cuda.harness import build, command, environment

GIB, MIB = 1 << 30, 1 << 20
UUID = f"GPU-{uuid.UUID(bytes=b'FAKEFAKEFAKEFAK' + bytes(1))}"
"""That of the double's first GPU."""
DILATION = int(os.environ.get("GGROUP_DILATION", "10"))
"""Times as slow as real time all clocks are: what a busy machine is late by counts for so much less."""
US, MS = 1_000, 1_000_000
RATE = 50 * 10**9
"""Bytes a second, each way while the other is as busy."""
MEMORY_RATE = 3900 * 10**9
SWITCH_NS = 200 * US
SLICE_NS = 2048 * US
LEVER_NS = 800 * US
"""A call of the driver that takes channels off the runlist, or puts them there; in its lock."""
CALLS = (
    # Of the GPU, of the host: ns, and ns for each 64 MiB.
    ((12 * US, 0), (50 * US, 20 * MS)),  # create: 4 GiB of the host take 1.0 to 1.5 s
    ((3 * US, 0), (3 * US, 0)),  # map
    ((30 * US, 0), (20 * US, 980 * US)),  # access
    ((30 * US, 0), (30 * US, 400 * US)),  # unmap
    ((60 * US, 0), (60 * US, 3 * MS)),  # release
)


class DilatedClock(trio.abc.Clock):
    """The clock that the programs have (``tests/t6_cuda/dilated/dilated.c``)."""

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        return time.monotonic() / DILATION

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return (deadline - self.current_time()) * DILATION


def now_ns() -> int:
    """CLOCK_MONOTONIC of the programs, nanoseconds."""
    return time.monotonic_ns() // DILATION


class Call(ctypes.Structure):
    _fields_ = [("ns", c_uint64), ("bytes_ns", c_uint64)]


class Slot(ctypes.Structure):
    """A program, in the page."""

    _fields_ = [
        *(("pid", c_uint32), ("off", c_uint32), ("busy", c_uint64), ("stays", c_uint64), ("passes", c_uint64)),
        *(("wants", c_uint32), ("stop", c_uint32), ("slice", c_uint64), ("read", c_uint64 * 2)),
    ]


class Page(ctypes.Structure):
    """The page of timed.c."""

    _fields_ = [
        *(("rate", c_uint64 * 2), ("memory_rate", c_uint64), ("switch_ns", c_uint64)),
        ("call", (Call * 2) * 5),
        *(("free", c_uint64 * 2), ("carried", c_uint64 * 2), ("waited", c_uint64 * 2)),
        *(("driver_free", c_uint64), ("driver_busy", c_uint64), ("driver_waited", c_uint64)),
        *(("lock", c_uint32), ("owner", c_uint32), ("engine_free", c_uint64), ("slice_until", c_uint64)),
        ("program", Slot * 16),
    ]


@contextlib.contextmanager
def machine(path: Path) -> Iterator[Page]:
    """What programs with FAKE_TIMED=path share."""
    path.write_bytes(bytes(-(-ctypes.sizeof(Page) // 4096) * 4096))
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    page = Page.from_buffer(mapped)
    page.rate[0] = page.rate[1] = RATE
    page.memory_rate, page.switch_ns = MEMORY_RATE, SWITCH_NS
    for number, both in enumerate(CALLS):
        for host, (ns, bytes_ns) in enumerate(both):
            page.call[number][host].ns, page.call[number][host].bytes_ns = ns, bytes_ns
    for slot in page.program:
        slot.slice = SLICE_NS
    yield page


class TimedGpu(CudaStub):
    """The GPU of that machine, as the daemon has it."""

    def __init__(self, page: Page, capacity: int) -> None:
        super().__init__()
        self.info = attrs.evolve(self.info, uuid=UUID, capacity=capacity, chunk=CHUNK)
        self.managed.info = self.info
        self.page = page
        self.leaves = Counter[Process]()
        """Reclaims that are under way."""
        self.levers: list[float] = []
        """Seconds that each call of the driver took."""

    def slot(self, process: Process) -> Slot | None:
        return next((one for one in self.page.program if one.pid == process.pid), None)

    def activity(self, process: Process) -> Activity:
        slot = self.slot(process)
        if slot is None:
            return Activity(managed=process in self.managed)
        submitted, finished = self.managed.counts(process) or (None, None)
        pending = None if submitted is None or finished is None else submitted - finished
        return Activity(
            submitted=submitted,
            finished=finished,
            pending=pending,
            gpu_usec=slot.busy // 1000,
            tsgs=1,
            channels=8,
            attached=int(not slot.off),
            managed=process in self.managed,
            contexts=1,
            stays=slot.stays,
        )

    async def _call(self) -> None:
        """A call of the driver: behind those that programs make."""
        began = trio.current_time()
        start = max(self.page.driver_free, now_ns())
        self.page.driver_free = start + LEVER_NS
        await trio.sleep(max(0.0, (start + LEVER_NS - now_ns()) / 1e9))
        self.levers.append(trio.current_time() - began)

    async def _set_off(self, process: Process, off: bool) -> None:
        await self._call()
        if (slot := self.slot(process)) is not None:
            slot.off = int(off)

    async def set_timeslice(self, process: Process, us: int) -> None:
        await self._call()
        if (slot := self.slot(process)) is not None:
            slot.slice = us * 1000 or SLICE_NS

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        await self._set_off(process, True)

    async def attach(self, process: Process) -> None:
        await self._set_off(process, False)

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        return await self.managed.end_turn(process, bound_us, leaves)

    async def begin_turn(self, process: Process) -> None:
        self.managed.begin_turn(process)

    def working_set(self, process: Process) -> WorkingSet | None:
        return self.managed.working_set(process)

    def shares(self, process: Process) -> frozenset[Hashable] | None:
        return self.managed.shares(process)

    async def prepare(self, process: Process, nbytes: int) -> int:
        return await self.managed.prepare(process, nbytes)

    async def reclaim(self, process: Process, nbytes: int) -> int:
        self.leaves[process] += 1
        try:
            return await self.managed.reclaim(process, nbytes)
        finally:
            self.leaves[process] -= 1

    def is_leaving(self, process: Process) -> bool:
        return self.leaves[process] > 0


@attrs.define(eq=False)
class Decoder:
    """decodes.c, running."""

    popen: subprocess.Popen[bytes]
    process: Process
    log: Path
    page: Page

    @property
    def slot(self) -> Slot | None:
        return next((one for one in self.page.program if one.pid == self.process.pid), None)

    @property
    def passes(self) -> int:
        return 0 if self.slot is None else int(self.slot.passes)


@attrs.define(eq=False)
class Rig:
    """The daemon's parts, and programs in one slice."""

    h: Harness
    gpu: TimedGpu
    page: Page
    socket: Path
    programs: list[Decoder] = attrs.field(factory=list)
    slice: str = "/job"

    def start(self, directory: Path, mib: int, layers: int, *options: str) -> Decoder:
        """A program in the slice."""
        log = directory / f"log{len(self.programs)}"
        extra = {
            "FAKE_TIMED": os.fspath(directory / "machine"),
            "FAKE_DILATION": str(DILATION),
            "FAKE_MEMORY": str(self.gpu.info.capacity),
            "GGROUP_SOCKET": os.fspath(self.socket),
            "GGROUP_CUDA_LOG": "1",
        }
        words = command("decodes", mib, layers, *options)
        words[1] = words[1].replace("LD_PRELOAD=", f"LD_PRELOAD={build() / 'libdilated.so'}:")
        with open(log, "wb") as errors:
            popen = subprocess.Popen(words, env=environment("", extra), stderr=errors)
        self.h.world.cgroups[popen.pid] = Slice(self.slice)
        one = Decoder(popen, identify(popen.pid), log, self.page)
        self.programs.append(one)
        return one

    async def work(self) -> None:
        """Waits until each has done something."""
        while not all(one.passes for one in self.programs):  # noqa: ASYNC110 - it is found by polling
            await trio.sleep(0.01)

    @property
    def files(self) -> str:
        return f"slice{self.slice}/0/"

    @property
    def read(self) -> tuple[int, int]:
        """Bytes that the kernels of all have read of the GPU, and over the bus."""
        slots = [slot for one in self.programs if (slot := one.slot) is not None]
        return sum(slot.read[0] for slot in slots), sum(slot.read[1] for slot in slots)

    async def stat(self) -> dict[str, int]:
        return {
            **flat(await self.h.read(f"{self.files}gmem.stat")),
            **flat(await self.h.read(f"{self.files}gcgroup.stat")),
        }

    async def rates(self, seconds: float) -> list[float]:
        """Passes a second of each."""
        before, began = [one.passes for one in self.programs], trio.current_time()
        await trio.sleep(seconds)
        took = trio.current_time() - began
        return [(one.passes - start) / took for one, start in zip(self.programs, before, strict=True)]


@contextlib.asynccontextmanager
async def rigged(directory: Path, capacity: int = 80 * GIB) -> AsyncIterator[Rig]:
    """A machine, its daemon, and no program yet."""
    clock = SimpleNamespace(monotonic_ns=now_ns)
    with machine(directory / "machine") as page, mock.patch.object(server, "time", clock):
        gpu, path = TimedGpu(page, capacity), directory / "socket"
        with tenants.listening(path) as listener:
            async with running(gpu, world=World(), scheduler=True) as h, trio.open_nursery() as nursery:
                nursery.start_soon(server.serve, listener, {0: gpu.managed}, 0, Peers(offers=CUDA_ALL))
                rig = Rig(h, gpu, page, path)
                try:
                    yield rig
                finally:
                    for one in rig.programs:
                        one.popen.kill()
                        one.popen.wait()
                nursery.cancel_scope.cancel()
