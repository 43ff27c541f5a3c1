"""The Controller with hardware that misbehaves: levers that hang, refuse or have bugs, moves, slices, memory."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from typing import Any

import pyfuse3
import pytest
import trio

from backend.common.errors import fail
from backend.core.controller import DEADLINE_S
from backend.core.membership import CGROUP_SWEEP_S
from backend.core.records import OVERCOMMIT
from backend.process.identity import Member, Process, Slice
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, Spawn, StubGpu, Waker, answers, hang, raises, refuses, running, settle, virtual
from tests.support.levers import each_lever

CODES = [errno.EIO, errno.EOPNOTSUPP, errno.ETIMEDOUT, errno.EBUSY, errno.EPERM, errno.ENODEV, errno.EINVAL]


async def elapsed(awaitable: Awaitable[Any]) -> float:
    """Return the virtual seconds that an awaitable takes."""
    began = trio.current_time()
    await awaitable
    return trio.current_time() - began


# A lever that hangs


@each_lever
@virtual
async def test_a_lever_that_hangs_is_one_etimedout(
    spawn: Spawn, name: str, lever: str, value: str, before: str
) -> None:
    """The writer gets ETIMEDOUT at the deadline; before and after it, everything else works for everyone else."""
    gpu = StubGpu()
    async with running(gpu) as h:
        pid, neighbour = spawn().pid, spawn().pid
        for each in (pid, neighbour):
            await h.arrive(each, gmem=8 * MIB)
        file, other = f"{pid}/0/{name}", f"{neighbour}/0/{name}"
        gpu.script(lever, hang, pid=pid)
        codes: list[int] = []

        async def writer() -> None:
            codes.append(await h.refused(file, value))

        async with trio.open_nursery() as nursery:
            began = trio.current_time()
            nursery.start_soon(writer)
            await settle()
            assert await elapsed(h.write(other, value)) < 0.1
            assert await h.read(f"{pid}/0/gmem.current") == f"{8 * MIB}\n"
            assert codes == []
        assert codes == [errno.ETIMEDOUT]
        assert trio.current_time() - began == pytest.approx(DEADLINE_S, abs=0.01)
        assert await h.read(file) == before
        await settle()
        await h.write(file, value)
        assert await h.read(file) == await h.read(other) != before


@virtual
async def test_a_write_that_times_out_leaves_a_later_one_alone(spawn: Spawn) -> None:
    """Of two writers, the first hangs and is refused; the value of the second holds, and is what the file shows."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        file = f"{who.pid}/0/compute.timeslice"
        gpu.script("set_timeslice", hang)
        codes: list[int] = []

        async def first() -> None:
            codes.append(await h.refused(file, "1"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await trio.sleep(1)
            await h.write(file, "3")
        await trio.sleep(1)
        assert codes == [errno.ETIMEDOUT]
        assert await h.read(file) == "3\n"
        assert gpu.timeslices == {who: 3000}


@each_lever
@pytest.mark.parametrize("code", CODES, ids=[errno.errorcode[code] for code in CODES])
@virtual
async def test_a_lever_that_fails_changes_nothing(
    spawn: Spawn, code: int, name: str, lever: str, value: str, before: str
) -> None:
    """The writer gets the driver's errno, the books are unchanged, and the next write holds."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, gmem=8 * MIB)
        file = f"{who.pid}/0/{name}"
        books = h.ledger.books(Member(who, 0))
        gpu.script(lever, refuses(code))
        assert await h.refused(file, value) == code
        assert await h.read(file) == before
        after = h.ledger.books(Member(who, 0))
        assert (after.high, after.low, after.frozen, after.timeslice_us) == (
            books.high,
            books.low,
            books.frozen,
            books.timeslice_us,
        )
        await settle()
        assert gpu.detached == set()
        assert gpu.timeslices == {}
        await h.write(file, value)
        assert await h.read(file) != before


@virtual
async def test_a_thaw_that_acts_and_fails_is_taken_back(spawn: Spawn) -> None:
    """The writer was told that the process is still frozen. So it is frozen again, after it ran for a moment."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        await h.write(f"{who.pid}/0/compute.freeze", "1")

        async def late() -> None:
            gpu.detached.discard(who)
            raise fail(errno.ETIMEDOUT)

        gpu.script("attach", late)
        assert await h.refused(f"{who.pid}/0/compute.freeze", "0") == errno.ETIMEDOUT
        await trio.sleep(1)
        assert await h.read(f"{who.pid}/0/compute.freeze") == "1\n"
        assert gpu.detached == {who}


@pytest.mark.logs("^write failed$")
@each_lever
@virtual
async def test_a_lever_with_a_bug_changes_nothing_and_ends_nothing(
    spawn: Spawn, name: str, lever: str, value: str, before: str
) -> None:
    """An unexpected exception is EIO and one log line; the old value stays, and the mount lives on."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, gmem=8 * MIB)
        file = f"{who.pid}/0/{name}"
        gpu.script(lever, raises(RuntimeError("the bug")))
        assert await h.refused(file, value) == errno.EIO
        assert await h.read(file) == before
        await h.write(file, value)


@pytest.mark.logs("does not follow")
@virtual
async def test_a_freeze_that_failed_on_arrival_is_not_said_to_hold(spawn: Spawn) -> None:
    """A process that enters a frozen slice and whose lever fails keeps running, and compute.events says so."""
    gpu = StubGpu()
    async with running(gpu) as h:
        await h.operations.mkdir(await h.inode("slice"), b"strict", 0o755, h.ctx)
        await h.write("slice/strict/0/compute.freeze", "1")
        gpu.script("detach", refuses(errno.EIO))
        who = await h.arrive(spawn().pid, "/strict")
        assert gpu.detached == set()
        for file in (f"{who.pid}/0/compute.events", "slice/strict/0/compute.events"):
            assert "frozen 0" in await h.read(file)
        await h.write("slice/strict/0/compute.freeze", "1")  # another write moves the lever again
        assert gpu.detached == {who}
        for file in (f"{who.pid}/0/compute.events", "slice/strict/0/compute.events"):
            assert "frozen 1" in await h.read(file)


@pytest.mark.parametrize("error", [RuntimeError("the bug"), OSError(errno.EIO, "the driver")], ids=["bug", "EIO"])
@pytest.mark.parametrize("lever", ["set_timeslice", "detach"])
@pytest.mark.logs("the bug|does not follow")
@virtual
async def test_a_lever_that_fails_in_the_background_ends_nothing(spawn: Spawn, lever: str, error: Exception) -> None:
    """The Controller's own work, here after a move to another slice, may fail: that is a log line, and no unmount."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who, neighbour = [await h.arrive(spawn().pid) for _ in range(2)]
        await h.operations.mkdir(await h.inode("slice"), b"strict", 0o755, h.ctx)
        await h.write("slice/strict/0/compute.timeslice", "4")
        await h.write("slice/strict/0/compute.freeze", "1")
        gpu.script(lever, raises(error))
        h.world.cgroups[who.pid] = Slice("/strict")
        await trio.sleep(4 * CGROUP_SWEEP_S)
        await h.write(f"{neighbour.pid}/0/compute.freeze", "1")
        await h.write(f"{neighbour.pid}/0/compute.freeze", "0")


@virtual
async def test_figures_that_fail_at_the_end_leave_nothing_frozen(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon thaws everything as its last act, even if saving the totals, which comes before, has failed."""
    gpu, found = StubGpu(), []

    def take_all_down() -> None:
        raise RuntimeError("the figures")

    async def live() -> None:
        async with running(gpu) as h:
            found.append((h.controller, await h.arrive(spawn().pid)))
            await h.write(f"{found[0][1].pid}/0/compute.freeze", "1")
            monkeypatch.setattr(h.controller._totals, "take_all_down", take_all_down)

    with pytest.raises(ExceptionGroup) as raised:
        await live()
    ((controller, frozen),) = found
    assert raised.group_contains(RuntimeError, match="the figures")
    assert controller.released
    assert gpu.calls[-1][:2] == ("attach", frozen.pid)


@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT], ids=["EIO", "ETIMEDOUT"])
@pytest.mark.logs("follow|reclaim|move")
@virtual
async def test_a_reclaim_that_fails_after_a_move_ends_nothing(spawn: Spawn, code: int) -> None:
    """A process moves into a slice that is too small for it, on a GPU that refuses to reclaim: the mount stays."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, gmem=8 * MIB)
        await h.operations.mkdir(await h.inode("slice"), b"small", 0o755, h.ctx)
        await h.write("slice/small/0/gmem.limit.high", "1M")
        gpu.script("reclaim", refuses(code))
        h.world.cgroups[who.pid] = Slice("/small")
        await trio.sleep(4 * CGROUP_SWEEP_S)
        assert await h.read("slice/small/0/gmem.limit.high") == f"{MIB}\n"
        h.world.cgroups[who.pid] = Slice("/")
        await trio.sleep(4 * CGROUP_SWEEP_S)
        assert await h.listdir("slice/small") == ["0"], "the sweep goes on"


@pytest.mark.logs("does not follow")
@virtual
async def test_a_reclaim_that_hangs_after_a_move_does_not_stop_the_sweep(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu) as h:
        stuck, mover = await h.arrive(spawn().pid, gmem=8 * MIB), await h.arrive(spawn().pid)
        await h.operations.mkdir(await h.inode("slice"), b"small", 0o755, h.ctx)
        await h.write("slice/small/0/gmem.limit.high", "1M")
        gpu.script("reclaim", hang, hang, hang)
        h.world.cgroups[stuck.pid] = Slice("/small")
        await trio.sleep(1)
        h.world.cgroups[mover.pid] = Slice("/elsewhere")
        await trio.sleep(3 * DEADLINE_S)
        assert "elsewhere" in await h.listdir("slice")


# Slices


@virtual
async def test_a_slice_freezes_whole_or_not_at_all(spawn: Spawn) -> None:
    """If one of three members cannot be stopped, the writer gets its errno and the other two run again."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = [await h.arrive(spawn().pid, "/job") for _ in range(3)]
        gpu.script("detach", refuses(errno.EIO), pid=who[1].pid)
        assert await h.refused("slice/job/0/compute.freeze", 1) == errno.EIO
        await settle()
        assert gpu.detached == set()
        assert await h.read("slice/job/0/compute.freeze") == "0\n"
        assert "frozen 0\n" in await h.read(f"{who[0].pid}/0/compute.events")
        await h.write("slice/job/0/compute.freeze", 1)
        assert gpu.detached == set(who)
        assert "frozen 1\n" in await h.read("slice/job/0/compute.events")


@virtual
async def test_arrival_in_a_frozen_slice(spawn: Spawn) -> None:
    """A new process is off the runlist, with its part of the timeslice, before arrive() returns."""
    gpu = StubGpu()
    async with running(gpu) as h:
        await h.operations.mkdir(await h.inode("slice"), b"job", 0o755, h.ctx)
        await h.write("slice/job/0/compute.timeslice", "4")
        await h.write("slice/job/0/compute.freeze", 1)
        first = await h.arrive(spawn().pid, "/job/deep")
        assert gpu.detached == {first}
        assert gpu.timeslices == {first: 4000}
        second = await h.arrive(spawn().pid, "/job")
        assert gpu.detached == {first, second}
        assert gpu.timeslices[second] == 2000


@virtual
async def test_a_slices_timeslice_is_split_as_they_come_and_go(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu) as h:
        processes = [spawn() for _ in range(4)]
        first = await h.arrive(processes[0].pid, "/job")
        await h.write("slice/job/0/compute.timeslice", "8")
        assert gpu.timeslices == {first: 8000}
        everybody = [first] + [await h.arrive(process.pid, "/job") for process in processes[1:]]
        await settle()
        assert gpu.timeslices == dict.fromkeys(everybody, 2000)
        await h.write(f"{first.pid}/0/compute.timeslice", "1")
        for process, who in zip(processes[1:3], everybody[1:3], strict=True):
            process.kill()
            await h.gone(who)
        await settle()
        assert gpu.timeslices == {first: 1000, everybody[3]: 4000}, "its own, where that is shorter"
        h.world.cgroups[first.pid] = Slice("/other")
        await trio.sleep(2 * CGROUP_SWEEP_S)
        assert gpu.timeslices == {first: 1000, everybody[3]: 8000}


@virtual
async def test_charges_follow_a_move(spawn: Spawn) -> None:
    """After a move the memory is charged to the new slice, whose freeze and limit hold."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, "/a/b", gmem=8 * MIB)
        await h.arrive(spawn().pid, "/c", gmem=MIB)
        await h.write("slice/c/0/compute.freeze", 1)
        await h.write("slice/c/0/gmem.limit.high", "5M")
        h.world.cgroups[who.pid] = Slice("/c/d")
        await trio.sleep(2 * CGROUP_SWEEP_S)
        assert await h.listdir("slice") == ["c"], "empty slices that nobody made go"
        assert await h.read("slice/c/0/gmem.current") == f"{5 * MIB}\n"
        assert await h.read("slice/c/0/gmem.swap.current") == f"{4 * MIB}\n"
        assert who in gpu.detached
        h.world.cgroups[who.pid] = Slice("/a")
        await trio.sleep(2 * CGROUP_SWEEP_S)
        assert who not in gpu.detached
        assert "frozen 0\n" in await h.read(f"{who.pid}/0/compute.events")


@pytest.mark.parametrize("cgroup", ["/job", "/job/deep", "/job/deep/er"])
@virtual
async def test_a_slice_hears_of_its_first_and_last_process(spawn: Spawn, cgroup: str) -> None:
    """compute.events wakes its pollers at the arrival and at the exit, also where a slice in between is removed."""
    gpu = StubGpu()
    async with running(gpu) as h:
        await h.operations.mkdir(await h.inode("slice"), b"job", 0o755, h.ctx)
        fh = await h.open("slice/job/0/compute.events")
        process = spawn()
        for populated in (1, 0):
            before = await h.operations.read(fh, 0, 4096)
            assert before == b"populated %d\nfrozen 0\nmigrated 0\nundone 0\nlost 0\n" % (not populated)
            waker = Waker()
            await h.operations.poll(0, fh, waker, h.ctx)
            if populated:
                who = await h.arrive(process.pid, cgroup)
            else:
                process.kill()
                await h.gone(who)
            assert waker.woken == 1, populated
        await h.operations.release(fh)


@virtual
async def test_who_has_just_ended_keeps_no_directory(spawn: Spawn) -> None:
    """A process that has ended is in no directory at rmdir, even if the daemon has not heard of its end yet."""
    async with running(StubGpu()) as h:
        slices, population = await h.inode("slice"), h.controller.population
        await h.operations.mkdir(slices, b"job", 0o755, h.ctx)
        places = {spawn(): place for place in ("/job", "/job", "/job/deep", "/job/deep")}
        first, *rest = [await h.arrive(process.pid, place) for process, place in places.items()]
        *others, last = places
        assert await answers(h.operations.rmdir(slices, b"job", h.ctx)) == errno.EBUSY
        for process in others:
            process.kill()
            process.wait()
        assert await answers(h.operations.rmdir(pyfuse3.ROOT_INODE, str(first.pid).encode(), h.ctx)) == 0
        assert population.resident(first) is None
        assert await answers(h.operations.rmdir(slices, b"job", h.ctx)) == errno.EBUSY, "one of them lives"
        last.kill()
        last.wait()
        assert await answers(h.operations.rmdir(slices, b"job", h.ctx)) == 0
        assert not any(population.resident(who) for who in rest)
        await settle()
        assert await h.listdir("slice") == []


# Memory


@virtual
async def test_two_reclaims_at_once_take_no_more_than_swap_max(spawn: Spawn) -> None:
    """Each may fall short (EAGAIN), but pages and books agree and swap.max holds."""
    gpu = SoftGpu(0, SoftConfig(capacity=256 * MIB, batch=8 * MIB))
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        await gpu.open_context(who, 1, lambda finished: None)
        await gpu.allocate(who, 128 * MIB)
        await h.write(f"{who.pid}/0/gmem.swap.max", "48M")
        codes: list[int] = []

        async def reclaim() -> None:
            codes.append(await answers(h.write(f"{who.pid}/0/gmem.reclaim", "48M")))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(reclaim)
        assert set(codes) <= {0, errno.EAGAIN}, [errno.errorcode.get(code) for code in codes]
        books = h.ledger.books(Member(who, 0))
        assert books.swap <= 48 * MIB
        h.check()


class Gives(Waker):
    """A program that frees memory at the very moment at which it is told."""

    def __init__(self, free: Callable[[], None]) -> None:
        super().__init__()
        self._free = free

    def notify(self) -> None:
        super().notify()
        self._free()


@virtual
async def test_who_gives_as_soon_as_it_is_told_has_nothing_moved(spawn: Spawn) -> None:
    gpu = SoftGpu(0, SoftConfig(capacity=256 * MIB, batch=8 * MIB))
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        await gpu.open_context(who, 1, lambda finished: None)
        await gpu.allocate(who, 64 * MIB)
        pages = await gpu.allocate(who, 32 * MIB)
        fh, waker = await h.open(f"{who.pid}/0/usermemfd"), Gives(lambda: gpu.free(who, pages))
        assert await h.operations.poll(0, fh, waker, h.ctx) == 0
        began = trio.current_time()
        await h.write(f"{who.pid}/0/gmem.reclaim", "32M")
        assert (waker.woken, trio.current_time() - began) == (1, 0)
        books = h.ledger.books(Member(who, 0))
        assert books.swap == 0
        assert books.current < 96 * MIB
        await h.operations.release(fh)


@virtual
async def test_swap_max_lowered_while_memory_moves(spawn: Spawn) -> None:
    """The move stops or ends; the program's pages and the books agree."""
    gpu = SoftGpu(0, SoftConfig(capacity=256 * MIB, batch=8 * MIB))
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        await gpu.open_context(who, 1, lambda finished: None)
        pages = await gpu.allocate(who, 128 * MIB)
        codes: list[int] = []

        async def limit() -> None:
            codes.append(await answers(h.write(f"{who.pid}/0/gmem.limit.high", "16M")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(limit)
            await settle()
            await h.write(f"{who.pid}/0/gmem.swap.max", "8M")
        assert codes[0] in (0, errno.EAGAIN, errno.EBUSY), errno.errorcode.get(codes[0])
        h.check()
        gpu.free(who, pages)
        assert h.ledger.books(Member(who, 0)).swap == 0


@virtual
async def test_a_huge_allocation_lets_others_in(spawn: Spawn) -> None:
    """Booking 8192 pages takes 0.2 s; other requests are served meanwhile."""
    gpu = SoftGpu(0, SoftConfig(capacity=16 << 30))
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, "/job")
        await gpu.open_context(who, 1, lambda finished: None)
        turns = 0
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def allocate() -> None:
                    await gpu.allocate(who, 16 << 30)
                    scope.cancel()

                nursery.start_soon(allocate)
                while True:
                    turns += 1
                    await trio.lowlevel.checkpoint()
        assert turns > 30


@virtual
async def test_a_process_has_a_bounded_number_of_pages(spawn: Spawn) -> None:
    """The bound counts pages on the GPU and elsewhere; freed ones are available again."""
    capacity = 16 * MIB
    gpu = SoftGpu(0, SoftConfig(capacity=capacity))
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        await gpu.open_context(who, 1, lambda finished: None)
        held = [await gpu.allocate(who, capacity) for _ in range(OVERCOMMIT)]
        for _ in range(2):
            with pytest.raises(OSError, match="Cannot allocate") as raised:
                await gpu.allocate(who, 1)
            assert raised.value.errno == errno.ENOMEM
            gpu.free(who, held.pop())
            await gpu.allocate(who, capacity)


def test_harness_scripts_one_process() -> None:
    """The stub does as scripted, once, and for the scripted process."""
    gpu = StubGpu()
    one, other = Process(1, 1), Process(2, 1)
    gpu.script("detach", refuses(errno.EIO), pid=1)

    async def act() -> None:
        await gpu.detach(other)
        with pytest.raises(OSError, match="Input/output"):
            await gpu.detach(one)
        await gpu.detach(one)

    trio.run(act)
    assert gpu.detached == {one, other}
