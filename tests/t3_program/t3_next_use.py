"""Reclaim by next use: from the work of programs on the software GPU to the choice of reclaim, in virtual time."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from unittest import mock

import attrs
import pytest
import trio
import trio.testing

from backend.common import clock
from backend.core.foresight import Foresight
from backend.core.nextuse import HOLD_S, IDLE_S, NO_ORDER, NextUse, Order
from backend.core.reasons import Engines
from backend.core.records import Activity
from backend.core.turns import AHEAD_US, TurnEnd
from backend.process.identity import Member, Process
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.cuda_session import until_then
from tests.support.harness import MIB, Harness, StubGpu, running, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

GPU = 64 * MIB
IDLE = IDLE_S[NextUse.IDLE] + HOLD_S + 1.5
"""Seconds after which an inactive program is known to be idle: its time, the hold, and two looks."""
KERNEL_US = 20_000
"""Microseconds of a kernel; a short one would make many events, as the end of each is one."""
LARGE = SoftConfig(capacity=GPU)
"""A GPU of 64 MiB with the bus of a large one."""
BUS = SoftConfig().in_bytes_per_s * GPU // SoftConfig().capacity
"""Bytes a second in each direction of the bus, scaled down as the memory of the GPU is."""
SMALL = SoftConfig(capacity=GPU, out_bytes_per_s=BUS, in_bytes_per_s=BUS)
"""A GPU of 64 MiB whose memory and bus have the proportion of a GPU of 16 GiB."""
BRIEF_US = 2650
"""Microseconds of a kernel that is short beside the fetch of a page on that GPU: 377 a second."""


@attrs.define
class Rig:
    """A software GPU, its daemon, and the programs on it."""

    h: Harness
    gpu: SoftGpu
    spawn: Spawn
    nursery: trio.Nursery

    async def program(
        self, nbytes: int, cgroup: str = "/", *, busy: bool = False, kernel_us: int = KERNEL_US, gated: bool = True
    ) -> Process:
        """Start a program that holds `nbytes`; a `busy` one goes through all of it in kernel after kernel. Without
        `gated` its client knows of no turns."""
        process = await self.h.arrive(self.spawn().pid, cgroup)
        number = await self.gpu.open_context(process, 8, lambda finished: None, gated=gated)
        pages = await self.gpu.allocate(process, nbytes)
        if busy:
            self.nursery.start_soon(self.work, process, number, pages, kernel_us)
        return process

    async def work(self, process: Process, number: int, pages: range, kernel_us: int) -> None:
        """Launch kernels that touch these pages while the program lives, AHEAD_US or one kernel ahead."""
        queue, few = self.gpu._tenants[process].tsgs[number].queue, -(-AHEAD_US // kernel_us)
        with contextlib.suppress(OSError):
            while True:
                if len(queue) <= few:
                    await self.gpu.launch(process, number, few, kernel_us, pages)
                await trio.sleep(few * kernel_us / 2e6)

    def held(self, process: Process) -> int:
        """Return the bytes of a process on the GPU."""
        return self.h.ledger.books(Member(process, 0)).current

    def next_use(self, process: Process) -> NextUse | None:
        """Return the class of a process."""
        return self.h.controller.population.record(Member(process, 0)).memory.next_use

    def rank(self, process: Process) -> int:
        """Return what the ledger knows of a process's next use, as long as that holds."""
        return self.h.ledger._accounts[Member(process, 0)].next_use(clock.boot_usec())

    def turn_end(self, process: Process) -> TurnEnd | None:
        """Return how the turn of a process ended."""
        return self.h.controller.population.record(Member(process, 0)).compute.turn_end

    async def rate(self, process: Process, seconds: float = 2.0) -> float:
        """Return the kernels per second of a program."""
        before = self.gpu.activity(process).finished
        await trio.sleep(seconds)
        after = self.gpu.activity(process).finished
        assert before is not None
        assert after is not None
        return (after - before) / seconds


