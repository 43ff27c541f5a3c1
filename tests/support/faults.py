"""Have the driver and NVML fail on a plan, so that the consequences of every fault can be tried without a GPU.

A plan is a list of :class:`Fault`; each names the calls that it applies to and their outcome. :class:`FaultySystem` and
:class:`FaultyNvml` stand between the code and what they wrap, which may be the real driver. A test that wants faults
puts them there (``open_gpus(system=, nvml=)``).
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from trio.testing import MockClock

import backend.core.membership
import backend.process.exits
import backend.process.identity
from backend.nvidia import rm
from backend.nvidia.gpu import NvidiaGpu
from backend.nvidia.linux import System
from backend.nvidia.nvml import Nvml
from backend.nvidia.opening import open_gpus
from tests.support.fake_nvidia import FakeNvml, FakeSystem, Program, patient
from tests.support.harness import MIB, Harness, Spawn, running

STATUS_AT = {
    rm.IOCTL_FREE: 12,
    rm.IOCTL_CONTROL: 28,
    rm.IOCTL_ALLOC: 28,
    rm.IOCTL_MAP_MEMORY: 40,
}
"""Offset of RM's status in the argument of each request; card info has none."""

REQUESTS = {
    rm.IOCTL_FREE: "free",
    rm.IOCTL_CONTROL: "control",
    rm.IOCTL_ALLOC: "alloc",
    rm.IOCTL_MAP_MEMORY: "map_memory",
    rm.IOCTL_CARD_INFO: "card_info",
}
"""Names of requests of ioctl(2) in a plan. Other calls have the names of methods of :class:`System`."""


@attrs.define(eq=False)
class Fault:
    """A set of calls, and their outcome. Where several faults of a plan fit a call, the first is used."""

    call: str
    """A value of REQUESTS, a method of :class:`System`, or a function of NVML."""
    number: int | None = None
    """Command of a control, or class of an allocation; None for any."""
    gpu: int | None = None
    """Device of a function of NVML; None for any."""
    after: int = 0
    """Number of matching calls that pass first."""
    times: int | None = None
    """Number of matching calls that then fail; None for all."""
    errno: int = 0
    """Errno with which the system call fails."""
    status: int = 0
    """Status that RM or NVML returns without having acted."""
    late: bool = False
    """Whether RM or NVML acts before it returns `status`."""
    nothing: bool = False
    """Whether the call reports success without having acted."""
    seconds: float = 0.0
    """Delay before anything else, in seconds."""
    hangs: threading.Event | None = None
    """Event until which the call hangs."""
    met: int = 0
    """Number of matching calls so far."""
    stuck: int = 0
    """Threads that are in a call that hangs."""

    def fits(self, call: str, number: int | None, gpu: int | None) -> bool:
        """Count a call if it matches; return whether it is one of those that fail."""
        if self.call != call or self.number not in (None, number) or self.gpu not in (None, gpu):
            return False
        self.met += 1
        past = self.met - self.after
        return past > 0 and (self.times is None or past <= self.times)

    def wait(self) -> None:
        """Wait for the delay, and until the call no longer hangs."""
        if self.seconds:
            time.sleep(self.seconds)
        if self.hangs is not None:
            self.stuck += 1
            self.hangs.wait()
            self.stuck -= 1

    @property
    def fails(self) -> bool:
        """Return whether the fault is more than a delay."""
        return bool(self.errno or self.status or self.nothing)


@attrs.define(eq=False)
class Plan:
    """Faults, and a record of all calls."""

    faults: list[Fault] = attrs.field(factory=list)
    """Faults in their order; may be changed at any time."""
    calls: list[tuple[str, int | None]] = attrs.field(factory=list)
    """Every call: its name, and the command of a control or the class of an allocation."""

    def meet(self, call: str, number: int | None = None, gpu: int | None = None) -> Fault | None:
        """Return the fault of a call, once its delay is over; None if there is none."""
        self.calls.append((call, number))
        for fault in tuple(self.faults):
            if fault.fits(call, number, gpu):
                fault.wait()
                return fault if fault.fails else None
        return None

    def heal(self) -> None:
        """Remove all faults; calls that hang go on."""
        faults, self.faults[:] = tuple(self.faults), []
        for fault in faults:
            if fault.hangs is not None:
                fault.hangs.set()


