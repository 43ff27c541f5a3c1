"""Programs of one software GPU whose memory is switched by turns, in virtual time."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable

import attrs
import trio

from backend.common.errors import fail
from backend.core.member import Turned
from backend.core.reasons import Engines
from backend.core.records import NOWHERE
from backend.core.records import Place as OnRunlist
from backend.core.turns import TurnEnd
from backend.process.identity import ROOT, Member, Process
from backend.scheduler.memory.claims import Rates
from backend.scheduler.memory.level import Level, Levers, Place
from backend.scheduler.memory.switch import Switch
from backend.scheduler.shares import Contender
from backend.scheduler.shares import Level as Share
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, Harness

RATE = 1 << 30
"""Bytes a second in each direction."""
QUEUED = 3
"""Steps that a program has queued at most."""
DRAIN_US, DRAIN_MOST_US = 5_000, 2_000_000
"""Microseconds that a program has to drain, and that it has after that, on the runlist."""


def soft(capacity: int) -> SoftGpu:
    """A GPU with pages of 1 MiB, no time lost to switches, and 1 GiB a second in each direction."""
    return SoftGpu(0, SoftConfig(capacity, MIB, RATE, RATE, batch=4 * MIB, switch_us=0))


@attrs.define(eq=False)
class Looper:
    """A program that uses all of its pages in every step, for ever."""

    process: Process
    tsg: int
    pages: range
    step_us: int = 2000
    steps: int = 0
    """Steps that are done."""
    asked: int = 0
    """Steps that were queued."""
    stamps: dict[int, int] = attrs.field(factory=dict)
    """What stands in its pages."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    went_on: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    """What waits for the end of a step."""

    async def run(self, gpu: SoftGpu) -> None:
        """Launches, one step after the other."""
        with self.scope, contextlib.suppress(OSError):
            while True:
                await gpu.launch(self.process, self.tsg, 1, self.step_us, self.pages)
                self.asked += 1
                while self.asked - self.steps >= QUEUED:
                    await self.went_on.park()

    def finished(self, steps: int) -> None:
        """So many steps are done."""
        self.steps = steps
        self.went_on.unpark_all()


class Stage:
    """A GPU, its programs, and the switch, without a scheduler."""

    def __init__(
        self, h: Harness, gpu: SoftGpu, nursery: trio.Nursery, wait_us: int = 1_000_000, chunk: int = 0
    ) -> None:
        """Memory comes in whole chunks of so many bytes, where that is said, as that of the library does."""
        self.h, self.gpu, self.nursery = h, gpu, nursery
        self.wait_us, self.chunk = wait_us, chunk
        gpu.info = attrs.evolve(gpu.info, chunk=chunk)
        self.programs: dict[Process, Looper] = {}
        self.off: dict[Process, float] = {}
        """Programs that wait, and since when."""
        self.drains: dict[Process, trio.CancelScope] = {}
        self.ends: dict[Process, TurnEnd] = {}
        """How the turns of those ended that are off."""
        self.longest_s = 0.0
        """How long any program waited at most."""
        self.fails: dict[tuple[str, Process], int] = {}
        """What fails with EIO, and how often yet."""
        self.before: Callable[[str], None] = lambda step: None
        """Called before each step of the switch, with the name of it."""
        self.switch: Switch
        self.scope: trio.CancelScope
        self.stamp = 0
        self.drains_first = False
        """Whether nothing moves of one that waits and is not drained yet, as of a program with the library."""
        self.leaves: list[int] = []
        """Bytes that were to go of programs whose turns ended."""
        self.start()

    def start(self) -> None:
        """A daemon begins: its switch finds what the one before left."""
        levers = Levers(
            self.end,
            self.begin,
            lambda process: process in self.off,
            lambda process: self.ends.get(process) is TurnEnd.DRAINED,
            self.is_stuck,
            lambda process: True,
            lambda process: self.wait_us,
            lambda process: 0,
        )
        level = Level(
            Place(ROOT, frozenset({0})),
            {0: self.gpu},
            self.h.ledger,
            self.h.controller.population,
            lambda gpu: [Contender(process, (Share(process, 8, 100),)) for process in self.programs],
            {0: levers},
        )
        self.level = level
        for name in ("evict", "fetch"):
            setattr(level, name, self._told(name, getattr(level, name)))
        self.switch = Switch(level, Rates(RATE, RATE))
        self.scope = trio.CancelScope()
        self.nursery.start_soon(self._run, self.scope)

    async def _run(self, scope: trio.CancelScope) -> None:
        with scope:
            await self.switch.run()

    def _told(self, name: str, act: Callable[..., object]) -> Callable[..., object]:
        async def told(gpu: int, process: Process, nbytes: int) -> int:
            self._step(name, process)
            if name == "fetch" and self.chunk and nbytes < self.missing(process):
                nbytes -= nbytes % self.chunk
            drains = self.drains_first and process in self.off and self.ends.get(process) is not TurnEnd.DRAINED
            return await act(gpu, process, nbytes) if nbytes and not drains else 0  # type: ignore[misc]

        return told

    def _step(self, name: str, process: Process) -> None:
        self.before(name)
        if self.fails.get((name, process), 0) > 0:
            self.fails[name, process] -= 1
            raise fail(errno.EIO)

    def stop(self) -> None:
        """The daemon is killed."""
        self.scope.cancel()

    async def reopen(self) -> None:
        """The next daemon ends the wait of all: their gates are open since the connections to the last one ended."""
        self.before = lambda step: None
        for process in list(self.off):
            await self.begin(process)

    async def come(self, pid: int, pages: int) -> Looper:
        """A program comes, with so many pages, and uses them."""
        process = await self.h.arrive(pid)
        one = Looper(process, 0, range(0))
        one.tsg = await self.gpu.open_context(process, 1, one.finished, gated=True)
        found = one.pages = await self.gpu.allocate(process, pages * MIB)
        for page in found:
            self.stamp += 1
            one.stamps[page] = self.stamp
            self.gpu.write(process, page, self.stamp)
        self.programs[process] = one
        self.nursery.start_soon(one.run, self.gpu)
        self.level.poke()
        return one

    def left(self, process: Process) -> None:
        """A program is gone."""
        self.programs.pop(process)
        if (since := self.off.pop(process, None)) is not None:
            self.longest_s = max(self.longest_s, trio.current_time() - since)
        self.level.poke()

    # Turns, as a scheduler gives them

    def is_stuck(self, process: Process) -> bool:
        """Whether one is off that was not drained."""
        return process in self.off and self.ends.get(process) in (TurnEnd.LATE, TurnEnd.UNGATED)

    async def end(self, process: Process, leaves: int) -> bool:
        """Gate first, then off."""
        self.leaves.append(leaves)
        self._step("end", process)
        self.off[process] = trio.current_time()
        try:
            end = await self.gpu.end_turn(process, DRAIN_US)
            if end is TurnEnd.LATE:  # it goes on to drain, on the runlist
                scope = self.drains[process] = trio.CancelScope()
                self.nursery.start_soon(self._drain, process, scope)
            else:
                await self._take(process, end)
        except OSError:
            self.off.pop(process, None)
            raise
        return end is TurnEnd.DRAINED

    async def _drain(self, process: Process, scope: trio.CancelScope) -> None:
        with scope, contextlib.suppress(OSError):
            await self._take(process, await self.gpu.end_turn(process, DRAIN_MOST_US))

    async def _take(self, process: Process, end: TurnEnd) -> None:
        self.ends[process] = end
        await self._off(process, OnRunlist(off=True, engines=Engines.ALL if end is TurnEnd.UNGATED else Engines.GR))

    async def begin(self, process: Process) -> None:
        """On again, then the gate."""
        self._step("begin", process)
        if (scope := self.drains.pop(process, None)) is not None:
            scope.cancel()
        await self._off(process, NOWHERE)
        await self.gpu.begin_turn(process)
        self.ends.pop(process, None)
        if (since := self.off.pop(process, None)) is not None:
            self.longest_s = max(self.longest_s, trio.current_time() - since)

    async def _off(self, process: Process, place: OnRunlist) -> None:
        follower = self.h.controller._follower
        follower.schedule(Member(process, 0), place)
        await follower.apply(Member(process, 0))

    def missing(self, process: Process) -> int:
        """Bytes of a program that are in the host."""
        return self.h.ledger.books(Member(process, 0)).swap

    def turned(self, process: Process) -> Turned:
        """What is counted of a program."""
        found = self.h.controller.population.record(Member(process, 0)).scheduled.turned
        assert found is not None
        return found

    def check(self) -> None:
        """What holds at any time."""
        pages = {one.process: self.gpu._tenants[one.process].memory for one in self.programs.values()}
        resident = sum(memory.resident for memory in pages.values()) * MIB
        assert resident <= self.gpu.info.capacity
        for process, one in self.programs.items():
            books = self.h.ledger.books(Member(process, 0))
            assert books.current == pages[process].resident * MIB
            assert all(self.gpu.read(process, page) == stamp for page, stamp in one.stamps.items())

    def rate(self, process: Process) -> int:
        """Steps that a program has done."""
        return self.programs[process].steps
