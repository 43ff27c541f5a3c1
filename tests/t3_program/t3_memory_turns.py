"""Memory turns by a daemon with its scheduler, on a software GPU in virtual time."""

from __future__ import annotations

import errno
import logging
import subprocess
from collections.abc import Callable

import pytest
import trio

from backend.process.identity import Member, Process, Slice, SliceOn
from backend.scheduler.memory.claims import Rates
from ggroupfs.client.reading import flat
from tests.support.harness import MIB, Harness, running, virtual
from tests.support.loopers import Programs, Spawn
from tests.support.switched import RATE, soft

STATES = ("memory_runs", "memory_waits")


@virtual
async def test_programs_that_need_more_than_there_is_have_turns(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    """With the driver's slices they did 7 % of this."""
    caplog.set_level(logging.INFO)
    done = {}
    for wait_us in (1_000_000, None):
        gpu = soft(96 * MIB)
        async with running(gpu, scheduler=True, turn_wait_us=wait_us) as h, trio.open_nursery() as nursery:
            programs = Programs(h, gpu, spawn, nursery)
            for _ in range(3):
                await programs.come(48)
            await trio.sleep(5)
            done[wait_us] = await programs.steps(10)
            programs.check()
            turns = [programs.turns(one.process) for one in programs.each]
            assert all(turns) == (wait_us is not None)
            nursery.cancel_scope.cancel()
    assert sum(done[1_000_000]) >= 0.8 * 10 / 0.002
    assert sum(done[None]) <= 0.2 * 10 / 0.002
    assert min(done[1_000_000]) >= 0.7 * max(done[1_000_000])
    said = [one.getMessage() for one in caplog.records if "have turns" in one.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("GPU 0, slice /: programs use more memory")


@virtual
async def test_a_slice_has_turns_of_its_own(spawn: Spawn) -> None:
    """The limit of the slice is its room. A program outside it takes no turns, and is as fast as ever."""
    gpu = soft(256 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(3):
            await programs.come(48, "/jobs")
        other = await programs.come(48, "/other")
        await h.write("slice/jobs/0/gmem.limit.high", 96 * MIB)
        await trio.sleep(5)
        steps = await programs.steps(10)
        assert programs.turns(other.process) == 0
        assert all(programs.turns(one.process) for one in programs.each[:3])
        assert sum(steps) >= 0.75 * 10 / 0.002
        assert int(await h.read("slice/jobs/0/gmem.current")) <= 96 * MIB
        programs.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_with_room_for_all_there_are_no_turns(spawn: Spawn) -> None:
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(3):
            await programs.come(32)
        await programs.steps(10)
        assert not any(programs.turns(one.process) for one in programs.each)
        nursery.cancel_scope.cancel()


@virtual
async def test_turns_begin_as_a_limit_is_lowered(spawn: Spawn) -> None:
    """And not once memory has gone: what runs takes long to give any, and what has its gate closed gives at once."""
    gpu = soft(256 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs, reclaim = Programs(h, gpu, spawn, nursery), gpu.reclaim
        for _ in range(3):
            await programs.come(48, "/jobs")
        await trio.sleep(1)

        async def give(process: Process, nbytes: int) -> int:
            if h.controller.population.record(Member(process, 0)).scheduled.rests:
                return await reclaim(process, nbytes)
            await trio.sleep(4)
            return 0

        gpu.reclaim = give  # type: ignore[method-assign]
        nursery.start_soon(h.write, "slice/jobs/0/gmem.limit.high", 96 * MIB)
        await trio.sleep(1)
        assert int(await h.read("slice/jobs/0/gmem.current")) <= 96 * MIB
        assert any(programs.turns(one.process) for one in programs.each)
        await trio.sleep(4)
        programs.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_turns_end_with_the_pressure(spawn: Spawn) -> None:
    """The programs that waited go on, whatever slice they are in by then. They are told of room, as none is that has
    turns: what comes for those is planned."""
    gpu = soft(256 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(3):
            await programs.come(48, "/jobs")
        await h.write("slice/jobs/0/gmem.limit.high", 96 * MIB)
        await trio.sleep(5)
        assert all(programs.turns(one.process) for one in programs.each)
        told, offer = list[list[int]](), gpu.offer

        def offered(room: Callable[[Process], int]) -> None:
            told.append([room(one.process) for one in programs.each])
            offer(room)

        gpu.offer = offered  # type: ignore[method-assign]
        await h.write("slice/jobs/0/gmem.limit.high", "max")
        await trio.sleep(20)
        assert told[0] == [0, 0, 0]
        assert all(told[-1])
        turns = [programs.turns(one.process) for one in programs.each]
        steps = await programs.steps(10)
        assert [programs.turns(one.process) for one in programs.each] == turns
        stat = flat(await h.read("slice/jobs/0/gcgroup.stat"))
        assert [stat[key] for key in STATES] == [0, 0], "none has a turn any more, and none waits"
        assert min(steps) >= 0.28 * 10 / 0.002
        programs.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_what_leads_waits_for_no_turn(spawn: Spawn) -> None:
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(4):
            await programs.come(30)
        first = programs.each[0].process
        await h.write(f"{first.pid}/0/compute.priority", 0)
        await trio.sleep(10)
        steps = await programs.steps(5)
        assert steps[0] >= 0.7 * 5 / 0.002
        assert programs.turns(first) == 0
        assert gpu.working_set(first).missing == 0
        nursery.cancel_scope.cancel()


class Least:
    """The least that a group has had, bytes, as it is looked at every millisecond."""

    def __init__(self, h: Harness, file: str) -> None:
        self.h, self.file, self.nbytes = h, file, 1 << 62

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.nbytes = min(self.nbytes, int(await self.h.read(self.file)))
            await trio.sleep(0.001)


@pytest.mark.parametrize("levels", [1, 2, 3])
@virtual
async def test_what_low_keeps_stays_and_waits_for_no_turn(spawn: Spawn, levels: int) -> None:
    """Whether its own low does, or that of a slice, also where it is written while there are turns already. A low is
    bounded by those above."""
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        service = (await programs.come(48, "/svc/inner")).process
        for _ in range(2):
            await programs.come(48, "/batch")
        await trio.sleep(5)
        assert programs.turns(service) > 2
        for group in ("slice/svc", "slice/svc/inner", f"{service.pid}")[:levels]:
            await h.write(f"{group}/0/gmem.limit.low", 48 * MIB)
        await trio.sleep(5)
        least, turns = Least(h, f"{service.pid}/0/gmem.current"), programs.turns(service)
        nursery.start_soon(least.run)
        steps = await programs.steps(10)
        assert least.nbytes == 48 * MIB
        assert programs.turns(service) == turns
        assert gpu.working_set(service).missing == 0
        assert flat(await h.read("slice/svc/0/gmem.events"))["low"] == 0
        assert steps[0] >= 0.4 * 10 / 0.002
        assert min(steps[1:]) >= 0.1 * 10 / 0.002
        programs.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_of_what_low_keeps_a_part_of_that_part_stays(spawn: Spawn) -> None:
    """It has turns as the others have, and so much of its memory is there while it waits."""
    gpu = soft(128 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        service = (await programs.come(48, "/svc")).process
        for _ in range(3):
            await programs.come(48, "/batch")
        await h.write("slice/svc/0/gmem.limit.low", 24 * MIB)
        await trio.sleep(5)
        least, turns = Least(h, f"{service.pid}/0/gmem.current"), programs.turns(service)
        nursery.start_soon(least.run)
        steps = await programs.steps(10)
        assert 24 * MIB <= least.nbytes < 48 * MIB
        assert programs.turns(service) > turns + 2
        assert min(steps) >= 0.05 * 10 / 0.002, "the slices have half of the engine each"
        assert sum(steps) >= 0.8 * 10 / 0.002
        programs.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_the_figures_tell_of_turns(spawn: Spawn) -> None:
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(3):
            await programs.come(48, "/jobs")
        path = f"{programs.each[0].process.pid}/0"
        assert "memory_turns" not in await h.read(f"{path}/gcgroup.stat")
        assert "working_set" not in await h.read(f"{path}/gmem.stat")
        await trio.sleep(10)
        stat = flat(await h.read(f"{path}/gmem.stat"))
        turns = flat(await h.read(f"{path}/gcgroup.stat"))["memory_turns"]
        assert turns > 3
        assert stat["working_set"] == 48 * MIB
        assert 0 <= stat["working_set_resident"] <= stat["resident"]
        assert (turns - 1) * 48 * MIB <= stat["turn_fetched_bytes"] <= stat["swapin_bytes"]
        assert (turns - 2) * 48 * MIB <= stat["turn_evicted_bytes"] <= stat["swapout_bytes"]
        assert (stat["turn_missed_bytes"], stat["turn_over_bytes"]) == (0, 0), "it uses the same in each turn"
        every = sum(programs.turns(one.process) for one in programs.each)
        assert flat(await h.read("slice/jobs/0/gcgroup.stat"))["memory_turns"] == every
        seen = set()
        for _ in range(40):
            of_all = flat(await h.read("slice/jobs/0/gcgroup.stat"))
            of_each = [flat(await h.read(f"{one.process.pid}/0/gcgroup.stat")) for one in programs.each]
            assert [of_all[key] for key in STATES] == [sum(one[key] for one in of_each) for key in STATES]
            assert sum(of_all[key] for key in STATES) == 3, "each has its turn, or waits for it"
            seen |= {number for number, one in enumerate(of_each) if one["memory_runs"]}
            assert of_all["memory_runs"] <= 1, "there is room for one and a half"
            await trio.sleep(0.07)
        assert seen == {0, 1, 2}
        nursery.cancel_scope.cancel()


@virtual
async def test_a_program_waits_no_longer_than_is_asked_for(spawn: Spawn) -> None:
    """The bound is set on the slice or on the program; the shortest one holds."""
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True, turn_wait_us=3_000_000) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for number in range(3):
            await programs.come(48, "/patient" if number else "/hasty")
        await h.write("slice/hasty/0/compute.wait.max", 2500)
        hasty = programs.each[0].process
        await h.write(f"{hasty.pid}/0/compute.wait.max", 400)
        await trio.sleep(5)
        waits: list[float] = []
        stopped, since = programs.each[0].steps, trio.current_time()
        for _ in range(2000):
            await trio.sleep(0.005)
            if programs.each[0].steps != stopped:
                waits.append(trio.current_time() - since)
                stopped, since = programs.each[0].steps, trio.current_time()
        assert 0.1 <= max(waits) <= 0.46
        bounds = h.controller._schedulers._each[0]._levels.bounds()
        assert bounds[hasty] == 400_000
        assert {us for process, us in bounds.items() if process != hasty} == {3_000_000}
        nursery.cancel_scope.cancel()


async def _longest_waits(programs: Programs, seconds: float) -> list[float]:
    """Return the longest time that each program waits for a turn, in so many seconds."""
    place = programs.h.controller._follower.place
    now = trio.current_time()
    since, longest, until = [now] * len(programs.each), [0.0] * len(programs.each), now + seconds
    while (now := trio.current_time()) < until:
        for number, one in enumerate(programs.each):
            if not place(Member(one.process, 0)).off:
                since[number] = now
            longest[number] = max(longest[number], now - since[number])
        await trio.sleep(0.001)
    return longest


@virtual
@pytest.mark.parametrize("count", [3, 6, 8])
async def test_many_wait_no_longer_than_the_calls_of_the_driver_allow(spawn: Spawn, count: int) -> None:
    """A switch takes three driver calls per program, of 25 a second, however short the requested wait is."""
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True, turn_wait_us=100_000) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(count):
            await programs.come(48)
        await trio.sleep(10)
        bounds = h.controller._schedulers._each[0]._levels.bounds()
        stall_us = Rates(RATE, RATE).into_usec(48 * MIB)  # two of them fill the room
        assert max(bounds.values()) <= (count - 1) * 150_000 + 25_000 + stall_us
        longest = await _longest_waits(programs, 20)
        assert max(longest) <= max(bounds.values()) / 1e6
        programs.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_nothing_comes_for_one_that_waits_but_as_is_planned(spawn: Spawn) -> None:
    """Free room is offered to none that has turns."""
    gpu = soft(110 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        for _ in range(3):
            await programs.come(48)
        offered: set[tuple[bool, bool]] = set()
        await trio.sleep(5)
        for _ in range(100):
            await trio.sleep(0.03)
            for one in programs.each:
                rests = h.controller._follower.place(Member(one.process, 0)).off
                offered.add((rests, h.controller._notices._room(0, one.process) > 0))
        assert offered == {(False, False), (True, False)}
        nursery.cancel_scope.cancel()


@virtual
async def test_a_program_that_ends_in_any_part_of_its_turns_leaves_nothing(spawn: Spawn) -> None:
    """Another program replaces it, again and again; and nothing of this is in the log."""
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        popens: list[subprocess.Popen[bytes]] = []

        def kept(*words: object) -> subprocess.Popen[bytes]:
            popens.append(spawn(*words))
            return popens[-1]

        programs = Programs(h, gpu, kept, nursery)
        for _ in range(3):
            await programs.come(48)
        await trio.sleep(3)
        for number in range(20):
            await trio.sleep(0.037 * (1 + number % 9))
            gone, popen = programs.each.pop(number % 3), popens.pop(number % 3)
            popen.kill()
            popen.wait()
            await h.gone(gone.process)
            await programs.come(48)
        await trio.sleep(2)
        steps = await programs.steps(5)
        assert all(steps)
        programs.check()
        scheduler = h.controller._schedulers._each[0]
        assert scheduler._rests <= {one.process for one in programs.each}
        nursery.cancel_scope.cancel()


@virtual
async def test_no_memory_moves_for_turns_behind_one_that_is_always_busy(spawn: Spawn) -> None:
    """A thousandth of the engine is not worth a move of memory, and each end of a turn takes time from the program that
    leads.
    """
    gpu = soft(96 * MIB)
    async with running(gpu, scheduler=True) as h, trio.open_nursery() as nursery:
        programs = Programs(h, gpu, spawn, nursery)
        first = await programs.come(4)
        await h.write(f"{first.process.pid}/0/compute.priority", 0)
        for _ in range(3):
            await programs.come(46)
        await trio.sleep(15)
        turns = [programs.turns(one.process) for one in programs.each]
        steps = await programs.steps(10)
        assert [programs.turns(one.process) for one in programs.each] == turns
        assert steps[0] >= 0.95 * 10 / 0.002
        nursery.cancel_scope.cancel()


@virtual
async def test_without_turns_of_memory_there_is_no_wait_for_one() -> None:
    """What would be promised would not hold. What there was to be stays in the books."""
    async with running(soft(64 * MIB), scheduler=True, turn_wait_us=None) as h:
        await h.operations.mkdir(await h.inode("slice"), b"hasty", 0o755, h.ctx)
        assert "compute.wait.max unsupported\n" in await h.read("ggroup.capabilities")
        assert await h.refused("slice/hasty/0/compute.wait.max", 250) == errno.EOPNOTSUPP
        await h.write("slice/hasty/0/compute.weight", 300)
        h.ledger.configure(SliceOn(Slice("/hasty"), 0), wait_max_us=250_000)
        assert await h.read("slice/hasty/0/compute.wait.max") == "250\n"