@contextlib.asynccontextmanager
async def rig(spawn: Spawn, *, scheduler: bool, config: SoftConfig = LARGE) -> AsyncIterator[Rig]:
    """Run a GPU, of 64 MiB by default."""
    gpu = SoftGpu(0, config)
    async with running(gpu, scheduler=scheduler) as h, trio.open_nursery() as nursery:
        yield Rig(h, gpu, spawn, nursery)
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def virtual_boot() -> AsyncIterator[None]:
    """Let what holds for a time by the boot clock end by trio's clock."""
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: int(1e6 * trio.current_time())):
        yield


each_way = pytest.mark.parametrize("scheduler", [True, False], ids=["scheduled", "not scheduled"])


@each_way
@virtual
async def test_a_busy_program_beside_an_idle_one_keeps_its_memory(spawn: Spawn, scheduler: bool) -> None:
    """28 MiB are idle and 44 MiB busy, on 64 MiB: the idle program gives the 8 MiB that are too many."""
    async with rig(spawn, scheduler=scheduler) as r:
        idle = await r.program(28 * MIB)
        await trio.sleep(IDLE)
        busy = await r.program(44 * MIB, busy=True)
        assert (r.held(idle), r.held(busy)) == (20 * MIB, 44 * MIB)
        await trio.sleep(IDLE)
        assert r.next_use(busy) is NextUse.SOON
        assert r.next_use(idle) is NextUse.IDLE
        assert (r.held(idle), r.held(busy)) == (20 * MIB, 44 * MIB)
        assert await r.rate(busy) > 0.9 * 1e6 / KERNEL_US


async def rate_beside(spawn: Spawn, idle: int, busy: int, limit: str, scheduler: bool) -> float:
    """Return the kernels per second of a busy program in a slice with an idle one."""
    async with rig(spawn, scheduler=scheduler, config=SMALL) as r:
        if idle:
            await r.program(idle, "/job")
            await r.h.write("slice/job/0/gmem.limit.high", limit)
        await trio.sleep(IDLE)
        found = await r.rate(await r.program(busy, "/job", busy=True, kernel_us=BRIEF_US), 10.0)
    return found


@each_way
@pytest.mark.parametrize(("idle", "busy", "limit"), [(28, 44, "max"), (16, 24, "32M")], ids=["full card", "slice"])
@virtual
async def test_a_busy_program_beside_an_idle_one_keeps_its_rate(
    spawn: Spawn, idle: int, busy: int, limit: str, scheduler: bool
) -> None:
    """7 GiB idle and 11 busy on 16, and 4 and 6 in a slice of 8, scaled down. By size alone, as it was before, the busy
    program pays for everything."""
    alone = await rate_beside(spawn, 0, busy * MIB, limit, scheduler)
    beside = await rate_beside(spawn, idle * MIB, busy * MIB, limit, scheduler)
    with mock.patch.object(Foresight, "_tell"):
        by_size = await rate_beside(spawn, idle * MIB, busy * MIB, limit, scheduler)
    print(f"kernels/s: alone {alone:.0f}, beside an idle one {beside:.0f}, by size alone {by_size:.0f}")
    assert beside >= 0.9 * alone
    assert by_size <= 0.1 * alone


@each_way
@pytest.mark.parametrize(("idle", "busy", "limit"), [(28, 44, "max"), (16, 24, "32M")], ids=["full card", "slice"])
@virtual
async def test_what_a_busy_program_gave_to_one_that_rests_since_it_has_back_by_a_reclaim(
    spawn: Spawn, idle: int, busy: int, limit: str, scheduler: bool
) -> None:
    """In the other order, the busy program is there first and the other works as it allocates, so the larger gives.
    Once the other is idle, neither takes the memory back: the busy program reaches over the bus in each kernel, until
    an operator has the idle one give."""
    async with rig(spawn, scheduler=scheduler, config=SMALL) as r:
        works = await r.program(busy * MIB, "/job", busy=True, kernel_us=BRIEF_US)
        await r.h.write("slice/job/0/gmem.limit.high", limit)
        alone = await r.rate(works, 10.0)
        rests = await r.program(idle * MIB, "/job")
        room = 64 if limit == "max" else 32
        assert (r.held(works), r.held(rests)) == ((room - idle) * MIB, idle * MIB)
        await trio.sleep(IDLE + 30)
        assert r.next_use(rests) is NextUse.IDLE
        beside, held = await r.rate(works, 10.0), r.held(rests)
        await r.h.write(f"{rests.pid}/0/gmem.reclaim", held)
        await trio.sleep(2)
        after = await r.rate(works, 10.0)
        print(f"kernels/s: alone {alone:.0f}, beside one that rests {beside:.0f}, after a reclaim {after:.0f}")
        assert held == idle * MIB
        assert 0.03 * alone <= beside <= 0.05 * alone
        assert after >= 0.9 * alone
        assert r.held(works) == busy * MIB


