"""The switch from one set of programs to the next, on a software GPU with a bus, in virtual time."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable

import pytest
import trio

from backend.core.records import Footprint
from backend.process.identity import Process
from backend.scheduler.memory.switch import BEGINS_AGAIN_S, Phase
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, running, virtual
from tests.support.switched import RATE, Stage, soft

Spawn = Callable[..., subprocess.Popen[bytes]]

SLACK_S = 0.06
"""Seconds by which a program may wait longer than is said: a drain, a piece of a move that is under way, and a look."""


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@virtual
async def test_three_programs_have_turns_and_each_goes_on(spawn: Spawn) -> None:
    """They need 150 % of what there is."""
    gpu = soft(96 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        for _ in range(3):
            await stage.come(spawn().pid, 48)
        await trio.sleep(2)
        before = {process: one.steps for process, one in stage.programs.items()}
        for _ in range(100):
            await trio.sleep(0.1)
            stage.check()
        steps = [one.steps - before[process] for process, one in stage.programs.items()]
        assert sum(steps) >= 0.85 * 10 / 0.002 / 2, "most of the time some program runs at full speed"
        assert min(steps) >= 0.8 * max(steps)
        assert stage.longest_s <= 1 + SLACK_S
        assert stage.switch.plan.has_turns
        assert len(stage.switch.plan.sets) == 3
        assert set(stage.leaves[3:]) == {48 * MIB}, "the library is told what is to go"
        turned = [stage.turned(process) for process in stage.programs]
        assert all(one.turns > 5 and one.fetched and one.evicted for one in turned)
        nursery.cancel_scope.cancel()


@virtual
async def test_memory_comes_in_chunks_whatever_room_is_left_over(spawn: Spawn) -> None:
    """There is always some that is too little for one: what comes waits until there is more."""
    gpu = soft(100 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery, chunk=8 * MIB)
        for _ in range(3):
            await stage.come(spawn().pid, 48)
        await trio.sleep(2)
        before = {process: one.steps for process, one in stage.programs.items()}
        await trio.sleep(10)
        steps = [one.steps - before[process] for process, one in stage.programs.items()]
        assert sum(steps) >= 0.9 * 10 / 0.002, "nearly all of the time some program runs at full speed"
        assert min(steps) >= 0.8 * max(steps)
        stage.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_one_that_drains_late_gives_its_memory_once_it_is_drained(spawn: Spawn) -> None:
    """A kernel that takes longer than a program has to drain: what moves waits for it, and no turn is lost by that."""
    gpu = soft(96 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        stage.drains_first = True
        for _ in range(3):
            (await stage.come(spawn().pid, 48)).step_us = 8_000
        await trio.sleep(2)
        before = {process: one.steps for process, one in stage.programs.items()}
        await trio.sleep(10)
        steps = [one.steps - before[process] for process, one in stage.programs.items()]
        assert sum(steps) >= 0.9 * 10 / 0.008, "nearly all of the time some program runs at full speed"
        assert min(steps) >= 0.8 * max(steps)
        stage.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_with_room_for_all_nothing_is_done(spawn: Spawn) -> None:
    gpu = soft(96 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        steps: list[str] = []
        stage.before = steps.append
        for _ in range(3):
            await stage.come(spawn().pid, 32)
        await trio.sleep(10)
        assert not steps
        assert stage.switch.phase is Phase.FREE
        nursery.cancel_scope.cancel()


@virtual
async def test_turns_end_as_there_is_room_again(spawn: Spawn) -> None:
    gpu = soft(64 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        popen = spawn()
        one = await stage.come(popen.pid, 40)
        other = await stage.come(spawn().pid, 40)
        await trio.sleep(5)
        assert stage.switch.plan.has_turns
        kill(popen)
        await h.gone(one.process)
        stage.left(one.process)
        await trio.sleep(1)
        assert not stage.off
        assert stage.switch.phase is Phase.FREE
        before = stage.rate(other.process)
        await trio.sleep(1)
        assert stage.rate(other.process) - before >= 200
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("step", ["end", "begin", "evict", "fetch"])
@virtual
async def test_a_step_that_fails_leaves_no_program_waiting(spawn: Spawn, step: str) -> None:
    """One whose turn neither ends nor begins runs with all; what does not move is read over the bus."""
    gpu = soft(96 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        for _ in range(3):
            await stage.come(spawn().pid, 48)
        await trio.sleep(2)
        bad = next(iter(stage.programs))
        stage.fails[step, bad] = 1000 if step in ("evict", "fetch") else 2
        before = {process: one.steps for process, one in stage.programs.items()}
        await trio.sleep(12)
        # What is not fetched is read over the bus in each step, which takes 50 ms.
        least = 50 if step == "fetch" else 200
        assert all(one.steps - before[process] > least for process, one in stage.programs.items())
        assert stage.longest_s <= 1 + SLACK_S + (3 * BEGINS_AGAIN_S if step == "begin" else 0)
        stage.fails.clear()
        await trio.sleep(12)
        before = {process: one.steps for process, one in stage.programs.items()}
        await trio.sleep(10)
        assert all(one.steps - before[process] > 1000 for process, one in stage.programs.items())
        nursery.cancel_scope.cancel()


@virtual
async def test_a_turn_whose_end_fails_is_ended_again_at_once(spawn: Spawn) -> None:
    """With one program in every set for some seconds, as a call of the driver took long, no other had its memory."""
    gpu = soft(64 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery, wait_us=3_000_000)
        for _ in range(4):
            await stage.come(spawn().pid, 48)
        await trio.sleep(4)
        bad = next(iter(stage.programs))
        stage.fails["end", bad] = 2
        for _ in range(300):
            await trio.sleep(0.01)
            assert len(stage.switch.plan.sets) == 4
        assert not stage.fails["end", bad]
        stage.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_one_that_does_not_drain_has_no_turns_for_some_time(spawn: Spawn) -> None:
    """It runs with the others, which go on to have theirs."""
    gpu = soft(96 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        for _ in range(3):
            await stage.come(spawn().pid, 48)
        await trio.sleep(2)
        slow = next(iter(stage.programs.values()))
        slow.step_us = 3_000_000
        await trio.sleep(10)
        off_s = 0.0
        for _ in range(4000):
            off_s += 0.005 * stage.is_stuck(slow.process)
            await trio.sleep(0.005)
        assert off_s <= 0.2, "it is not kept off with all of its memory"
        assert stage.longest_s <= 1 + SLACK_S
        slow.step_us = 2000
        await trio.sleep(65)
        turns = stage.turned(slow.process).turns
        await trio.sleep(10)
        assert stage.turned(slow.process).turns > turns
        stage.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_one_that_is_late_for_want_of_memory_keeps_its_turns(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all read over the bus as turns begin is not drained in time. With one of them in every set the others would
    have no room, and be late for that; so each has its turn, and is drained after it."""
    monkeypatch.setattr("tests.support.switched.DRAIN_MOST_US", 100_000)
    gpu = soft(70 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery, wait_us=3_000_000)
        stage.drains_first = True
        for _ in range(4):
            await stage.come(spawn().pid, 48)
        await trio.sleep(8)
        before = {process: (one.steps, stage.turned(process).turns) for process, one in stage.programs.items()}
        await trio.sleep(10)
        steps = [stage.programs[process].steps - steps for process, (steps, _) in before.items()]
        assert sum(steps) >= 0.85 * 10 / 0.002, "most of the time some program runs at full speed"
        assert all(stage.turned(process).turns - turns >= 2 for process, (_, turns) in before.items())
        stage.check()
        nursery.cancel_scope.cancel()


