"""Turns on the software GPU, in virtual time: the gate closes first, then a bounded drain, then only the GR engine off.

The tests drive turns as a scheduler does: :meth:`end_turn`, then the reason TURN; its end, then :meth:`begin_turn`.
"""

from __future__ import annotations

import errno
import subprocess
from collections import deque
from collections.abc import Callable, Iterator

import attrs
import pytest
import trio

from backend.core.reasons import Engines
from backend.core.records import NOWHERE, Footprint, Place
from backend.core.turns import AHEAD_S, TurnEnd
from backend.core.workingset import WorkingSet
from backend.process.identity import Member, Process
from backend.soft.bus import Way
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from tests.support.harness import MIB, Harness, running, settle, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

MS = 1000
"""One millisecond in microseconds."""
PLENTY_US = 100 * MS
"""Bound within which every short kernel here finishes, microseconds."""


def soft(capacity: int = 64 * MIB, index: int = 0, machine: Machine | None = None) -> SoftGpu:
    """Return a GPU with pages of 1 MiB, switches that cost nothing, and 1 GiB a second in each direction."""
    rate = 1 << 30
    return SoftGpu(index, SoftConfig(capacity, MIB, rate, rate, batch=4 * MIB, switch_us=0), machine)


@attrs.define
class Program:
    """A program with one context, and its turns."""

    h: Harness
    gpu: SoftGpu
    process: Process
    tsg: int
    pages: range
    answered: list[float] = attrs.field(factory=list)
    """Times at which its launches were answered, seconds."""
    refused: list[int] = attrs.field(factory=list)
    """Errnos of its launches."""

    async def launch(self, kernels: int = 1, us: int = MS, pages: range = range(0)) -> None:
        """Launch kernels, and note when that was answered."""
        try:
            await self.gpu.launch(self.process, self.tsg, kernels, us, pages)
        except OSError as error:
            self.refused.append(error.errno or 0)
        else:
            self.answered.append(trio.current_time())

    async def end(self, bound_us: int = PLENTY_US, *, by: Engines = Engines.GR) -> TurnEnd:
        """End its turn."""
        ended = await self.gpu.end_turn(self.process, bound_us)
        await self.off(Place(off=True, engines=by))
        return ended

    async def begin(self) -> None:
        """Begin its next turn."""
        await self.off(NOWHERE)
        await self.gpu.begin_turn(self.process)

    async def off(self, place: Place) -> None:
        """Set its place as the scheduler does."""
        member, follower = Member(self.process, self.gpu.info.index), self.h.controller._follower
        follower.schedule(member, place)
        await follower.apply(member)

    @property
    def work(self) -> tuple[int | None, int | None]:
        """Return the number of kernels launched and finished."""
        activity = self.gpu.activity(self.process)
        return activity.submitted, activity.finished

    @property
    def file(self) -> str:
        """Its directory."""
        return f"{self.process.pid}/{self.gpu.info.index}"

    async def current(self) -> int:
        """Return the bytes that it holds, in pages."""
        return int(await self.h.read(f"{self.file}/gmem.current")) // MIB


async def program(
    h: Harness, gpu: SoftGpu, spawn: Spawn, pages: int = 0, cgroup: str = "/", *, gated: bool = True
) -> Program:
    """Start a program that holds `pages` pages."""
    process = await h.arrive(spawn().pid, cgroup)
    tsg = await gpu.open_context(process, 1, lambda finished: None, gated=gated)
    return Program(h, gpu, process, tsg, await gpu.allocate(process, pages * MIB) if pages else range(0))


# The end of a turn


@virtual
async def test_what_was_launched_before_runs_out_and_what_comes_then_waits(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn)
        await one.launch(10)
        began = trio.current_time()
        assert await one.end() is TurnEnd.DRAINED
        assert trio.current_time() - began == pytest.approx(0.010, abs=0.0002)
        assert one.work == (10, 10)
        nursery.start_soon(one.launch, 3)
        await trio.sleep(1)
        assert one.work == (10, 10)
        assert len(one.answered) == 1
        await one.begin()
        await trio.sleep(0.01)
        assert one.work == (13, 13)
        assert one.answered[1] == pytest.approx(began + 1.010, abs=0.001)