class FaultySystem:
    """A :class:`System` whose calls fail as planned; see the module."""

    def __init__(self, inner: System, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    def _pass(self, call: str) -> None:
        fault = self._plan.meet(call)
        if fault is not None and fault.errno:
            raise OSError(fault.errno, os.strerror(fault.errno))

    def begin(self) -> None:
        self._inner.begin()

    def open_control(self) -> int:
        self._pass("open_control")
        return self._inner.open_control()

    def open_gpu(self, minor: int) -> int:
        self._pass("open_gpu")
        return self._inner.open_gpu(minor)

    def control_fds(self, pid: int) -> Sequence[int]:
        self._pass("control_fds")
        return self._inner.control_fds(pid)

    def pidfd_open(self, pid: int) -> int:
        self._pass("pidfd_open")
        return self._inner.pidfd_open(pid)

    def look(self, pid: int, fds: Sequence[int]) -> tuple[int, Sequence[int]]:
        self._pass("start_time")
        return self._inner.look(pid, fds)

    def pidfd_getfd(self, pidfd: int, fd: int) -> int:
        self._pass("pidfd_getfd")
        return self._inner.pidfd_getfd(pidfd, fd)

    def start_time(self, pid: int) -> int:
        self._pass("start_time")
        return self._inner.start_time(pid)

    def map(self, fd: int, nbytes: int) -> memoryview:
        self._pass("map")
        return self._inner.map(fd, nbytes)

    def pid_namespace(self) -> int:
        return self._inner.pid_namespace()

    def close(self, fd: int) -> None:
        self._inner.close(fd)

    def ioctl(self, fd: int, request: int, argument: bytearray) -> None:
        fault = self._plan.meet(REQUESTS[request], _number(request, argument))
        if fault is None:
            self._inner.ioctl(fd, request, argument)
            return
        if fault.late:
            self._inner.ioctl(fd, request, argument)
        if fault.errno:
            raise OSError(fault.errno, os.strerror(fault.errno))
        if request in STATUS_AT:
            struct.pack_into("<I", argument, STATUS_AT[request], fault.status)


def _number(request: int, argument: bytearray) -> int | None:
    """Return the command of a control, or the class of an allocation."""
    if request == rm.IOCTL_CONTROL:
        return int(rm.NVOS54.unpack_from(argument)[2])
    if request == rm.IOCTL_ALLOC:
        return int(rm.NVOS21.unpack_from(argument)[3])
    return None


class FaultyNvml:
    """The module pynvml, or a double of it, whose functions fail as planned.

    `status` of a fault is NVML's return code; a device is known by the index or UUID that its handle came from."""

    def __init__(self, inner: Any, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan
        self._devices: dict[Any, int] = {}  # index by handle
        self._uuids: dict[Any, int] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._failing(name, found) if name.startswith("nvml") else found

    def _failing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            device = words[0] if words else None
            known = self._uuids if name == "nvmlDeviceGetHandleByUUID" else self._devices
            gpu = known.get(device, device if isinstance(device, int) else None)
            fault = self._plan.meet(name, None, gpu)
            if fault is not None and fault.status:
                raise self._inner.NVMLError(fault.status)
            result = function(*words)
            if gpu is not None and name.startswith("nvmlDeviceGetHandleBy"):
                self._devices[result] = gpu
            elif gpu is not None and name == "nvmlDeviceGetUUID":
                self._uuids[result] = gpu
            return result

        return call


@attrs.define
class Rig:
    """Two GPUs, and a program on both."""

    h: Harness
    fake: FakeSystem
    nvml: FakeNvml
    plan: Plan
    gpus: list[NvidiaGpu]
    program: Program

    @property
    def pid(self) -> int:
        return self.program.pid

    def frozen(self) -> list[bool]:
        """Return for each GPU whether nothing of the program runs there."""
        running = self.program.running()
        return [not any(running[:20]), not any(running[20:])]


def drive(
    spawn: Spawn,
    test: Callable[[Rig], object],
    plan: Plan | None = None,
    *,
    trace: bool = True,
    scheduler: bool = False,
    readback: bool = True,
) -> None:
    """Run a test under a plan that is in force from the start."""
    fake, nvml, plan = FakeSystem(readback=readback), FakeNvml(), plan or Plan()
    if not trace:
        fake.trace = None

    @asynccontextmanager
    async def rig() -> AsyncIterator[Rig]:
        faulty = FaultyNvml(nvml, plan)
        gpus = await open_gpus(
            system=FaultySystem(fake, plan),
            nvml=Nvml(faulty),  # type: ignore[arg-type]
            selftest=False,
        )
        process = backend.process.identity.identify(spawn().pid)
        program = fake.program(process.pid, 0, 1, start=process.start)
        for gpu in (0, 1):
            nvml.compute[gpu] = [(program.pid, MIB)]
        async with running(*gpus, scheduler=scheduler) as h:
            yield Rig(h, fake, nvml, plan, gpus, program)
            plan.heal()

    async def main() -> None:
        async with rig() as found:
            await test(found)  # type: ignore[misc]

    clock = MockClock(autojump_threshold=0.005)
    with patient(clock, lambda: any(fault.stuck for fault in plan.faults)):
        trio.run(main, clock=clock)
