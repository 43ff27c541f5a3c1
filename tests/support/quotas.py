"""Programs with quotas on a software GPU in virtual time, whose use is reported exactly, or as by the driver of a real
GPU.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import attrs
import trio

from backend.core.protocols import Bookkeeping
from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.nvidia.busy import BusyTime
from backend.nvidia.sampling import Sampling
from backend.nvidia.sight import Sight
from backend.process.identity import Process
from tests.support.contenders import Bench
from tests.support.harness import Harness, running

Spawn = Callable[..., subprocess.Popen[bytes]]

LATE_S = 0.2
"""Delay of the trace of a real GPU, seconds."""
READ_S = 0.1003
"""Time between two reads of the trace, seconds; a read takes part of it."""
SPACING_S = 1 / 6
"""Time that one of NVML's samples covers, seconds."""
SAMPLES_LATE_S = 0.8
"""Delay of these samples, seconds."""
STEP_S = 0.0025
"""Step in which the engine is inspected for the trace, seconds."""
KERNEL_US = 500
"""Duration of a kernel, microseconds."""


class Traced(Bench):
    """A software GPU that reports its programs as the driver of a real one does.

    The use of a program is reported 0.2 s late, and includes the time in which its context was on an idle engine. Only
    programs with the library report whether they have work. For the others, samples tell how busy they were: each of a
    sixth of a second, in percent, and all that came since the last request.
    """

    late_us = round(LATE_S * 1e6)

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[Process, int] = {}
        self._last: dict[Process, int] = {}
        self._on: Process | None = None
        self._seen: deque[tuple[float, Mapping[Process, int]]] = deque()
        self._told: Mapping[Process, int] = {}
        self._told_at = 0.0  # the time of that report
        self._sampling, self._busy, self._sight = Sampling(), BusyTime(round(LATE_S / READ_S)), Sight()
        self._samples: deque[tuple[float, Mapping[int, float]]] = deque()
        self._sampled: dict[Process, int] = {}  # the work of each process at the last sample
        self._asked: float | None = None  # the time of the last sample that was reported
        # when it ended, the process, and what was reported of it by then
        self._ended: list[tuple[float, Process, int]] = []
        # a trace charges switches as well, while the figures of work here exclude them
        self._engine._runlist.switch = 0

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_on)
            nursery.start_soon(self._take_samples)
            await super().run(bookkeeper, task_status=task_status)

    def really(self, process: Process) -> int:
        """Return the microseconds that a process has worked up to now."""
        return super().activity(process).gpu_usec or 0

    def on_engine(self, process: Process) -> int:
        """Return the microseconds that a process had the engine while that was not idle."""
        return self.really(process)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        self._sight.turns(process, trio.current_time(), is_on=False)
        await super().detach(process, engines)

    async def attach(self, process: Process) -> None:
        await super().attach(process)
        self._sight.turns(process, trio.current_time(), is_on=True)

    async def _look_on(self) -> None:
        read = 0.0
        self._sampling.begin(trio.current_time())
        while True:
            await trio.sleep(STEP_S)
            idle_us = round(STEP_S * 1e6)
            for process, tenant in self._tenants.items():
                used = self.on_engine(process)
                grown, self._last[process] = used - self._last.get(process, 0), used
                self._there[process] = self._there.get(process, 0) + grown
                idle_us -= grown
                if grown:
                    self._on = process
                elif self._on == process and not tenant.attached:
                    self._on = None
            if self._on in self._tenants and idle_us > 0:
                self._there[self._on] += idle_us
            now = trio.current_time()
            self._seen.append((now, dict(self._there)))
            if now - read >= READ_S:
                read += READ_S
                while self._seen and self._seen[0][0] <= now - LATE_S:
                    self._told_at, self._told = self._seen.popleft()
                self._sight.keep([process for process, _ in self._others()], now, self._standing())
                self._ask(now)
            self._tell_late(now)

    def forget(self, process: Process) -> None:
        used = self.on_engine(process)
        self._there[process] = self._there.get(process, 0) + used - self._last.pop(process, used)
        self._ended.append((trio.current_time(), process, self._told.get(process, 0)))
        super().forget(process)

    def _tell_late(self, now: float) -> None:
        while self._ended and self._ended[0][0] + LATE_S + READ_S <= now:
            _, process, told = self._ended.pop(0)
            assert self._bookkeeper is not None
            rest = self._told.get(process, 0) - told
            self._bookkeeper.late(process, 0, {"gpu_usec": rest, "busy_usec": rest})

    def _others(self) -> list[tuple[Process, bool | None]]:
        """Return the processes without the library."""
        return [(process, None) for process, tenant in self._tenants.items() if not tenant.is_gated]

    def _standing(self) -> frozenset[Process]:
        """Return those of them that are off the runlist."""
        return frozenset(process for process, _ in self._others() if not self._tenants[process].attached)

    def _ask(self, now: float) -> None:
        """Request samples as ``usage.py`` does."""
        if not self._sampling.is_due(now, self._standing()):
            return
        shares: Mapping[int, float] = {}
        span_us = 0
        while self._samples and self._samples[0][0] <= now - SAMPLES_LATE_S:
            stamp, shares = self._samples.popleft()
            before, self._asked = self._asked or stamp, stamp
            span_us += round((stamp - before) * 1e6)
        self._sight.take(now, shares, now - (self._asked or now), span_us / 1e6)
        window_us = self._sampling.window_us(now, span_us)
        sampled = {pid: share * window_us for pid, share in shares.items()}
        self._busy.sample(self._others(), lambda process: self._told.get(process, 0), sampled)

    def spacing_s(self) -> float:
        """The time that the next sample covers, seconds."""
        return SPACING_S

    async def _take_samples(self) -> None:
        while True:
            await trio.sleep(spacing_s := self.spacing_s())
            before, self._sampled = self._sampled, {process: self.really(process) for process in self._tenants}
            each = {
                one.pid: (100 * (us - before.get(one, 0)) // round(spacing_s * 1e6)) / 100
                for one, us in self._sampled.items()
            }
            if any(each.values()):  # otherwise NVML has no sample
                self._samples.append((trio.current_time(), each))

    def activity(self, process: Process) -> Activity:
        activity = super().activity(process)
        told = self._told.get(process, 0)  # also of a process that has ended
        tenant = self._tenants.get(process)
        if tenant is not None and tenant.is_gated:
            return attrs.evolve(activity, gpu_usec=told, busy_usec=told)
        watched, worked = self._sight.told(process) or (None, None)
        busy = self._busy.usec(process) or 0
        return attrs.evolve(
            activity,
            gpu_usec=told,
            busy_usec=busy,
            busy_sampled_usec=busy,
            pending=None,
            watched_usec=watched,
            watched_busy_usec=worked,
        )


@attrs.define
class Limited:
    """A GPU and its programs."""

    h: Harness
    gpu: Bench
    spawn: Spawn
    nursery: trio.Nursery
    _bodies: dict[Process, subprocess.Popen[bytes]] = attrs.field(factory=dict)

    async def end(self, process: Process) -> None:
        """Kill a process, and wait until it has left the tree."""
        body = self._bodies.pop(process)
        body.kill()
        body.wait()
        await self.h.gone(process)

    async def program(
        self, cgroup: str = "/", *, library: bool = True, work_s: float = 0.0, rest_s: float = 0.0, kernel_us: int = 0
    ) -> Process:
        """Run a program that always has work; or one that uses the engine for `work_s` seconds and then rests for
        `rest_s`, again and again.
        """
        body = self.spawn()
        process = await self.h.arrive(body.pid, cgroup)
        self._bodies[process] = body
        number = await self.gpu.open_context(process, 8, lambda finished: None, gated=library)
        if rest_s:
            self.nursery.start_soon(self._idle_in_between, process, number, work_s, rest_s)
        else:
            self.nursery.start_soon(self._feed, process, number, kernel_us or KERNEL_US)
        return process

    async def _feed(self, process: Process, number: int, kernel_us: int) -> None:
        queue = self.gpu._tenants[process].tsgs[number].queue
        with contextlib.suppress(OSError):
            while True:
                if len(queue) * kernel_us < 50_000:
                    await self.gpu.launch(process, number, max(1, 20_000 // kernel_us), kernel_us, range(0))
                else:
                    await trio.sleep(0.01)
                await trio.lowlevel.checkpoint()

    async def _idle_in_between(self, process: Process, number: int, work_s: float, rest_s: float) -> None:
        queue = self.gpu._tenants[process].tsgs[number].queue
        with contextlib.suppress(OSError):
            while True:
                await self.gpu.launch(process, number, round(work_s * 1e6 / KERNEL_US), KERNEL_US, range(0))
                while queue:
                    await trio.sleep(0.001)
                    self.gpu._engine.advance()
                await trio.sleep(rest_s)

    def worked(self, process: Process) -> int:
        """Return the microseconds that a process has worked."""
        return self.gpu.really(process) if isinstance(self.gpu, Traced) else self.gpu.used(process)

    async def shares(self, processes: Sequence[Process], seconds: float) -> list[float]:
        """Return the fraction of the time in which each process works."""
        before = [self.worked(process) for process in processes]
        await trio.sleep(seconds)
        return [(self.worked(p) - b) / seconds / 1e6 for p, b in zip(processes, before, strict=True)]


@contextlib.asynccontextmanager
async def limited(spawn: Spawn, *, traced: bool = False, gpu: Bench | None = None) -> AsyncIterator[Limited]:
    """Run a GPU, its daemon with a scheduler, and programs; with `traced` their use is reported as by a real GPU."""
    gpu = gpu or (Traced() if traced else Bench())
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        yield Limited(h, gpu, spawn, nursery)
        nursery.cancel_scope.cancel()