@virtual
async def test_a_program_that_takes_turns_is_not_far_ahead_of_the_engine(spawn: Spawn) -> None:
    """Each kernel of a launch waits on its own, for the engine or for the next turn. Before the end of its first turn,
    and some time after its last turn began, run-ahead is unbounded.
    """
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn)
        await one.launch(100, 5 * MS)
        assert one.work == (100, 0)
        assert await one.end(bound_us=MS) is TurnEnd.LATE
        await one.begin()
        nursery.start_soon(one.launch, 100, 5 * MS)
        await trio.sleep(0.45)
        assert one.work[0] == 100, "what it was ahead before goes first"
        await trio.sleep(0.1)
        for _ in range(20):
            await trio.sleep(0.0123)
            launched, finished = one.work
            assert launched is not None
            assert finished is not None
            assert 1 <= launched - finished <= 3, "10 ms of them, and one"
        assert await one.end(bound_us=15 * MS) is TurnEnd.DRAINED
        done = one.work[1]
        await trio.sleep(1)
        assert one.work == (done, done)
        await one.begin()
        await trio.sleep(0.5)
        assert one.work == (200, 200)
        assert len(one.answered) == 2
        await trio.sleep(AHEAD_S - 0.6)
        began = trio.current_time()
        await one.launch(100, 5 * MS)
        assert trio.current_time() - began == pytest.approx(0.1, abs=0.02)
        assert one.work[0] == 300


@pytest.mark.parametrize(("limit", "ahead"), [(0, range(1, 3)), (28, range(3, 5))])
@virtual
async def test_what_reaches_over_the_bus_is_no_farther_ahead(spawn: Spawn, limit: int, ahead: range) -> None:
    """With 32 MiB or 4 MiB in the host, kernels of 10 us take 31 ms or 4 ms, which count towards the run-ahead."""
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn, 32)
        assert await one.end() is TurnEnd.DRAINED
        await h.write(f"{one.file}/gmem.limit.high", limit * MIB)
        await one.begin()
        nursery.start_soon(one.launch, 100, 10, one.pages)
        for _ in range(20):
            await trio.sleep(0.0123)
            launched, finished = one.work
            assert launched is not None
            assert finished is not None
            assert launched - finished in ahead
        assert await one.end(bound_us=50 * MS) is TurnEnd.DRAINED
        await one.begin()
        nursery.cancel_scope.cancel()


@virtual
async def test_what_comes_back_once_is_no_farther_ahead(spawn: Spawn) -> None:
    """The first of several kernels takes 31 ms on the bus; those behind it wait until that is nearly over."""
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn, 32)
        assert await one.end() is TurnEnd.DRAINED
        await h.write(f"{one.file}/gmem.limit.high", 0)
        await h.write(f"{one.file}/gmem.limit.high", "max")
        await one.begin()
        nursery.start_soon(one.launch, 100, MS, one.pages)
        await trio.sleep(0.01)
        assert one.work == (1, 0)
        await trio.sleep(0.03)
        assert one.work[0] in range(10, 21)
        await trio.sleep(0.2)
        assert one.work == (100, 100)