class Story:
    """What happens to three programs, by chance: 200 steps of the switch, and something before any of them."""

    def __init__(self, stage: Stage, spawn: Spawn, seed: int, at: int, what: str) -> None:
        self.stage, self.spawn, self.chance = stage, spawn, random.Random(seed)
        self.at, self.what = at, what
        self.steps = 0
        self.happened = ""
        self.popens: dict[Process, subprocess.Popen[bytes]] = {}
        self.due = trio.Event()
        stage.before = self.before

    def before(self, step: str) -> None:
        self.steps += 1
        if self.steps == self.at:
            self.happened = step
            self.due.set()
            if self.what == "daemon":
                self.stage.stop()

    async def come(self, pages: int) -> None:
        popen = self.spawn()
        one = await self.stage.come(popen.pid, pages)
        one.step_us = self.chance.choice([2000, 8000])
        self.popens[one.process] = popen

    async def happen(self) -> None:
        """Waits for its step, and has it happen."""
        await self.due.wait()
        stage = self.stage
        if self.what == "daemon":
            await stage.reopen()
            stage.before = self.before
            stage.start()
            return
        process = self.chance.choice(list(stage.programs))
        if self.what == "kill":
            pages = len(stage.programs[process].pages)
            kill(self.popens.pop(process))
            await stage.h.gone(process)
            stage.left(process)
            await self.come(pages)
        elif self.what == "limit":
            await stage.h.write(f"{process.pid}/0/gmem.limit.high", 16 * MIB)
            await trio.sleep(0.5)
            await stage.h.write(f"{process.pid}/0/gmem.limit.high", "max")
        else:
            await stage.h.write(f"{process.pid}/0/compute.freeze", 1)
            await trio.sleep(0.5)
            await stage.h.write(f"{process.pid}/0/compute.freeze", 0)