@each_way
@virtual
async def test_a_busy_program_with_a_low_gives_nothing_to_one_that_comes(spawn: Spawn, scheduler: bool) -> None:
    """The newcomer keeps in the host what does not fit."""
    async with rig(spawn, scheduler=scheduler, config=SMALL) as r:
        works = await r.program(44 * MIB, busy=True, kernel_us=BRIEF_US)
        await r.h.write(f"{works.pid}/0/gmem.limit.low", "44M")
        alone = await r.rate(works, 10.0)
        rests = await r.program(28 * MIB)
        assert (r.held(works), r.held(rests)) == (44 * MIB, 20 * MIB)
        await trio.sleep(IDLE)
        assert await r.rate(works, 10.0) >= 0.9 * alone


@each_way
@virtual
async def test_the_shape_of_the_kernels_memory_low(spawn: Spawn, scheduler: bool) -> None:
    """The shape of test_memcg_low (tools/testing/selftests/cgroup): a limit of 200M, below it P1 with a low of 50M and
    three idle children of 50M with lows of 75M, 25M and 0, and P2, which allocates 148M. As P2 then cannot give, and
    needs 166M, P1 falls below its low, with `low` events of the children that have one."""
    async with rig(spawn, scheduler=scheduler, config=SoftConfig(capacity=512 * MIB)) as r:
        children = [await r.program(50 * MIB, "/p0/p1") for _ in range(3)]
        await r.h.write("slice/p0/0/gmem.limit.high", "200M")
        await r.h.write("slice/p0/p1/0/gmem.limit.low", "50M")
        for child, low in zip(children, ("75M", "25M", "0"), strict=True):
            await r.h.write(f"{child.pid}/0/gmem.limit.low", low)
        await trio.sleep(IDLE)
        busy = await r.program(148 * MIB, "/p0/p2", busy=True)

        async def figures() -> tuple[int, int, list[int], list[int]]:
            """Return the MiB of P1, of P2 and of P1's children, and the `low` events of the children."""
            p1, p2 = [int(await r.h.read(f"slice/p0/{name}/0/gmem.current")) // MIB for name in ("p1", "p2")]
            events = [await r.h.read(f"{child.pid}/0/gmem.events") for child in children]
            lows = [int(dict(line.split(" ", 1) for line in text.splitlines())["low"]) for text in events]
            print(f"P1 {p1}M ({[r.held(child) // MIB for child in children]}), P2 {p2}M, low events {lows}")
            return p1, p2, [r.held(child) // MIB for child in children], lows

        p1, p2, each, lows = await figures()
        assert 0.9 * 50 <= p1 <= 1.1 * 50
        assert 0.9 * 148 <= p2 <= 1.1 * 148
        assert each[0] >= each[1] > 20 > 3 >= each[2], "29M, 21M and 0 there"
        assert lows == [0, 0, 0]
        await r.h.write(f"{busy.pid}/0/gmem.swap.max", "0")
        await r.gpu.allocate(busy, 18 * MIB)
        p1, p2, each, lows = await figures()
        assert (p1, p2) == (34, 166)
        assert lows[0] > 0
        assert lows[1] > 0
        assert lows[2] == 0


@each_way
@virtual
async def test_an_idle_program_is_idle_still_when_another_comes(spawn: Spawn, scheduler: bool) -> None:
    """A scheduler starts to look when there are two programs, and the second allocates only after a while."""
    async with rig(spawn, scheduler=scheduler) as r:
        idle = await r.program(28 * MIB)
        await trio.sleep(IDLE_S[NextUse.RESTING] + IDLE)
        assert r.next_use(idle) is NextUse.RESTING
        process = await r.h.arrive(r.spawn().pid)
        await r.gpu.open_context(process, 8, lambda finished: None)
        await trio.sleep(5)
        assert r.next_use(idle) is NextUse.RESTING
        await r.gpu.allocate(process, 44 * MIB)
        assert (r.held(idle), r.held(process)) == (20 * MIB, 44 * MIB)


@each_way
@virtual
async def test_a_look_that_takes_long_makes_none_idle(spawn: Spawn, scheduler: bool) -> None:
    """On a machine so slow that a look takes longer than the time until a program is idle, busy ones are not idle."""
    async with rig(spawn, scheduler=scheduler) as r:
        each = [await r.program(8 * MIB, busy=True) for _ in range(3)]
        await trio.sleep(2)
        virtual_clock, looks = trio.lowlevel.current_clock(), 0
        assert isinstance(virtual_clock, trio.testing.MockClock)

        def activity(process: Process) -> Activity:
            nonlocal looks
            looks += 1
            virtual_clock.jump(0.1)
            return r.gpu.activity(process)

        slow = SimpleNamespace(lost=False, activity=activity, footprint=r.gpu.footprint)
        with mock.patch.object(r.h.controller._foresight, "_gpus", {0: slow}):
            for _ in range(100):
                await trio.sleep(1)
                assert {r.next_use(one) for one in each} == {NextUse.SOON}
        assert 9 <= looks <= 18, "20 s of rest for three"


@each_way
@virtual
async def test_what_the_ledger_knows_outlasts_a_part_of_a_look_that_takes_long(spawn: Spawn, scheduler: bool) -> None:
    """The daemon, or the machine, may be stopped in a look; the daemon rests no longer than what it reported holds."""
    async with rig(spawn, scheduler=scheduler) as r, virtual_boot():
        each = [await r.program(8 * MIB) for _ in range(3)]
        await trio.sleep(IDLE)
        virtual_clock = trio.lowlevel.current_clock()
        assert isinstance(virtual_clock, trio.testing.MockClock)

        def activity(process: Process) -> Activity:
            virtual_clock.jump(1.0)
            return r.gpu.activity(process)

        slow = SimpleNamespace(lost=False, activity=activity, footprint=r.gpu.footprint)
        with mock.patch.object(r.h.controller._foresight, "_gpus", {0: slow}):
            for _ in range(100):
                await trio.sleep(1)
                assert all(r.rank(one) > 0 for one in each)


@each_way
@virtual
async def test_what_wakes_during_a_look_that_takes_long_is_near_at_the_next_rest(spawn: Spawn, scheduler: bool) -> None:
    async with rig(spawn, scheduler=scheduler) as r:
        first, last = await r.program(8 * MIB), await r.program(8 * MIB)
        await trio.sleep(IDLE)
        virtual_clock, looks = trio.lowlevel.current_clock(), 0
        assert isinstance(virtual_clock, trio.testing.MockClock)

        def activity(process: Process) -> Activity:
            nonlocal looks
            looks += 1
            virtual_clock.jump(0.05)
            return attrs.evolve(r.gpu.activity(process), finished=looks)

        slow = SimpleNamespace(lost=False, activity=activity, footprint=r.gpu.footprint)
        with mock.patch.object(r.h.controller._foresight, "_gpus", {0: slow}):
            while looks < 1:
                assert min(r.rank(first), r.rank(last)) > 0
                await trio.sleep(0.1)
            await trio.sleep(0.1)
            assert r.rank(first) == 0, "at the first rest, which takes 5 s"
            assert r.rank(last) > 0
            assert looks == 1


@each_way
@virtual
async def test_a_look_asks_for_the_order_of_turns_only_where_it_is_to_tell_something(
    spawn: Spawn, scheduler: bool
) -> None:
    """During its rests, which lengthen with the look: for a thousand programs they are some milliseconds."""
    async with rig(spawn, scheduler=scheduler) as r:
        each = [await r.program(8 * MIB) for _ in range(3)]
        await trio.sleep(IDLE)
        assert all(map(r.rank, each))
        virtual_clock, orders, looks = trio.lowlevel.current_clock(), list[float](), list[float]()
        assert isinstance(virtual_clock, trio.testing.MockClock)
        awake = set[Process]()

        def order(index: int) -> Order:
            orders.append(trio.current_time())
            virtual_clock.jump(0.01)
            return NO_ORDER

        def activity(process: Process) -> Activity:
            looks.append(trio.current_time())
            virtual_clock.jump(0.002)
            return attrs.evolve(r.gpu.activity(process), finished=len(looks) if process in awake else 0)

        slow = SimpleNamespace(lost=False, activity=activity, footprint=r.gpu.footprint)
        foresight = r.h.controller._foresight
        with mock.patch.object(foresight, "_gpus", {0: slow}), mock.patch.object(foresight, "_order", order):
            await trio.sleep(10)
            assert len(orders) == len(looks) // 3, "at the end of each look"
            await until_then(lambda: len(looks) % 3 == 0)
            orders.clear()
            looks.clear()
            awake.add(each[0])
            await until_then(lambda: len(looks) == 2)
            assert len(orders) == 1
            assert r.rank(each[0]) == 0
            assert looks[1] - orders[0] >= 99 * 0.012


@each_way
@virtual
async def test_a_limit_of_a_slice_takes_from_the_idle_first(spawn: Spawn, scheduler: bool) -> None:
    """The largest is busy, and gives only what the idle ones cannot; memory that low protects goes last."""
    async with rig(spawn, scheduler=scheduler) as r:
        idle, other = await r.program(8 * MIB, "/job"), await r.program(8 * MIB, "/job")
        busy = await r.program(32 * MIB, "/job", busy=True)
        await r.h.write(f"{other.pid}/0/gmem.limit.low", "4M")
        await trio.sleep(IDLE)
        await r.h.write("slice/job/0/gmem.limit.high", "40M")
        assert [r.held(one) for one in (idle, other, busy)] == [2 * MIB, 6 * MIB, 32 * MIB]
        await r.h.write("slice/job/0/gmem.limit.high", "34M")
        assert [r.held(one) for one in (idle, other, busy)] == [0, 4 * MIB, 30 * MIB]
        assert "low 0\n" in await r.h.read(f"{other.pid}/0/gmem.events")


@each_way
@virtual
async def test_equals_are_levelled_however_their_turns_go(spawn: Spawn, scheduler: bool) -> None:
    """Two are busy and two idle: in each pair the larger gives until it is level with the other."""
    async with rig(spawn, scheduler=scheduler) as r:
        rest = [await r.program(nbytes * MIB, "/job") for nbytes in (12, 8)]
        work = [await r.program(nbytes * MIB, "/job", busy=True) for nbytes in (20, 16)]
        await trio.sleep(IDLE)
        await r.h.write("slice/job/0/gmem.limit.high", "48M")
        assert [r.held(one) for one in (*rest, *work)] == [6 * MIB, 6 * MIB, 20 * MIB, 16 * MIB]
        await r.h.write("slice/job/0/gmem.limit.high", "32M")
        assert [r.held(one) for one in (*rest, *work)] == [0, 0, 16 * MIB, 16 * MIB]


@virtual
async def test_a_better_priority_is_an_equal_of_those_that_run_behind_it(spawn: Spawn) -> None:
    """An idle program of better priority is included: it runs first as soon as it has work."""
    async with rig(spawn, scheduler=True) as r:
        service = await r.program(24 * MIB, "/job")
        batch = await r.program(24 * MIB, "/job", busy=True)
        await r.h.write(f"{service.pid}/0/compute.priority", 0)
        await trio.sleep(IDLE)
        assert r.next_use(service) is NextUse.SOON
        await r.h.write("slice/job/0/gmem.limit.high", "40M")
        assert [r.held(one) for one in (service, batch)] == [20 * MIB, 20 * MIB]
        await r.h.write(f"{service.pid}/0/compute.priority", 8)
        await trio.sleep(IDLE)
        assert r.next_use(service) is NextUse.IDLE
        await r.h.write("slice/job/0/gmem.limit.high", "32M")
        assert [r.held(one) for one in (service, batch)] == [12 * MIB, 20 * MIB]


@virtual
async def test_one_that_is_behind_gives_with_the_idle_before_it(spawn: Spawn) -> None:
    """A job of worse priority than the default gives with the idle ones, and both before a busy neighbour."""
    async with rig(spawn, scheduler=True) as r:
        idle = await r.program(16 * MIB, "/job")
        work, behind = [await r.program(16 * MIB, "/job", busy=True) for _ in range(2)]
        await r.h.write(f"{behind.pid}/0/compute.priority", 9)
        await trio.sleep(IDLE)
        assert [r.next_use(one) for one in (idle, work, behind)] == [NextUse.IDLE, NextUse.SOON, NextUse.IDLE]
        await r.h.write("slice/job/0/gmem.limit.high", "40M")
        assert [r.held(one) for one in (idle, work, behind)] == [12 * MIB, 16 * MIB, 12 * MIB]


@pytest.mark.parametrize("gated", [True, False], ids=["drained", "ungated"])
@virtual
async def test_of_those_that_take_turns_the_last_are_later(spawn: Spawn, gated: bool) -> None:
    """One leads and six fill in turns: the one whose turn it is, and the next, are near at all times. A drained program
    has no unfinished launch, and yet has work."""
    async with rig(spawn, scheduler=True) as r:
        leader = await r.program(2 * MIB, busy=True, gated=gated)
        await r.h.write(f"{leader.pid}/0/compute.priority", 0)
        fillers = [await r.program(2 * MIB, busy=True, gated=gated) for _ in range(6)]
        await trio.sleep(5)
        later, ends = 0, set()
        for _ in range(50):
            await trio.sleep(0.73)
            order = r.h.controller._schedulers.order(0)
            assert r.next_use(leader) is NextUse.SOON
            assert len(order.waiting) == 5
            assert {r.next_use(one) for one in fillers} <= {NextUse.SOON, NextUse.LATER}
            far = [one for one in fillers if r.next_use(one) is NextUse.LATER]
            later += len(far)
            ends |= {r.turn_end(one) for one in far if one in order.waiting[1:]}
        assert later > 50, "of two that run soon and four that do not, about one at a time is known by its wait"
        assert TurnEnd.DRAINED in ends if gated else ends == {TurnEnd.UNGATED}


@virtual
async def test_one_that_waits_long_for_its_turn_is_not_idle(spawn: Spawn) -> None:
    """Of ten fillers each waits longer for its turn than the time after which a program is idle. The next one is near
    all the same, and the limit of all of them takes from those behind it."""
    async with rig(spawn, scheduler=True) as r:
        leader = await r.program(2 * MIB, busy=True)
        await r.h.write(f"{leader.pid}/0/compute.priority", 0)
        fillers = [await r.program(2 * MIB, busy=True) for _ in range(10)]
        seen = 0
        for _ in range(100):
            await trio.sleep(0.73)
            waiting = r.h.controller._schedulers.order(0).waiting
            assert {r.next_use(one) for one in fillers} <= {NextUse.SOON, NextUse.LATER}
            seen += bool(waiting) and r.next_use(waiting[-1]) is NextUse.LATER
        assert seen > 20


@virtual
async def test_of_those_that_are_behind_the_idle_give_first(spawn: Spawn) -> None:
    """A slice of worse priority has a busy and an idle program, and another idle program is elsewhere. The two are as
    far as that one, and under their own limit the idle one gives all the same."""
    async with rig(spawn, scheduler=True) as r:
        rests, works = await r.program(8 * MIB, "/batch"), await r.program(16 * MIB, "/batch", busy=True)
        notebook = await r.program(2 * MIB)
        await r.h.write("slice/batch/0/compute.priority", 9)
        await trio.sleep(IDLE)
        assert {r.next_use(one) for one in (rests, works, notebook)} == {NextUse.IDLE}
        await r.h.write("slice/batch/0/gmem.limit.high", "20M")
        assert [r.held(one) for one in (rests, works, notebook)] == [4 * MIB, 16 * MIB, 2 * MIB]


@virtual
@pytest.mark.logs("the foresight of GPU 0 failed")
async def test_what_the_ledger_could_not_be_told_is_told_with_the_next_look(spawn: Spawn) -> None:
    """This includes that a busy program is near again, which is said only once."""
    async with rig(spawn, scheduler=False) as r:
        process = await r.program(8 * MIB)
        await r.program(8 * MIB, busy=True)
        await trio.sleep(IDLE)
        account = r.h.ledger._accounts[Member(process, 0)]
        assert account.next_use(clock.boot_usec()) == len(NextUse) * NextUse.IDLE
        number = await r.gpu.open_context(process, 8, lambda finished: None)
        with mock.patch.object(r.h.ledger, "set_next_use", side_effect=OSError(errno.ENOMEM, "")) as refused:
            await r.gpu.launch(process, number, 1, 1000, range(0))
            await until_then(lambda: refused.called)
        await trio.sleep(5)
        assert r.next_use(process) is NextUse.SOON
        assert account.next_use(clock.boot_usec()) == 0


@virtual
async def test_on_a_gpu_that_is_lost_nothing_is_known(spawn: Spawn) -> None:
    async with rig(spawn, scheduler=False) as r:
        process = await r.program(8 * MIB)
        await trio.sleep(IDLE)
        assert r.next_use(process) is NextUse.IDLE
        with mock.patch.object(r.h.controller._foresight, "_gpus", {0: SimpleNamespace(lost=True)}):
            await trio.sleep(1)
            assert r.next_use(process) is None


@virtual
@pytest.mark.logs("cannot be scheduled: ")
async def test_one_that_cannot_be_taken_off_waits_for_no_turn(spawn: Spawn) -> None:
    """It runs all the time, whatever was decided."""
    async with rig(spawn, scheduler=True) as r:
        leader = await r.program(2 * MIB, busy=True)
        await r.h.write(f"{leader.pid}/0/compute.priority", 0)
        stuck = await r.program(2 * MIB, busy=True, gated=False)
        others = [await r.program(2 * MIB, busy=True) for _ in range(5)]
        detach, refused, later = r.gpu.detach, 0, 0

        async def refuse(process: Process, engines: Engines = Engines.ALL) -> None:
            nonlocal refused
            if process == stuck:
                refused += 1
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            await detach(process, engines)

        with mock.patch.object(r.gpu, "detach", refuse):
            for _ in range(60):
                await trio.sleep(0.73)
                assert r.next_use(stuck) in (NextUse.SOON, None)
                later += sum(r.next_use(one) is NextUse.LATER for one in others)
        assert refused > 1
        assert later > 10


@virtual
async def test_a_frozen_program_is_idle_and_one_that_loads_is_not(spawn: Spawn) -> None:
    """A frozen program runs nothing, whatever it has queued. New memory of a program is about to be used."""
    async with rig(spawn, scheduler=True) as r:
        frozen, loads = await r.program(8 * MIB, busy=True), await r.program(2 * MIB)
        await r.program(2 * MIB, busy=True)
        await r.h.write(f"{frozen.pid}/0/compute.freeze", 1)
        for _ in range(8):
            await trio.sleep(IDLE / 8)
            await r.gpu.allocate(loads, 2 * MIB)
        assert (r.next_use(frozen), r.next_use(loads)) == (NextUse.IDLE, NextUse.SOON)
        found = dict(line.split(" ", 1) for line in (await r.h.read(f"{frozen.pid}/0/gcgroup.record")).splitlines())
        assert found["memory.next_use"] == "idle"
        await r.h.write(f"{frozen.pid}/0/compute.freeze", 0)
        await trio.sleep(1.5)
        assert r.next_use(frozen) is NextUse.SOON


@virtual
async def test_a_machine_that_tells_nothing_of_work_plans_by_size(spawn: Spawn) -> None:
    async with running(StubGpu(capacity=GPU)) as h:
        small, large = [await h.arrive(spawn().pid, gmem=nbytes) for nbytes in (16 * MIB, 32 * MIB)]
        await trio.sleep(1000)
        assert await h.read(f"{small.pid}/0/gmem.current") == f"{16 * MIB}\n"
        assert h.controller.population.record(Member(small, 0)).memory.next_use is NextUse.SOON
        await h.arrive(spawn().pid, gmem=32 * MIB)
        assert [h.ledger.books(Member(one, 0)).current for one in (small, large)] == [16 * MIB, 24 * MIB]
