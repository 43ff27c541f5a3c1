"""The scheduler, the NVIDIA code and the gates of programs together: on a fake driver, in virtual time.

Three programs always have work: one of better priority, and two that fill behind it and so take turns.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from typing import Any

import attrs
import pytest
import trio

import backend.cuda.managed
from backend.core.turns import TurnEnd
from backend.door.wire import Op
from backend.process.identity import Member, Process
from tests.support.cuda_session import GIB, Drive, Rig, drive, pieces, until_then
from tests.support.harness import answers
from tests.support.turns import Gated, gated, without

__all__ = ["drive", "pieces"]  # fixtures

SECONDS = float(os.environ.get("GGROUP_GATES_S", "10"))
"""Virtual seconds of each test."""

SEED = os.environ.get("GGROUP_GATES_SEED", "")
"""Seed of the random choices, beside the number of the test."""

STEP_S = 0.05
"""Seconds between two looks of the engine at what runs."""

HELD_BYTES = 8 * GIB
"""Bytes that each program has on the GPU at first."""

SETTLED_S = 6.0
"""Seconds within which all that was begun has ended, and each program has had a turn."""


@attrs.define
class Bench:
    """The engine, and the programs that share it."""

    rig: Rig
    programs: list[Gated] = attrs.field(factory=list)
    used: Counter[Process] = attrs.field(factory=Counter)
    """Engine time of each program, in microseconds."""
    turns: Counter[TurnEnd] = attrs.field(factory=Counter)
    """Numbers of turns by how they ended."""

    async def begin(self, *, told: bool = True) -> None:
        """Start the programs, the first one with the best priority. `told`: whether their exact use is known; else none
        is."""
        usage: Any = self.rig.gpu._usage
        usage.exact = lambda process: int(self.used[process]) if told else None
        self.rig.nursery.start_soon(self.run)
        turning: Any = self.rig.h.controller._follower.turning
        end = turning.end

        async def note(*words: Any, **keywords: Any) -> TurnEnd:
            found: TurnEnd = await end(*words, **keywords)
            self.turns[found] += 1
            return found

        turning.end = note
        for priority in (0, 9, 9):
            await self.come(priority)

    async def come(self, priority: int) -> Gated:
        """Start one more, whose launches are done within some milliseconds."""
        program = await gated(self.rig, HELD_BYTES, "/job", 0)
        program.drain_s = 0.002
        await self.rig.h.write(program.file + "compute.priority", priority)
        self.programs.append(program)
        return program

    async def run(self) -> None:
        """Share the engine among the programs that are on the runlist and have work."""
        while True:
            await trio.sleep(STEP_S)
            runs = [one for one in self.programs if self.lives(one) and self.has_work(one)]
            for one in runs:
                self.used[one.process] += int(STEP_S * 1e6 / len(runs))

    def lives(self, program: Gated) -> bool:
        """Return whether a program has not died."""
        return program.process.pid in self.rig.fake.programs

    def has_work(self, program: Gated) -> bool:
        """Return whether kernels of a program run."""
        gr, _ = without(self.rig.fake.programs[program.process.pid])
        return not gr and (not program.is_closed or program.pending)

    async def come_back(self, program: Gated) -> None:
        """Move memory of a program back in while it has room; its library does nothing else meanwhile."""
        nbytes = min(program.swapped, 4 * GIB)
        if nbytes:
            async with program.listens:
                (await program.ask(Op.MOVE_IN, nbytes, 0)).check()
                program.swapped, program.resident = program.swapped - nbytes, program.resident + nbytes
                await trio.sleep(nbytes / (32 * GIB))
                program.show()

    async def end(self) -> None:
        """End all turns: equals do not wait for turns, so every gate opens and all engines are on."""
        for program in filter(self.lives, self.programs):
            program.drain_s = 0.0
            await self.rig.h.write(program.file + "compute.freeze", 0)
            await self.rig.h.write(program.file + "compute.priority", 8)
        await trio.sleep(SETTLED_S)
        for program in filter(self.lives, self.programs):
            record = self.rig.h.controller.population.record(Member(program.process, 0))
            assert record.compute.turn_end is None
            assert not program.is_closed
            assert without(self.rig.fake.programs[program.process.pid]) == (False, False)


@pytest.mark.parametrize(("number", "told"), [(0, True), (1, True), (2, False)])
def test_limits_hold_in_all_turns_that_the_scheduler_gives(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, number: int, told: bool
) -> None:
    """At each step, no write is refused, no turn ends with the gate open, and both fillers go on."""
    monkeypatch.setattr(backend.cuda.managed, "PIECE", 4 * GIB)

    async def test(rig: Rig) -> None:
        bench, rng, refused, waited = Bench(rig), random.Random(f"{number}{SEED}"), Counter[int](), 0
        await bench.begin(told=told)
        until = trio.current_time() + SECONDS
        while trio.current_time() < until:
            program, limit = rng.choice(bench.programs), rng.randrange(1, 9) * GIB
            waited += program.is_closed
            code = await answers(rig.h.write(program.file + "gmem.limit.high", limit))
            refused[code] += 1
            assert code or program.resident <= limit
            await rig.h.write(program.file + "gmem.limit.high", "max")
            await bench.come_back(program)
            await trio.sleep(0.2 * rng.random())
        assert set(refused) == {0}, refused
        assert waited > SECONDS / 2, "some were written to programs that waited"
        assert bench.turns[TurnEnd.DRAINED] > SECONDS / 4
        assert set(bench.turns) <= {TurnEnd.DRAINED, TurnEnd.LATE}
        _, *fill = [bench.used[program.process] for program in bench.programs]
        assert min(fill) > 0.6 * max(fill), "but for a turn"
        await bench.end()

    drive(test, scheduler=True)


@pytest.mark.parametrize("number", range(4))
def test_no_gate_stays_closed_whatever_is_done_in_turns(drive: Drive, number: int) -> None:
    """Freeze and thaw, endless kernels, priorities, a connection that ends, and the end of a program."""

    async def test(rig: Rig) -> None:
        bench, rng = Bench(rig), random.Random(f"{number} {SEED}")
        await bench.begin()
        until = trio.current_time() + SECONDS
        while trio.current_time() < until:
            await trio.sleep(0.3 * rng.random())
            program, frozen = rng.choice(bench.programs), rng.randrange(2)
            match rng.choice(("freeze", "freeze", "spin", "priority", "limit", "limit", "reconnect", "kill")):
                case "freeze":
                    await rig.h.write(program.file + "compute.freeze", frozen)
                    assert without(rig.fake.programs[program.process.pid])[1] >= bool(frozen)
                case "spin":
                    program.drain_s = rng.choice((0.002, 0.05, 0.5, 60.0))
                case "priority":
                    await rig.h.write(program.file + "compute.priority", rng.choice((0, 8, 9, 9)))
                case "limit":
                    code = await answers(rig.h.write(program.file + "gmem.limit.high", rng.randrange(1, 9) * GIB))
                    assert code in (0, errno.EBUSY, errno.EAGAIN)
                case "reconnect":
                    await reconnect(bench, program)
                case _:
                    bench.programs.remove(program)
                    await rig.die(program)
                    await bench.come(rng.choice((0, 8, 9, 9)))
        await bench.end()

    drive(test, scheduler=True)


async def reconnect(bench: Bench, program: Gated) -> None:
    """End the connection of a program, which connects again, in the middle of a turn or between two."""
    rig, process = bench.rig, program.process
    program.socket.close()
    await until_then(lambda: process not in rig.gpu.managed)
    again = rig.connect(process, Gated)
    assert isinstance(again, Gated)
    again.context, again.drain_s = 0, program.drain_s
    await again.manage(program.resident, program.swapped)
    bench.programs[bench.programs.index(program)] = again