STORIES = int(os.environ.get("GGROUP_SWITCH_STORIES", "4"))
"""Stories of each kind; of 200 there is one for each step."""


@pytest.mark.parametrize("what", ["kill", "daemon", "limit", "freeze"])
@pytest.mark.parametrize("seed", range(STORIES))
@virtual
async def test_whatever_happens_in_a_step_all_go_on(spawn: Spawn, seed: int, what: str) -> None:
    """A kill of a program or of the daemon, a limit, a freeze; at any step of 200."""
    gpu = soft(96 * MIB)
    at = 1 + (200 * seed + 100) // STORIES
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        story = Story(stage, spawn, seed, at, what)
        for pages in (story.chance.randint(8, 48), story.chance.randint(8, 48), 90):  # there is not room for all
            await story.come(pages)
        nursery.start_soon(story.happen)
        with trio.fail_after(600):
            while story.steps < 200:
                await trio.sleep(0.05)
                stage.check()
        assert story.happened in ("end", "begin", "evict", "fetch")
        await trio.sleep(1)
        before = {process: one.steps for process, one in stage.programs.items()}
        await trio.sleep(4)
        assert len(before) == 3
        assert all(one.steps > before[process] for process, one in stage.programs.items()), "all go on"
        assert stage.longest_s <= 1 + SLACK_S + (0.5 if what == "freeze" else 0)
        stage.check()
        nursery.cancel_scope.cancel()


class Sticky(SoftGpu):
    """One on which 8 MiB of each program stay, as its library says; what is asked for in vain is counted."""

    STAYS = 8 * MIB
    vain = 0

    def footprint(self, process: Process) -> Footprint:
        return Footprint(movable=self.resident(process), unmovable=min(self.STAYS, self.resident(process)))

    def resident(self, process: Process) -> int:
        tenant = self._tenants.get(process)
        return 0 if tenant is None else tenant.memory.resident * MIB

    async def reclaim(self, process: Process, nbytes: int) -> int:
        moved = await super().reclaim(process, min(nbytes, max(0, self.resident(process) - self.STAYS)))
        self.vain += not moved
        return moved


@virtual
async def test_what_cannot_move_is_asked_of_none(spawn: Spawn) -> None:
    """A program that moves nothing of what it is asked for is not believed to be drained for a minute."""
    gpu = Sticky(0, SoftConfig(96 * MIB, MIB, RATE, RATE, batch=4 * MIB, switch_us=0))
    async with running(gpu) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpu, nursery)
        for _ in range(4):
            await stage.come(spawn().pid, 48)
        await trio.sleep(2)
        gpu.vain = 0
        await trio.sleep(10)
        assert stage.switch.plan.has_turns
        assert all(stage.turned(process).turns > 3 for process in stage.programs)
        assert not gpu.vain
        stage.check()
        nursery.cancel_scope.cancel()


def test_the_bus_carries_what_the_tests_reckon_with() -> None:
    assert soft(MIB).config.in_bytes_per_s == soft(MIB).config.out_bytes_per_s == RATE
