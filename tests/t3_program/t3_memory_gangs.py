"""Memory turns of gangs, on two software GPUs with a scheduler each, in virtual time.

A program on two GPUs waits for both in each step, as for a collective: if one GPU is held, the program stops.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

import attrs
import pytest
import trio

from backend.core.workingset import ANY
from backend.process.identity import Member, Process
from backend.scheduler.memory.levels import UNTIES_S, Levels
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.hardware import Machine
from tests.support.harness import MIB, Harness, running, virtual
from tests.support.switched import RATE

Spawn = Callable[..., subprocess.Popen[bytes]]

STEP_S = 0.01
"""Duration of a step with all memory on the GPU, seconds: longer than the wait at the end of a turn."""
APART_S = 0.06
"""Longest time for which a gang may be on in one place and off in another, seconds: a drain, and levers pulled one by
one.
"""


def machine(capacity: int, count: int = 2) -> list[SoftGpu]:
    """Return the GPUs of one machine."""
    one = Machine()
    config = SoftConfig(capacity, MIB, RATE, RATE, batch=4 * MIB, switch_us=0)
    return [SoftGpu(index, config, one) for index in range(count)]


@attrs.define(eq=False)
class Wide:
    """A program with a context on each of several GPUs, which uses all of its memory on all of them in each step."""

    process: Process
    gpus: Sequence[SoftGpu]
    step_us: int = round(STEP_S * 1e6)
    steps: int = 0
    """Number of steps that all GPUs have finished."""
    tsgs: dict[int, int] = attrs.field(factory=dict)
    pages: dict[int, range] = attrs.field(factory=dict)
    stamps: dict[tuple[int, int], int] = attrs.field(factory=dict)
    done: dict[int, int] = attrs.field(factory=dict)
    """Number of kernels that each GPU has finished."""
    went_on: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    slow: int | None = None
    """GPU whose kernels take 4 s, as if waiting there for a launch elsewhere."""
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    """Cancelled as it is killed, after which it launches nothing."""

    async def make(self, pages: int) -> None:
        for gpu in self.gpus:
            index = gpu.info.index
            self.done[index] = 0
            self.tsgs[index] = await gpu.open_context(self.process, 1, self._finished(index), gated=True)
            self.pages[index] = await gpu.allocate(self.process, pages * MIB)
            for page in self.pages[index]:
                self.stamps[index, page] = 1 + page + self.process.pid
                gpu.write(self.process, page, self.stamps[index, page])

    def _finished(self, index: int) -> Callable[[int], None]:
        def finished(kernels: int) -> None:
            self.done[index] = kernels
            self.went_on.unpark_all()

        return finished

    async def run(self) -> None:
        """Launch on all GPUs, and wait for all of them, again and again."""
        with self.scope:
            while True:
                async with trio.open_nursery() as nursery:
                    for gpu in self.gpus:
                        index = gpu.info.index
                        us = 4_000_000 if index == self.slow else self.step_us
                        args = (self.process, self.tsgs[index], 1, us, self.pages[index])
                        nursery.start_soon(gpu.launch, *args)
                while min(self.done.values()) <= self.steps:
                    await self.went_on.park()
                self.steps += 1

    def check(self) -> None:
        """Check that no content is lost."""
        for gpu in self.gpus:
            for page in self.pages[gpu.info.index]:
                assert gpu.read(self.process, page) == self.stamps[gpu.info.index, page]


class Stage:
    """Programs on the GPUs of a machine."""

    def __init__(self, h: Harness, gpus: Sequence[SoftGpu], spawn: Spawn, nursery: trio.Nursery) -> None:
        self.h, self.gpus, self.spawn, self.nursery = h, gpus, spawn, nursery
        self.each: list[Wide] = []

    async def come(self, pages: int, *on: int, cgroup: str = "/") -> Wide:
        """Start a program with `pages` pages on each of these GPUs."""
        process = await self.h.arrive(self.spawn().pid, cgroup, gpu=on[0])
        for gpu in on[1:]:
            await self.h.controller.bookkeeper.arrive(process, gpu)
        one = Wide(process, [self.gpus[gpu] for gpu in on])
        await one.make(pages)
        self.each.append(one)
        self.nursery.start_soon(one.run)
        return one

    @property
    def levels(self) -> Levels:
        return self.h.controller._schedulers._levels

    def off(self, one: Wide) -> list[bool]:
        """Return whether a program is off the runlist on each of its GPUs."""
        place = self.h.controller._follower.place
        return [place(Member(one.process, gpu.info.index)).off for gpu in one.gpus]

    def turns(self, one: Wide) -> int:
        """Return the number of its turns, on its first GPU."""
        member = Member(one.process, one.gpus[0].info.index)
        turned = self.h.controller.population.record(member).scheduled.turned
        return 0 if turned is None else turned.turns

    async def steps(self, seconds: float) -> list[int]:
        """Return the number of steps of each program in `seconds` seconds."""
        before = [one.steps for one in self.each]
        await trio.sleep(seconds)
        return [one.steps - start for one, start in zip(self.each, before, strict=True)]

    async def apart(self, seconds: float, *gang: Wide) -> float:
        """Return the longest time for which the programs of a gang were on and off at once, on any of their GPUs."""
        longest, since = 0.0, trio.current_time()
        until = since + seconds
        while (now := trio.current_time()) < until:
            if len({is_off for one in gang for is_off in self.off(one)}) == 1:
                since = now
            longest = max(longest, now - since)
            await trio.sleep(0.005)
        return longest


@virtual
async def test_two_programs_of_two_gpus_have_their_turns_on_both(spawn: Spawn) -> None:
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        for _ in range(2):
            await stage.come(64, 0, 1)
        await trio.sleep(5)
        steps = await stage.steps(10)
        assert sum(steps) >= 0.75 * 10 / STEP_S, "one at a time goes at full speed"
        assert min(steps) >= 0.7 * max(steps)
        assert all(stage.turns(one) > 5 for one in stage.each)
        assert [str(place) for place in stage.levels._running] == ["GPUs 0, 1, slice /"]
        for one in stage.each:
            assert await stage.apart(3, one) <= APART_S
            one.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_one_gpu_without_room_is_enough(spawn: Spawn) -> None:
    """A program that is only on the other GPU, where there is room for all, runs all the time."""
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        wide = await stage.come(24, 0, 1)
        await stage.come(80, 0)
        other = await stage.come(8, 1)
        await trio.sleep(5)
        assert stage.turns(wide) > 2
        assert await stage.apart(5, wide) <= APART_S
        assert stage.turns(other) == 0
        wides, tights, others = await stage.steps(5)
        assert min(wides, tights) > 0.2 * 5 / STEP_S, "half of the time; and half of the other GPU meanwhile"
        assert others > 0.6 * 5 / STEP_S
        nursery.cancel_scope.cancel()


@virtual
async def test_programs_that_share_memory_have_their_turns_together(spawn: Spawn) -> None:
    """The programs are on a GPU each, share memory by a common name, and run beside others on each GPU."""
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        pair = [await stage.come(64, 0), await stage.come(64, 1)]
        others = [await stage.come(64, 0), await stage.come(64, 1)]
        for one in pair:
            one.gpus[0].share(one.process, ["both"])
        await trio.sleep(5)
        assert all(stage.turns(one) > 3 for one in (*pair, *others))
        assert await stage.apart(4, *pair) <= APART_S
        steps = await stage.steps(5)
        assert min(steps) > 0.3 * 5 / STEP_S
        nursery.cancel_scope.cancel()


@virtual
async def test_what_is_shared_with_one_that_is_not_known_ties_all_that_share(spawn: Spawn) -> None:
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        pair = [await stage.come(32, 0), await stage.come(16, 0)]
        await stage.come(64, 0)
        for one in pair:
            gpus[0].share(one.process, [ANY])
        await trio.sleep(5)
        assert all(stage.turns(one) > 3 for one in stage.each)
        assert await stage.apart(5, *pair) <= APART_S
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("where", ["beside it", "in another slice"])
@virtual
async def test_there_are_no_turns_where_a_peer_may_have_none(spawn: Spawn, where: str) -> None:
    """The peer is a program without a gate, which may share anything; or a sharer below another level."""
    gpus = machine(160 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        sharer = await stage.come(64, 0, cgroup="/jobs")
        for _ in range(2):
            await stage.come(48, 0, cgroup="/jobs")
        await h.write("slice/jobs/0/gmem.limit.high", 120 * MIB)
        gpus[0].share(sharer.process, [ANY])
        if where == "beside it":
            await gpus[0].open_context(await h.arrive(spawn().pid, "/jobs"), 1, lambda kernels: None)
        else:
            peer = await stage.come(4, 0, cgroup="/others")
            gpus[0].share(peer.process, [ANY])
        await trio.sleep(5)
        turns = stage.turns(sharer)
        for _ in range(1000):
            assert not any(stage.off(sharer))
            await trio.sleep(0.005)
        assert stage.turns(sharer) == turns == 0
        nursery.cancel_scope.cancel()


@virtual
async def test_a_gang_that_does_not_drain_goes_on(spawn: Spawn) -> None:
    """The kernel on one GPU waits for a launch on the other. So the gang has no turns, for ever longer periods; once it
    drains, it has turns.
    """
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        stuck = await stage.come(64, 0, 1)
        await stage.come(64, 0, 1)
        stuck.slow = 1
        await trio.sleep(5)
        ends: list[float] = []
        was_off, since, longest = False, 0.0, 0.0
        until = trio.current_time() + 30
        while (now := trio.current_time()) < until:
            is_off = any(gpu._tenants[stuck.process].gate.is_closed for gpu in stuck.gpus)
            if is_off and not was_off:
                ends.append(now)
                since = now
            longest = max(longest, now - since) if is_off else longest
            was_off = is_off
            await trio.sleep(0.005)
        assert longest <= 0.2, "its gates open soon"
        assert len(ends) <= 8, "and it is left alone"
        stuck.slow = None
        await trio.sleep(60)
        turns = stage.turns(stuck)
        await trio.sleep(10)
        assert stage.turns(stuck) > turns
        stuck.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_gpus_are_tied_as_long_as_a_program_is_on_both(spawn: Spawn) -> None:
    """Each GPU has its own turns before, and some time after, and nothing stays off in between."""
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        popens: list[subprocess.Popen[bytes]] = []

        def kept(*words: object) -> subprocess.Popen[bytes]:
            popens.append(spawn(*words))
            return popens[-1]

        stage = Stage(h, gpus, kept, nursery)
        for gpu in (0, 0, 1, 1):
            await stage.come(56, gpu)
        await trio.sleep(5)
        assert sorted(map(str, stage.levels._running)) == ["GPU 0, slice /", "GPU 1, slice /"]
        wide = await stage.come(32, 0, 1)
        await trio.sleep(5)
        assert list(map(str, stage.levels._running)) == ["GPUs 0, 1, slice /"]
        assert min(await stage.steps(10)) > 0.1 * 10 / STEP_S
        wide.scope.cancel()
        popens[-1].kill()
        popens[-1].wait()
        await h.gone(wide.process)
        stage.each.remove(wide)
        await trio.sleep(5)
        assert list(map(str, stage.levels._running)) == ["GPUs 0, 1, slice /"], "another may come"
        await trio.sleep(UNTIES_S)
        assert sorted(map(str, stage.levels._running)) == ["GPU 0, slice /", "GPU 1, slice /"]
        assert min(await stage.steps(10)) > 0.3 * 10 / STEP_S
        for one in stage.each:
            one.check()
        nursery.cancel_scope.cancel()


@virtual
async def test_one_that_is_on_both_now_and_then_ends_no_turns_of_others(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells what ties the GPUs, and then does not. Where it does so slowly, they are untied more and more rarely."""
    gpus = machine(96 * MIB)
    async with running(*gpus, scheduler=True) as h, trio.open_nursery() as nursery:
        stage = Stage(h, gpus, spawn, nursery)
        for _ in range(3):
            await stage.come(60, 0, cgroup="/user")
        flips = await stage.come(2, 0, 1, cgroup="/other")
        tells, told = True, gpus[1].working_set
        monkeypatch.setattr(
            gpus[1], "working_set", lambda process: told(process) if tells or process != flips.process else None
        )
        await trio.sleep(5)
        running_of, switches = stage.levels._running, set[int]()
        before = [one.steps for one in stage.each]
        for _ in range(20):
            await trio.sleep(1.3)
            tells = not tells
            switches |= {id(one.switch) for one in running_of.values()}
        steps = [one.steps - start for one, start in zip(stage.each, before, strict=True)]
        assert len(switches) == 1
        assert min(steps[:3]) >= 0.1 * 26 / STEP_S, "none is left out"
        places = list[str]()
        for number in range(600):
            tells = number % 40 < 2
            await trio.sleep(1)
            place = ", ".join(map(str, running_of))
            places += [place] if place and places[-1:] != [place] else []
        assert 2 <= len(places) <= 12
        nursery.cancel_scope.cancel()
