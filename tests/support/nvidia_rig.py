"""One GPU of the NVIDIA package on a fake driver, with programs on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import attrs
import trio
from trio.testing import MockClock

from backend.nvidia import rm
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.notes import NoNotes
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from backend.process.identity import Process
from tests.support.fake_nvidia import FakeBookkeeper, FakeNvml, FakeSystem, Program, patient
from tests.support.mounted import eventually

ON_THE_GPU = {rm.SET_TIMESLICE, rm.FIFO_DISABLE_CHANNELS, rm.FIFO_GET_CHANNEL_STATE}
"""Controls that reach the GPU; the others only read the driver's own memory."""

OWN_FILES = 5
"""Descriptors that are held for good: one for the counter, two for each of the two GPUs."""


@attrs.define
class Rig:
    fake: FakeSystem
    nvml: FakeNvml
    gpus: list[NvidiaGpu]
    bookkeeper: FakeBookkeeper

    def busy(self, pid: int, *gpus: int, nbytes: int | None = 100) -> Program:
        """Start a program that NVML lists."""
        program = self.fake.program(pid, *gpus)
        for gpu in gpus:
            self.nvml.compute.setdefault(gpu, []).append((pid, nbytes))
        return program


def drive(
    test: Callable[[Rig], Awaitable[None]],
    prepare: Callable[[FakeSystem, FakeNvml], object] = lambda fake, nvml: None,
) -> None:
    """Run a test with two GPUs; afterwards no descriptor may be left open.

    Threads that are no longer waited for (backend.common.threads) close theirs when they are done, maybe afterwards.
    """
    fake, nvml = FakeSystem(), FakeNvml()
    prepare(fake, nvml)

    async def main() -> None:
        gpus = await open_gpus(system=fake, nvml=Nvml(nvml), selftest=False)  # type: ignore[arg-type]
        try:
            await test(Rig(fake, nvml, gpus, FakeBookkeeper()))
        finally:
            fake.release.set()
            nvml.release.set()

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: bool(fake.hang) or nvml.hang):
        trio.run(main, clock=clock)
    if not fake.hang:
        own = OWN_FILES if fake.readback else 1
        eventually(lambda: len(fake.open) == own, f"{own} descriptors are open")


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[None]:
    """Have the first GPU find processes and follow them; otherwise it only does as it is told."""
    async with trio.open_nursery() as nursery:
        await nursery.start(rig.gpus[0].run, rig.bookkeeper)
        yield
        nursery.cancel_scope.cancel()


class Written(NoNotes):
    """Notes of timeslices by process, the latest last; an empty note removes the entry."""

    def __init__(self) -> None:
        self.notes: dict[Process, Mapping[str, int]] = {}

    def note(self, process: Process, timeslices: Mapping[str, int]) -> None:
        self.notes.pop(process, None)
        if timeslices:
            self.notes[process] = timeslices


MS = 1_000_000


@attrs.define
class Clock:
    """A GPU's clock that the test sets."""

    ns: int = 1_000_000 * MS

    def __call__(self) -> int:
        return self.ns
