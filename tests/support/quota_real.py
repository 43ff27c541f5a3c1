"""A GPU that behaves as an H200 was measured to, for quotas in virtual time.

It is late in more ways than :class:`tests.support.quotas.Traced`. Each switch takes 197 us of the engine, which the
trace charges to the stay that it begins. A stay is 2.4 % longer than the timeslice. A gate opens 0.3 ms after the
request, and closes 0.15 ms after it. The library sees the end of the last kernel up to one look later. Levers take
time. Now and then one of NVML's samples covers half the time of the others.
"""

from __future__ import annotations

import contextlib
import random

import attrs
import trio

from backend.core.protocols import Bookkeeping
from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.core.turns import TurnEnd
from backend.nvidia.usage import SWITCH_US
from backend.process.identity import Process
from backend.soft.runlist import US, Runlist, Tsg
from tests.support.quotas import KERNEL_US, SPACING_S, STEP_S, Limited, Traced

OPEN_S, CLOSE_S = 0.0003, 0.00015
"""Seconds from the decision until the program launches again, and until it stops: a message, and the wake-up of a
thread.
"""
DRAIN_US = 2_000
"""Shortest wait for the end of a turn, microseconds (DRAIN_LEAST of library/driver/turn.c)."""
LOOK_DRAIN_S, LOOK_S = 0.0002, 0.002
"""Seconds between two looks of the library for finished kernels: behind a closed gate, and otherwise."""
DETACH_S, ATTACH_S = (0.0008, 0.0007), (0.001, 0.001)
"""Seconds that a lever takes before and after it acts."""
STAY = 1.024
"""Length of a stay on the engine, as a multiple of the timeslice."""
SHORT = 20
"""One in this number of samples covers half the time."""
DEPTH = 32
"""Number of kernels that a program launches ahead (worker.cu of tests/t7_nvidia)."""


class Staying(Runlist):
    """A runlist whose engine keeps the last context while it is idle: continuing with the same context is not a
    switch.
    """

    def __init__(self) -> None:
        super().__init__(SWITCH_US * US)
        self.last: Tsg | None = None
        """TSG of the context on the engine."""

    def _elect(self, until: int) -> Tsg | None:
        before = self._running
        goes_on = before is not None and before.runnable and self._turn > 0
        tsg = super()._elect(until)
        if tsg is not None and not goes_on:
            self._turn = round(STAY * self._turn)
        if tsg is not None:
            if before is None and tsg is self.last:
                self._switching = 0
                tsg.stays -= 1
            self.last = tsg
        return tsg


