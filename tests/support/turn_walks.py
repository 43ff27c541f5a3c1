"""Walks through orders, one after another, over as many daemons as they take, with checks all the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from unittest import mock

import attrs
import trio

from backend.core.turns import TurnEnd
from backend.nvidia.discover import TICK
from backend.process.identity import Group, Slice, SliceOn
from backend.scheduler.ends import DRAIN_SLICE_US
from tests.support.harness import Harness, answers
from tests.support.killed import Killed, Life, Machine
from tests.support.killed_life import live, timeslices
from tests.support.turn_changes import Changes
from tests.support.turn_orders import BOUND_US, HELD_BYTES, MOMENT_S, OWN_SLICE_US, SETTLED_S, Case
from tests.support.turn_programs import Stage
from tests.support.turns import follower, proven, without


def go_through(stage: Stage) -> None:
    """Go through all orders of a stage, over as many daemons as they take."""
    while stage.cases:
        next_daemon(stage)
    next_daemon(stage)  # the last daemon may have been killed, or replaced
    for program in stage.machine.programs.values():
        assert without(program) == (False, False)


def next_daemon(stage: Stage) -> int:
    """Run one more daemon to its end; return the number of points of its life."""
    stage.life, stage.at = Life(stage.at), None
    # A program that starts in the same tick as the daemon counts as unknown to any earlier daemon.
    newest = max((program.identity.start for program in stage.machine.programs.values()), default=0)
    while time.clock_gettime(time.CLOCK_BOOTTIME) * TICK < newest + 1:
        time.sleep(0.001)

    async def story(machine: Machine, h: Harness) -> None:
        await Walk(stage, h).run()

    places = ("backend.nvidia.memory.has_library", "backend.nvidia.swapped.has_library")
    with mock.patch(places[0], has_the_library), mock.patch(places[1], has_the_library):
        live(stage.machine, stage.life, story, rest_s=0.0)
    while stage.pages:
        stage.pages.pop().close()  # as the kernel does
    for program in stage.programs.values():
        program.ended.set()
    return stage.life.points


async def has_the_library(pid: int) -> bool:
    """Say that every program has the library, whether or not it is connected."""
    await trio.lowlevel.checkpoint()
    return True


@attrs.define
class Walk(Changes):
    """A walk through the orders under one daemon."""

    async def run(self) -> None:
        """Go through the orders, until none is left or one of them ends this daemon."""
        proven(self.gpu)
        self.gpu.mover.move = self.move  # type: ignore[method-assign, assignment]
        try:
            async with trio.open_nursery() as nursery:
                while self.stage.cases and await self.one(nursery, self.stage.cases[0]):
                    self.stage.cases.pop(0)
                nursery.cancel_scope.cancel()
        except* Killed:
            pass
        if self.stage.life.dead:
            raise Killed

    async def one(self, nursery: trio.Nursery, case: Case) -> bool:
        """Do one order, from a start that is the same for all; return whether the daemon is still there."""
        self.case, self.may_run, self.moves, self.begun = case, set(), set(), []
        self.arrived, self.go = trio.Event(), trio.Event()
        await self.begin_anew(nursery)
        async with trio.open_nursery() as acting:
            acting.start_soon(self.change)
            with trio.fail_after(60):
                await self.arrived.wait()
            if await self.act(acting):
                acting.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
                return False
            self.holds()
            self.go.set()
        await self.end(nursery)
        return True

    async def begin_anew(self, nursery: trio.Nursery) -> None:
        """Undo what the order before has left; have all but `a` wait for their turn, and protect `b`."""
        step, self.case.step = self.case.step, ""
        await self.connected(nursery)
        await self.settled()
        for name in self.case.names:
            await self.thaw(name)
        await self.settled()
        while self.h.controller._migrator._moves.left():  # noqa: ASYNC110 - it is not sure yet where it is
            await trio.sleep(MOMENT_S)
        for path in ("slice/job/0/", *(self.program(name).file for name in self.case.names)):
            for file, value in (("gmem.limit.high", "max"), ("gmem.limit.low", 0), ("gmem.swap.max", "max")):
                assert await answers(self.h.write(path + file, value)) == 0
        for name in self.case.names:
            found = self.program(name)
            await found.free(found.resident, found.swapped)
            assert await found.alloc(HELD_BYTES) == 0
            found.reclaims.clear()
        for name in self.case.names:
            with trio.fail_after(SETTLED_S):  # a program that gave too little is not asked again for a while
                while self.gpu.footprint(self.program(name).process).movable < HELD_BYTES:  # noqa: ASYNC110
                    await trio.sleep(MOMENT_S)
        await self.settled()
        assert {(found.resident, found.swapped) for found in map(self.program, self.case.names)} == {(HELD_BYTES, 0)}
        await self.write("b", "gmem.limit.low", "max")
        for name in self.case.names[1:]:
            assert await self.finish(name, BOUND_US) is TurnEnd.DRAINED
            await self.apply(name)
        self.case.step, self.begun = step, []

    # Checks

    def holds(self) -> None:
        """Check what holds at each step: a waiting program launches nothing, a frozen one does not run, and `b` keeps
        what is protected."""
        assert not self.stage.machine.fake.ran, "a frozen program ran"
        for name in filter(self.lives, self.case.names):
            compute = self.h.controller.population.record(self.member(name)).compute
            gr, copies = without(self.stage.machine.programs[name])
            program = self.program(name)
            if copies:
                assert gr, f"{name} has GR alone"
            if compute.is_busy() or program.ended.is_set():
                continue
            if compute.turn_end in (TurnEnd.DRAINED, TurnEnd.LATE):
                closes = compute.place.drains and program.listens.locked()  # it closes as soon as it can
                assert program.is_closed or closes, f"{name} may launch, and waits"
            if compute.turn_end is TurnEnd.DRAINED:
                assert not program.pending, f"{name} is not drained"
        others = [name for name in self.case.names if name != "b" and "low" not in self.done_to(name)]
        if any(map(self.gives, others)) and not self.done_to("b"):
            assert not self.program("b").reclaims, "what was protected has moved"
        self.h.check()

    async def end(self, nursery: trio.Nursery) -> None:
        """Check that in the end all programs run with open gates and within limits, and the books match the driver."""
        self.holds()
        if self.lives("a"):
            await self.connected(nursery)
        for name in filter(self.lives, self.case.names):
            assert await self.thaw(name) == 0
        if self.lives("a"):
            await self.is_told("a")
        for name in filter(self.lives, self.case.names):
            if follower(self.h).place(self.member(name)).off:  # a program in its turn was told by what began the turn
                await self.start(name)
        await self.settled()

    async def is_told(self, name: str) -> None:
        """Check that a program in its turn, if not frozen, was told so by what let it run, with no later correction."""
        program = self.program(name)
        while program.listens.locked():  # noqa: ASYNC110
            await trio.sleep(MOMENT_S / 3)
        await trio.sleep(MOMENT_S / 3)
        assert follower(self.h).place(self.member(name)).off or not program.is_closed, f"{name} has its turn, and waits"

    async def settled(self) -> None:
        """Wait until all that must hold at the end of an order does."""
        wrong = ["?"]
        with trio.move_on_after(SETTLED_S):
            while wrong:
                wrong = list(self.wrong())
                await trio.sleep(MOMENT_S)
        assert not wrong, (self.case, wrong)

    def wrong(self) -> Sequence[str]:
        """Return what does not hold yet."""
        found = []
        for name in filter(self.lives, self.case.names):
            program, books = self.program(name), self.h.ledger.books(self.member(name))
            compute = self.h.controller.population.record(self.member(name)).compute
            waits = compute.turn_end is not None
            frozen = any(self.h.ledger.books(level).frozen for level in (self.member(name), SliceOn(Slice("/job"), 0)))
            if program.ended.is_set():
                found.append(f"{name}: its connection")
            elif (books.current, books.swap) != (program.resident, program.swapped):
                found.append(f"{name}: {books.current}, {books.swap} in the books")
            elif program.is_closed != (waits and compute.turn_end is not TurnEnd.UNGATED):
                found.append(f"{name}: its gate")
            if without(self.stage.machine.programs[name]) != ((True, True) if frozen else (waits, False)):
                found.append(f"{name}: its engines")
            if compute.doubtful or compute.inherited:
                found.append(f"{name}: in doubt")
            wanted = DRAIN_SLICE_US if compute.place.drains else OWN_SLICE_US
            if set(timeslices(self.stage.machine.programs[name])) != {wanted}:
                found.append(f"{name}: its slice")
            if books.current > books.high and not frozen and books.swap < books.swap_max:
                found.append(f"{name}: {books.current} over {books.high}")
        job: Group = SliceOn(Slice("/job"), 0)
        if self.h.controller.population.holds(job):
            books, members = self.h.ledger.books(job), map(self.member, filter(self.lives, self.case.names))
            some_may_go = any(one.swap < one.swap_max and not one.frozen for one in map(self.h.ledger.books, members))
            if books.current > books.high and some_may_go and not books.frozen:
                found.append(f"{books.current} over {books.high}")
        return found
