"""The daemon with NVIDIA GPUs that exist only in memory, on a real mount; the page says which programs have a context.

Programs are real. Their descriptors of the driver's file are those of the driver in memory, and those that the kernel
says have that name: a false one of a tenant is met as on a real machine.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import trio

import backend.nvidia.opening
from backend.core.records import GpuInfo
from backend.cuda.migrations import Standby
from backend.nvidia import discover
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.linux import LinuxSystem
from backend.nvidia.nvml import Nvml
from backend.process.identity import Process, start_time
from ggroupfs import cli
from tests.hostile.page import PLACES, TENANTS, Page, Word
from tests.support.fake_nvidia import FakeNvml, FakeSystem, Program

GPUS = 2
RUN = 32
"""Number of unused handles in a row after which a search ends."""
PATIENCE_S = 60.0
"""Seconds for another thread's call, however busy this machine is."""
FIRST_FAKE = 1 << 20
"""First descriptor number of the driver in memory."""


class Programs:
    """The programs that have a context, according to the page."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._places = [Word.NEIGHBOUR_PLACE, *(page.place(t, n) for t in range(TENANTS) for n in range(PLACES))]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield pid and place of each."""
        for place in self._places:
            if pid := int(self._page.words[place]):
                yield pid, place

    def held(self, gpu: int) -> list[tuple[int, int]]:
        """Return pid and bytes of each that has memory on a GPU."""
        found = {pid: int(self._page.words[place + 1 + gpu]) for pid, place in self}
        return [(pid, nbytes) for pid, nbytes in found.items() if nbytes and _lives(pid)]

    def move(self, pid: int, source: int, target: int) -> None:
        """Move a program to another GPU."""
        for found, place in self:
            if found == pid:
                words = self._page.words
                words[place + 1 + source], words[place + 1 + target] = 0, words[place + 1 + source]


def _lives(pid: int) -> bool:
    try:
        start_time(pid)
    except OSError:
        return False
    return True


class Driver(FakeSystem):
    """System calls: real ones about real processes, and those of the driver in memory."""

    def __init__(self, programs: Programs) -> None:
        super().__init__(trace=None)
        self._known = programs
        self._real = LinuxSystem()
        self._lock = threading.RLock()
        self._pids: dict[int, int] = {}  # pid by pidfd
        self._next = FIRST_FAKE

    def _program(self, pid: int) -> Program | None:
        """Return the context of a process, made at the first look."""
        with self._lock:
            start = self._real.start_time(pid)
            program = self.programs.get(pid)
            if program is not None and program.start != start:
                self.kill(pid)
                program = None
            if program is None and any(found == pid for found, _ in self._known):
                program = self.program(pid, start=start)
                program.ctl += FIRST_FAKE
                program.files = {number + FIRST_FAKE: file for number, file in program.files.items()}
                for gpu in range(GPUS):
                    program.context(gpu)
            return program

    def forget_the_dead(self) -> None:
        """Drop contexts of dead processes, as when their last descriptors are closed."""
        with self._lock:
            for pid in [pid for pid in self.programs if not _lives(pid)]:
                self.kill(pid)

    def control_fds(self, pid: int) -> Sequence[int]:
        program = self._program(pid)
        return [*self._real.control_fds(pid), *(program.files if program is not None else ())]

    def pidfd_open(self, pid: int) -> int:
        pidfd = self._real.pidfd_open(pid)
        self._pids[pidfd] = pid
        return pidfd

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        start, real = self._real.look(pid, [fd for fd in fds if fd < FIRST_FAKE])
        program = self._program(pid)
        return start, [*real, *(fd for fd in fds if program is not None and fd in program.files)]

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        if fd < FIRST_FAKE:
            return self._real.pidfd_getfd(pidfd, fd)
        with self._lock:
            program = self._program(self._pids[pidfd])
            if program is None or fd not in program.files:
                raise OSError(9, os.strerror(9))
            program.files[fd].references += 1
            return self._new(program.files[fd])

    def start_time(self, pid: int) -> int:
        return self._real.start_time(pid)

    def pid_namespace(self) -> int:
        return self._real.pid_namespace()

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        if fd < FIRST_FAKE:
            return self._real.ioctl(fd, request, argument)
        with self._lock:
            super().ioctl(fd, request, argument)
        return None

    def close(self, fd: int) -> None:
        if fd < FIRST_FAKE:
            self._pids.pop(fd, None)
            return self._real.close(fd)
        with self._lock:
            super().close(fd)
        return None


class Counted(FakeNvml):
    """An NVML that lists the programs that have a context."""

    def __init__(self, programs: Programs, driver: Driver) -> None:
        super().__init__(count=GPUS)
        self._known = programs
        self._driver = driver

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-50f79900-0000-4000-8000-{device:012x}"

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> Iterator[Any]:
        self._driver.forget_the_dead()
        return iter([SimpleNamespace(pid=pid, usedGpuMemory=n) for pid, n in self._known.held(device)])


async def open_gpus(page: Page) -> list[NvidiaGpu]:
    """Stand in for :func:`backend.nvidia.opening.open_gpus`."""
    programs = Programs(page)
    driver = Driver(programs)
    gpus = await _open_gpus(
        system=driver,
        nvml=Nvml(Counted(programs, driver)),  # type: ignore[arg-type]
        selftest=False,
    )

    async def move(
        process: Process,
        source: GpuInfo,
        target: GpuInfo,
        held: int,
        carried: int | None = None,
        standby: Standby | None = None,
    ) -> None:
        """Act as the agent, as far as the daemon sees it."""
        if standby is None:
            await trio.sleep(0.01)
            programs.move(process.pid, source.index, target.index)
            return
        try:
            await standby.begin()
            programs.move(process.pid, source.index, target.index)
            standby.end()
        finally:
            standby.over.set()

    for gpu in gpus:
        gpu.mover.move = move  # type: ignore[method-assign]
    return gpus


_open_gpus = backend.nvidia.opening.open_gpus


def main() -> int:
    """Run as ``ggroupfs``, with the descriptor of the page before its words."""
    page = Page(int(sys.argv[1]))
    os.set_inheritable(page.descriptor, False)

    async def ours(**_: object) -> list[NvidiaGpu]:
        return await open_gpus(page)

    backend.nvidia.opening.open_gpus = ours  # type: ignore[assignment]
    # A call costs the CPU four times as much here as with the driver; and handles have no gaps here.
    discover.FIRST_RUN = discover.WIDE_RUN = RUN
    discover.WAIT_S = PATIENCE_S
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