class Real(Traced):
    """A GPU in software with the delays of an H200."""

    switch_us = SWITCH_US

    def __init__(self) -> None:
        super().__init__()
        self._runlist = self._engine._runlist = Staying()
        self._turned = self._runlist._turned
        self._runlist._turned = self._note  # type: ignore[method-assign]
        self._since: dict[Tsg, int] = {}  # time since which it has had work, nanoseconds of the engine
        self._pending: dict[Tsg, int] = {}  # time with work before that, nanoseconds
        self._idle: dict[
            Tsg, tuple[int, int, int]
        ] = {}  # when its work ended, when that is seen, and as what time it is seen
        self._chance = random.Random(1)
        self._samples_made = 0
        self._later: trio.Nursery | None = None
        self._told_stays: dict[Process, int] = {}
        self._stays_seen: list[tuple[float, dict[Process, int]]] = []

    async def run(
        self, bookkeeper: Bookkeeping, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        async with trio.open_nursery() as nursery:
            self._later = nursery
            try:
                await super().run(bookkeeper, task_status=task_status)
            finally:
                self._later = None

    # Figures of the trace

    def on_engine(self, process: Process) -> int:
        return self.really(process) + SWITCH_US * self._came(process)

    def _came(self, process: Process) -> int:
        """Return how often a living process came onto the engine."""
        tenant = self._tenants.get(process)
        return 0 if tenant is None else sum(tsg.stays for tsg in tenant.tsgs.values())

    def _stays(self, process: Process) -> int:
        """Return the same as late as the trace reports it."""
        now = trio.current_time()
        if not self._stays_seen or now - self._stays_seen[-1][0] >= STEP_S:
            self._stays_seen.append((now, {one: self._came(one) for one in self._tenants}))
        while self._stays_seen and self._stays_seen[0][0] <= self._told_at:
            _, self._told_stays = self._stays_seen.pop(0)
        return self._told_stays.get(process, 0)

    # Figures of the library

    def _note(self, tsg: Tsg, runnable: bool) -> None:
        self._turned(tsg, runnable)
        now = self._runlist.now
        if tsg.queue and tsg not in self._since:
            self._since[tsg] = now
        elif not tsg.queue and tsg in self._since:
            self._pending[tsg] = self._pending.get(tsg, 0) + now - self._since.pop(tsg)
            is_closed = any(tsg in tenant.tsgs.values() and tenant.gate.is_closed for tenant in self._tenants.values())
            look = round((LOOK_DRAIN_S if is_closed else LOOK_S) * 1e9)
            late = self._chance.randrange(look)
            self._idle[tsg] = now, now + late, late - look // 2  # the work is taken to have ended in the middle
            self._pending[tsg] += late - look // 2

    def _pends(self, tsg: Tsg) -> bool:
        return bool(tsg.queue) or self._runlist.now < self._idle.get(tsg, (0, 0, 0))[1]

    def _pending_ns(self, tsg: Tsg) -> int:
        now, pending = self._runlist.now, self._pending.get(tsg, 0)
        if tsg in self._since:
            return pending + now - self._since[tsg]
        began, seen, off = self._idle.get(tsg, (0, 0, 0))
        return pending - off + now - began if now < seen else pending

    def activity(self, process: Process) -> Activity:
        activity = attrs.evolve(super().activity(process), stays=self._stays(process))
        tenant = self._tenants.get(process)
        if tenant is None or not tenant.is_gated:
            return activity
        tsgs = tenant.tsgs.values()
        return attrs.evolve(
            activity,
            pending=sum(map(self._pends, tsgs)),
            pending_usec=sum(map(self._pending_ns, tsgs)) // US,
        )

    # Levers that take time

    async def end_turn(self, process: Process, bound_us: int, leaves: int = 0) -> TurnEnd:
        await trio.sleep(CLOSE_S)
        return await super().end_turn(process, max(bound_us, DRAIN_US), leaves)

    async def begin_turn(self, process: Process) -> None:
        if self._later is None:  # at the end of the daemon
            await super().begin_turn(process)
        else:
            self._later.start_soon(self._open, process)

    async def _open(self, process: Process) -> None:
        await trio.sleep(OPEN_S)
        with contextlib.suppress(OSError):  # the process is gone
            await super().begin_turn(process)

    async def detach(self, process: Process, engines: Engines = Engines.ALL) -> None:
        before, after = DETACH_S
        await trio.sleep(before)
        await super().detach(process, engines)
        if self._runlist.last in self._tenants[process].tsgs.values():
            self._runlist.last = None
        await trio.sleep(after)

    async def attach(self, process: Process) -> None:
        before, after = ATTACH_S
        await trio.sleep(before)
        await super().attach(process)
        await trio.sleep(after)

    def spacing_s(self) -> float:
        self._samples_made += 1
        return SPACING_S / (1 + (self._samples_made % SHORT == SHORT // 2))


async def bursts(p: Limited, *, library: bool) -> Process:
    """Run a program that works for 30 ms and launches nothing for 20 ms, in turn, by the clock, with up to DEPTH
    kernels ahead.
    """
    process = await p.h.arrive(p.spawn().pid, "/")
    number = await p.gpu.open_context(process, 8, lambda finished: None, gated=library)
    queue = p.gpu._tenants[process].tsgs[number].queue

    async def work() -> None:
        with contextlib.suppress(OSError):
            while True:
                p.gpu._engine.advance()
                if trio.current_time() % 0.05 < 0.03 and len(queue) < DEPTH:
                    await p.gpu.launch(process, number, 1, KERNEL_US, range(0))
                else:
                    await trio.sleep(0.00005 if trio.current_time() % 0.05 < 0.03 else 0.0005)

    p.nursery.start_soon(work)
    return process