class Uncounted(deque[int]):
    """A queue that fails if it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("it may be very long")


@pytest.mark.parametrize("bounded", [False, True])
@virtual
async def test_a_launch_costs_no_look_at_what_is_queued(spawn: Spawn, bounded: bool) -> None:
    """The cost is the same whether the launch is refused or waits, and on each retry while it waits."""
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn)
        tenant = gpu._tenants[one.process]
        if bounded:
            await one.end()
            await one.begin()
        tsg = tenant.tsgs[one.tsg]
        tsg.queue = Uncounted()
        most = gpu.config.queue
        nursery.start_soon(one.launch, most, 100)
        await settle()
        assert tenant.pending == 100_000 * tsg.submitted
        await one.launch(most + 1)
        assert one.refused == [errno.EAGAIN]
        await trio.sleep(0.5)
        assert tenant.pending == pytest.approx(100_000 * (tsg.submitted - tsg.finished), abs=100_000)
        assert await gpu.end_turn(one.process, MS) is TurnEnd.LATE
        await one.begin()
        await trio.sleep(10)
        assert tenant.pending == 0
        assert one.work == (most, most)


@virtual
async def test_a_neighbour_makes_a_drain_longer_and_stays_as_it_is(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one, other = await program(h, gpu, spawn), await program(h, gpu, spawn)
        await other.launch(1000)
        await one.launch(10)
        began = trio.current_time()
        assert await one.end(bound_us=15 * MS) is TurnEnd.LATE, "half of the engine is its own"
        assert trio.current_time() - began == pytest.approx(0.015, abs=0.0001)
        await one.off(NOWHERE)
        assert await one.end() is TurnEnd.DRAINED
        assert trio.current_time() - began == pytest.approx(0.010 + 4 * 0.002048, abs=0.0002), "four turns of the other"
        before = other.work[1]
        await trio.sleep(0.1)
        assert before is not None
        assert other.work[1] == pytest.approx(before + 100, abs=2)


@virtual
async def test_a_long_kernel_is_late_and_nothing_of_its_memory_moves(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn, 8)
        await one.launch(1, us=2000 * MS, pages=one.pages)
        began = trio.current_time()
        assert await one.end(50 * MS) is TurnEnd.LATE
        assert trio.current_time() - began == pytest.approx(0.05, abs=0.0002)
        assert gpu.footprint(one.process) == Footprint(movable=0, unmovable=8 * MIB)
        assert f"unmovable {8 * MIB}\n" in await h.read(f"{one.file}/gmem.stat")
        assert await h.refused(f"{one.file}/gmem.limit.high", 4 * MIB) == errno.EBUSY
        assert await gpu.reclaim(one.process, 4 * MIB) == 0
        await trio.sleep(10)
        assert await gpu.end_turn(one.process, 0) is TurnEnd.LATE, "asked again, it says so at once"
        await one.begin()
        await trio.sleep(1)
        assert one.work == (1, 0), "it goes on where it was"
        assert gpu.footprint(one.process) == Footprint()
        assert await one.end(2000 * MS) is TurnEnd.DRAINED
        assert one.work == (1, 1)
        await h.write(f"{one.file}/gmem.limit.high", 4 * MIB)
        assert await one.current() == 4


@virtual
async def test_one_that_is_late_and_stays_on_is_drained_later(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn, 8)
        await one.launch(1, us=100 * MS)
        assert await gpu.end_turn(one.process, 0) is TurnEnd.LATE
        assert await gpu.end_turn(one.process, 99 * MS) is TurnEnd.LATE
        assert await gpu.end_turn(one.process, 2 * MS) is TurnEnd.DRAINED
        assert gpu.footprint(one.process) == Footprint()


@virtual
async def test_exactly_as_long_as_it_may_take_is_in_time(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn)
        for us, ended in ((MS - 1, TurnEnd.LATE), (MS + 1, TurnEnd.DRAINED)):
            await one.launch(1, us=MS)
            assert await gpu.end_turn(one.process, us) is ended, us
            await gpu.begin_turn(one.process)
            await trio.sleep(0.1)


@virtual
async def test_a_launch_that_is_half_way_in_counts_as_launched(spawn: Spawn) -> None:
    """The launch lets other tasks run while it touches its pages; a gate that closes meanwhile does not stop it."""
    gpu = soft(512 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn, 500)
        nursery.start_soon(one.launch, 1, MS, one.pages)
        while not gpu._tenant(one.process).gate.under_way:
            await trio.lowlevel.checkpoint()
        assert one.work == (0, 0)
        assert await gpu.end_turn(one.process, 0) is TurnEnd.LATE
        await one.off(Place(off=True, engines=Engines.GR))
        assert gpu.footprint(one.process).movable == 0
        await one.off(NOWHERE)
        assert await gpu.end_turn(one.process, PLENTY_US) is TurnEnd.DRAINED
        assert one.work == (1, 1)


@virtual
async def test_one_context_without_a_gate_leaves_a_program_ungated(spawn: Spawn) -> None:
    """With such a context nothing is held, not even launches in the others. The program is gated once that context is
    gone.
    """
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn)
        older = await gpu.open_context(one.process, 1, lambda finished: None)
        assert await one.end(by=Engines.ALL) is TurnEnd.UNGATED
        await one.launch()
        assert len(one.answered) == 1
        await one.begin()
        gpu.close_context(one.process, older)
        await trio.sleep(0.01)
        assert await one.end() is TurnEnd.DRAINED
        nursery.start_soon(one.launch)
        await trio.sleep(1)
        assert len(one.answered) == 1
        await gpu.open_context(one.process, 1, lambda finished: None)
        await settle()
        assert len(one.answered) == 2, "the gate would not hold all of it"
        assert await gpu.end_turn(one.process, 0) is TurnEnd.UNGATED
        await one.begin()


@virtual
async def test_a_program_without_a_context_has_nothing_that_is_held(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn)
        assert await gpu.end_turn(one.process, 0) is TurnEnd.DRAINED
        gpu.close_context(one.process, one.tsg)
        assert await gpu.end_turn(one.process, 0) is TurnEnd.UNGATED
        one.tsg = await gpu.open_context(one.process, 1, lambda finished: None, gated=True)
        await one.launch()
        assert len(one.answered) == 1


@virtual
async def test_copies_wait_as_launches_do_and_moves_do_not(spawn: Spawn) -> None:
    """A copy that had begun continues with the GR engine off, and makes its program late."""
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn, 16)
        nursery.start_soon(gpu.copy, one.process, 1 << 29, Way.IN)
        await trio.sleep(0.1)
        assert await one.end(50 * MS) is TurnEnd.LATE
        assert await gpu.reclaim(one.process, MIB) == 0
        await trio.sleep(0.4)
        assert gpu._tenant(one.process).copied == 1 << 29
        assert await gpu.end_turn(one.process, 0) is TurnEnd.DRAINED
        nursery.start_soon(gpu.copy, one.process, 1 << 29, Way.IN)
        began = trio.current_time()
        assert await gpu.reclaim(one.process, 8 * MIB) == 8 * MIB
        assert trio.current_time() - began == pytest.approx(8 / 1024, rel=0.01)
        await trio.sleep(1)
        assert gpu._tenant(one.process).copied == 1 << 29
        await one.begin()
        await trio.sleep(1)
        assert gpu._tenant(one.process).copied == 1 << 30


# The protected neighbour


@virtual
async def test_one_that_waits_gives_for_its_own_limit(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn, 16, "/jobs")
        await one.launch(5, pages=one.pages)
        assert await one.end() is TurnEnd.DRAINED
        await h.write(f"{one.file}/gmem.limit.high", 10 * MIB)
        assert await one.current() == 10
        assert await h.read(f"{one.file}/gmem.swap.current") == f"{6 * MIB}\n"


@pytest.mark.parametrize(("bound_us", "ended"), [(PLENTY_US, TurnEnd.DRAINED), (0, TurnEnd.LATE)])
@virtual
async def test_a_protected_neighbour_loses_nothing_while_one_waits(spawn: Spawn, bound_us: int, ended: TurnEnd) -> None:
    """The waiting program gives memory for their slice. A late one cannot, and then the neighbour gives."""
    gpu = soft()
    async with running(gpu) as h:
        waits, runs = await program(h, gpu, spawn, 16, "/jobs"), await program(h, gpu, spawn, 16, "/jobs")
        await h.write(f"{runs.file}/gmem.limit.low", "max")
        await waits.launch(20, pages=waits.pages)
        assert await waits.end(bound_us) is ended
        await h.write("slice/jobs/0/gmem.limit.high", 20 * MIB)
        assert await h.read("slice/jobs/0/gmem.current") == f"{20 * MIB}\n"
        held = (await waits.current(), await runs.current())
        assert held == ((4, 16) if ended is TurnEnd.DRAINED else (16, 4))
        low = "low 0\n" if ended is TurnEnd.DRAINED else "low 1\n"
        assert low in await h.read(f"{runs.file}/gmem.events")


@virtual
async def test_a_neighbour_that_allocates_takes_of_the_one_that_waits(spawn: Spawn) -> None:
    """This holds on a full GPU, too: the allocation need not wait for the turn."""
    gpu = soft(32 * MIB)
    async with running(gpu) as h:
        waits, runs = await program(h, gpu, spawn, 24), await program(h, gpu, spawn, 8)
        await h.write(f"{runs.file}/gmem.limit.low", "max")
        for i in waits.pages:
            gpu.write(waits.process, i, 1000 + i)
        await waits.launch(5, pages=waits.pages)
        assert await waits.end() is TurnEnd.DRAINED
        await gpu.allocate(runs.process, 12 * MIB)
        assert (await waits.current(), await runs.current()) == (12, 20)
        assert [gpu.read(waits.process, i) for i in waits.pages] == [1000 + i for i in waits.pages]


# Other events in a turn


@virtual
async def test_allocating_and_freeing_need_no_turn(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn, 4)
        assert await one.end() is TurnEnd.DRAINED
        pages = await gpu.allocate(one.process, 8 * MIB)
        gpu.write(one.process, pages[0], 77)
        gpu.free(one.process, one.pages)
        assert gpu.read(one.process, pages[0]) == 77
        assert await one.current() == 8


@virtual
async def test_frozen_and_thawed_while_it_waits(spawn: Spawn) -> None:
    """After the thaw it has its copy engine again, and still waits for its turn; its memory can move all the time."""
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn, 16)
        await one.launch(2)
        assert await one.end() is TurnEnd.DRAINED
        nursery.start_soon(one.launch, 3)
        await h.write(f"{one.file}/compute.freeze", 1)
        assert gpu._tenant(one.process).engines is Engines.ALL
        await h.write(f"{one.file}/compute.freeze", 0)
        assert gpu._tenant(one.process).engines is Engines.GR
        await trio.sleep(1)
        assert one.work == (2, 2)
        assert await gpu.end_turn(one.process, 0) is TurnEnd.DRAINED
        await h.write(f"{one.file}/gmem.limit.high", 8 * MIB)
        await one.begin()
        await trio.sleep(0.1)
        assert one.work == (5, 5)


@virtual
async def test_frozen_when_its_turn_begins(spawn: Spawn) -> None:
    """Its launches are queued then, as for any frozen program, and run once it is thawed."""
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn)
        assert await one.end() is TurnEnd.DRAINED
        nursery.start_soon(one.launch, 3)
        await h.write(f"{one.file}/compute.freeze", 1)
        await one.begin()
        await trio.sleep(1)
        assert one.work == (3, 0)
        assert await gpu.end_turn(one.process, 10 * MS) is TurnEnd.LATE
        await gpu.begin_turn(one.process)
        await h.write(f"{one.file}/compute.freeze", 0)
        await trio.sleep(0.1)
        assert one.work == (3, 3)


@virtual
async def test_moved_to_another_gpu_it_leaves_its_turn(spawn: Spawn) -> None:
    """Its launches on the other GPU are held neither by the old turn nor by a bound on run-ahead from it."""
    machine = Machine(2)
    gpus = soft(machine=machine), soft(index=1, machine=machine)
    async with running(*gpus) as h:
        one = await program(h, gpus[0], spawn, 4)
        assert await one.end() is TurnEnd.DRAINED
        await one.begin()
        await one.launch(2)
        assert await one.end() is TurnEnd.DRAINED
        await h.write(f"{one.file}/compute.migrate", 1)
        one.gpu = gpus[1]
        await one.launch(100)
        assert one.work == (102, 2)
        await trio.sleep(0.2)
        assert one.work == (102, 102)
        assert await gpus[1].end_turn(one.process, 0) is TurnEnd.DRAINED, "there it has turns, too"


@virtual
async def test_killed_while_it_waits(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        popen = spawn()
        one = await program(h, gpu, lambda: popen, 4)
        assert await one.end() is TurnEnd.DRAINED
        nursery.start_soon(one.launch)
        nursery.start_soon(one.launch)
        await settle()
        popen.kill()
        popen.wait()
        await h.gone(one.process)
        await settle()
        assert one.refused == [errno.ESRCH] * 2
        for call in (gpu.begin_turn(one.process), gpu.end_turn(one.process, 0)):
            with pytest.raises(ProcessLookupError):
                await call


@pytest.mark.parametrize("bound_us", [0, 10_000 * MS])
@virtual
async def test_killed_while_it_drains(spawn: Spawn, bound_us: int) -> None:
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        popen = spawn()
        one = await program(h, gpu, lambda: popen, 4)
        await one.launch(1, us=2000 * MS)
        ended: list[object] = []

        async def end() -> None:
            try:
                ended.append(await gpu.end_turn(one.process, bound_us))
            except ProcessLookupError:
                ended.append(None)

        nursery.start_soon(end)
        await settle()
        popen.kill()
        popen.wait()
        await h.gone(one.process)
        await trio.sleep(11)
        assert ended == [None if bound_us else TurnEnd.LATE]


@pytest.mark.logs("is lost", "is back")
@virtual
async def test_lost_while_one_waits(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        one = await program(h, gpu, spawn, 4)
        assert await one.end() is TurnEnd.DRAINED
        nursery.start_soon(one.launch)
        await settle()
        gpu.lose()
        await settle()
        assert one.refused == [errno.ENODEV]
        for call in (gpu.begin_turn(one.process), gpu.end_turn(one.process, 0)):
            with pytest.raises(OSError, match="No such device"):
                await call
        gpu.restore()
        assert await gpu.end_turn(one.process, 0) is TurnEnd.UNGATED, "it is good for nothing but to be given back"
        await one.launch()
        assert one.refused == [errno.ENODEV] * 2
        gpu.close_context(one.process, one.tsg)
        gpu.free(one.process, one.pages)
        await one.off(NOWHERE)
        one.tsg = await gpu.open_context(one.process, 1, lambda finished: None, gated=True)
        await one.launch()
        assert len(one.answered) == 1, "it has a gate that is open"


# Working sets


@virtual
async def test_the_working_set_is_what_was_used_in_the_last_turn(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn, 16)
        assert gpu.working_set(one.process) == WorkingSet(0, 0)
        await one.launch(1, pages=one.pages[:10])
        await one.launch(1, pages=one.pages[5:12])
        assert gpu.working_set(one.process) == WorkingSet(12 * MIB, 12 * MIB), "no turn has ended yet"
        await one.end()
        assert await gpu.reclaim(one.process, 10 * MIB) == 10 * MIB
        found = gpu.working_set(one.process)
        assert found.used == 12 * MIB
        assert found.missing == found.used - found.resident >= 6 * MIB
        await one.begin()
        await one.launch(1, pages=one.pages[:3])
        assert gpu.working_set(one.process).used == 12 * MIB, "this turn is not over"
        await one.end()
        assert gpu.working_set(one.process) == WorkingSet(3 * MIB, 3 * MIB, missed=0, over=9 * MIB)
        await one.begin()
        await one.launch(1, pages=one.pages[2:7])
        await one.end()
        assert gpu.working_set(one.process) == WorkingSet(5 * MIB, 5 * MIB, missed=4 * MIB, over=2 * MIB)
        await one.begin()
        gpu.free(one.process, one.pages)
        assert gpu.working_set(one.process) == WorkingSet(0, 0, missed=4 * MIB, over=2 * MIB)


@virtual
async def test_what_runs_on_into_the_next_turn_is_used_in_it(spawn: Spawn) -> None:
    gpu = soft()
    async with running(gpu) as h:
        one = await program(h, gpu, spawn, 8)
        await one.launch(1, us=100 * MS, pages=one.pages[:4])
        assert await one.end(0) is TurnEnd.LATE
        await one.begin()
        assert await one.end() is TurnEnd.DRAINED
        assert gpu.working_set(one.process) == WorkingSet(4 * MIB, 4 * MIB)
        await one.begin()
        assert await one.end() is TurnEnd.DRAINED
        assert gpu.working_set(one.process) == WorkingSet(0, 0, over=4 * MIB)


# The bus


@virtual
async def test_two_that_give_at_once_share_the_bus_and_one_that_fetches_does_not(spawn: Spawn) -> None:
    """`move_usec` is the time that the moves really took."""
    gpu = soft(256 * MIB)
    async with running(gpu) as h, trio.open_nursery() as nursery:
        each = [await program(h, gpu, spawn, 64) for _ in range(3)]
        began = trio.current_time()
        ends: dict[int, float] = {}

        async def give(one: Program) -> None:
            assert await gpu.reclaim(one.process, 64 * MIB) == 64 * MIB
            ends[one.process.pid] = trio.current_time() - began

        nursery.start_soon(gpu.copy, each[2].process, 64 * MIB, Way.IN)
        for one in each[:2]:
            nursery.start_soon(give, one)
        await trio.sleep(0.0626)
        assert gpu._tenant(each[2].process).copied == 64 * MIB, "at the full speed of its direction"
        assert ends == {}
        await trio.sleep(1)
        assert list(ends.values()) == pytest.approx([0.125, 0.125], rel=0.01)
        usec = [int((await h.read(f"{one.file}/gmem.stat")).split("move_usec ")[1].split()[0]) for one in each[:2]]
        assert sum(usec) == pytest.approx(250_000, rel=0.05)
