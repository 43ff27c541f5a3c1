"""Programs that move from GPU to GPU: their settings follow, and a move that fails leaves everything as it was."""

from __future__ import annotations

import errno
import stat
import subprocess
from collections.abc import Callable, Sequence

import pytest
import trio

from backend.process.identity import Member
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from backend.soft.machine import Machine
from tests.support.harness import MIB, Harness, StubGpu, Waker, refuses, running, settle, until, virtual
from tests.support.levers import ASKED, stubs

Spawn = Callable[..., subprocess.Popen[bytes]]


def two(capacity: int = 64 * MIB, other: int = 64 * MIB) -> tuple[SoftGpu, SoftGpu]:
    machine = Machine(2)
    return SoftGpu(0, SoftConfig(capacity=capacity), machine), SoftGpu(1, SoftConfig(capacity=other), machine)


async def pids(h: Harness, gpu: int) -> Sequence[str]:
    return [name for name in await h.listdir("/") if name.isdecimal() and str(gpu) in await h.listdir(name)]


@virtual
async def test_all_that_is_asked_for_follows(spawn: Spawn) -> None:
    one, other = stubs()
    async with running(one, other, scheduler=True) as h:
        process = await h.arrive(spawn().pid, "/jobs", gmem=16 * MIB)
        pid = process.pid
        for name, value in ASKED.items():
            await h.write(f"{pid}/0/{name}", value.strip())
        assert process in one.detached
        await h.write(f"{pid}/0/compute.migrate", 1)
        assert await h.listdir(str(pid)) == ["1"]
        assert {name: await h.read(f"{pid}/1/{name}") for name in ASKED} == ASKED
        assert await h.read(f"{pid}/1/gmem.current") == f"{16 * MIB}\n"
        assert await h.read(f"{pid}/1/compute.events") == "populated 1\nfrozen 1\nmigrated 1\nundone 0\nlost 0\n"
        assert other.detached == {process}
        assert other.timeslices == {process: 4000}
        assert (one.detached, one.timeslices) == (set(), {})
        assert await h.read("slice/jobs/0/gmem.current") == "0\n"
        assert await h.read("slice/jobs/1/gmem.current") == f"{16 * MIB}\n"
        assert await h.read("slice/jobs/0/compute.events") == "populated 0\nfrozen 0\nmigrated 0\nundone 0\nlost 0\n"
        assert await h.read("slice/jobs/1/compute.events") == "populated 1\nfrozen 0\nmigrated 1\nundone 0\nlost 0\n"
        await h.write(f"{pid}/1/compute.freeze", 0)
        assert other.detached == set()
        await h.write(f"{pid}/1/compute.migrate", "GPU-0")
        assert await h.listdir(str(pid)) == ["0"]
        assert "migrated 2\n" in await h.read(f"{pid}/0/compute.events")


@virtual
async def test_whoever_was_given_the_files_has_them_there(spawn: Spawn) -> None:
    async with running(*stubs()) as h:
        process = await h.arrive(spawn().pid)
        file = f"{process.pid}/0/gmem.limit.high"
        h.tree.chown(await h.inode(file), 1000, 1001, 0o664)
        old = await h.inode(file)
        await h.write(f"{process.pid}/0/compute.migrate", 1)
        new = h.tree.attributes(await h.inode(f"{process.pid}/1/gmem.limit.high"))
        assert (new.uid, new.gid, stat.S_IMODE(new.mode)) == (1000, 1001, 0o664)
        assert new.inode != old
        assert h.tree.attributes(await h.inode(f"{process.pid}/1/gmem.limit.low")).uid == 0
        await until(lambda: any(name == b"0" for _, name, _ in h.kernel.dropped), "the kernel forgets the old one")


@virtual
async def test_pollers_hear_of_it(spawn: Spawn) -> None:
    """Pollers of the slice on both GPUs; and a watcher of the process on the old GPU hears that it is gone."""
    async with running(*stubs()) as h:
        process = await h.arrive(spawn().pid, "/jobs")
        wakers = {}
        for path in ("slice/jobs/0", "slice/jobs/1", f"{process.pid}/0"):
            fh = await h.open(f"{path}/compute.events")
            await h.operations.read(fh, 0, 4096)
            wakers[path] = Waker()
            await h.operations.poll(0, fh, wakers[path], h.ctx)
        await h.write(f"{process.pid}/0/compute.migrate", 1)
        assert all(waker.woken for waker in wakers.values()), wakers


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSPC, errno.ENOMEM, errno.EBUSY, errno.ETIMEDOUT, errno.EIO])
@virtual
async def test_one_that_cannot_be_moved_is_as_it_was(spawn: Spawn, code: int) -> None:
    one, other = stubs()
    async with running(one, other, scheduler=True) as h:
        process = await h.arrive(spawn().pid, "/jobs", gmem=16 * MIB)
        for name, value in ASKED.items():
            await h.write(f"{process.pid}/0/{name}", value.strip())
        one.script("migrate", refuses(code))
        assert await h.refused(f"{process.pid}/0/compute.migrate", 1) == code
        await trio.sleep(1)
        assert await h.listdir(str(process.pid)) == ["0"]
        assert {name: await h.read(f"{process.pid}/0/{name}") for name in ASKED} == ASKED
        assert one.detached == {process}
        assert one.timeslices == {process: 4000}
        assert await h.read("slice/jobs/1/gmem.current") == "0\n"
        assert "migrated 0\n" in await h.read(f"{process.pid}/0/compute.events")
        await h.write(f"{process.pid}/0/compute.migrate", 1)


@pytest.mark.parametrize("lever", ["set_timeslice", "detach"])
@virtual
async def test_a_lever_that_does_not_act_at_once_is_pulled_again(spawn: Spawn, lever: str) -> None:
    """The process has moved all the same, and so the writer is told."""
    one, other = stubs()
    async with running(one, other, scheduler=True) as h:
        process = await h.arrive(spawn().pid, "/jobs", gmem=16 * MIB)
        for name, value in ASKED.items():
            await h.write(f"{process.pid}/0/{name}", value.strip())
        other.script(lever, refuses(errno.ETIMEDOUT))
        await h.write(f"{process.pid}/0/compute.migrate", 1)
        await until(lambda: other.timeslices == {process: 4000} and other.detached == {process}, "they hold")
        assert {name: await h.read(f"{process.pid}/1/{name}") for name in ASKED} == ASKED


@pytest.mark.logs("could not give process")
@pytest.mark.parametrize("lever", ["attach", "set_timeslice"])
@virtual
async def test_one_that_cannot_be_let_run_for_its_move_stands_still_again(spawn: Spawn, lever: str) -> None:
    """Some of its levers have moved by then: none of them counts as holding, and the files say what holds."""
    one, other = stubs()
    async with running(one, other, scheduler=True) as h:
        process = await h.arrive(spawn().pid, "/jobs", gmem=16 * MIB)
        for name, value in ASKED.items():
            await h.write(f"{process.pid}/0/{name}", value.strip())
        one.script(lever, refuses(errno.EIO))
        assert await h.refused(f"{process.pid}/0/compute.migrate", 1) == errno.EIO
        await trio.sleep(1)
        assert one.detached == {process}
        assert one.timeslices == {process: 4000}
        assert "off_freeze 1\n" in await h.read(f"{process.pid}/0/gcgroup.stat")


@virtual
async def test_a_directory_made_before_keeps_what_it_had_where_a_move_fails(spawn: Spawn) -> None:
    """mkdir gives a process a directory on every GPU; a moved process has none on the GPU that it left."""
    one, other = stubs()
    async with running(one, other) as h:
        pid = spawn().pid
        await h.controller.make_process(pid)
        await h.write(f"{pid}/1/gmem.limit.high", 8 * MIB)
        await h.arrive(pid, gmem=4 * MIB)
        one.script("migrate", refuses(errno.EBUSY))
        assert await h.refused(f"{pid}/0/compute.migrate", 1) == errno.EBUSY
        assert await h.listdir(str(pid)) == ["0", "1"]
        assert await h.read(f"{pid}/1/gmem.limit.high") == f"{8 * MIB}\n"
        assert await h.read(f"{pid}/1/gmem.current") == "0\n"
        await h.write(f"{pid}/0/compute.migrate", 1)
        assert await h.listdir(str(pid)) == ["1"]
        assert await h.read(f"{pid}/1/gmem.limit.high") == "max\n"


@virtual
async def test_what_is_refused_at_once(spawn: Spawn) -> None:
    one, other = stubs()
    async with running(one, other) as h:
        process = await h.arrive(spawn().pid, gmem=MIB)
        file = f"{process.pid}/0/compute.migrate"
        assert await h.refused(file, 2) == errno.ENODEV
        assert await h.refused(file, "GPU-2") == errno.ENODEV
        assert await h.refused(file, "elsewhere") == errno.EINVAL
        await h.write(file, 0)  # it is there, so a write succeeds
        await h.arrive(process.pid, gpu=1)
        assert await h.refused(file, 1) == errno.EEXIST
        pid = spawn().pid
        await h.controller.make_process(pid)
        assert await h.refused(f"{pid}/0/compute.migrate", 1) == errno.EINVAL
        assert not [call for call in one.calls + other.calls if call[0] == "migrate"]
        other.unsupported.add("compute.migrate")
        assert await h.refused(file, 1) == errno.EOPNOTSUPP


@virtual
async def test_no_room_is_refused_and_nobody_gives_way(spawn: Spawn) -> None:
    """The GPU is full, or a slice's limit there leaves no room: the programs there keep what they have."""
    one, other = StubGpu(0), StubGpu(1, capacity=64 * MIB)
    async with running(one, other) as h:
        process = await h.arrive(spawn().pid, "/jobs", gmem=16 * MIB)
        there = await h.arrive(spawn().pid, gmem=56 * MIB, gpu=1)
        file = f"{process.pid}/0/compute.migrate"
        assert await h.refused(file, 1) == errno.ENOSPC
        assert await h.read(f"{there.pid}/1/gmem.current") == f"{56 * MIB}\n"
        h.controller.bookkeeper.uncharge(there, 1, 48 * MIB, swapped=False)
        await h.write("slice/jobs/1/gmem.limit.high", 8 * MIB)
        assert await h.refused(file, 1) == errno.ENOSPC
        await h.write("slice/jobs/1/gmem.limit.high", "max")
        assert not [call for call in one.calls if call[0] == "migrate"]
        await h.write(file, 1)
        assert await h.listdir(str(process.pid)) == ["1"]


@virtual
async def test_nobody_pulls_a_lever_of_one_on_the_way(spawn: Spawn) -> None:
    """A freeze of its slice, the scheduler's work, and its context's appearance on the other GPU all wait."""
    one, other = stubs()
    moving, done = trio.Event(), trio.Event()

    async def slow() -> None:
        moving.set()
        await done.wait()

    async with running(one, other, scheduler=True) as h:
        process = await h.arrive(spawn().pid, "/jobs", gmem=MIB)
        neighbour = await h.arrive(spawn().pid, "/jobs", gmem=MIB)
        await trio.sleep(1)
        assert process in one.timeslices
        one.script("migrate", slow, pid=process.pid)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(h.write, f"{process.pid}/0/compute.migrate", 1)
            await moving.wait()
            assert process not in one.timeslices
            calls = len(one.calls), len(other.calls)
            await h.controller.bookkeeper.arrive(process, 1)
            assert await h.refused("slice/jobs/0/compute.freeze", 1) == errno.ETIMEDOUT
            await trio.sleep(1)
            late = [call for call in one.calls[calls[0] :] + other.calls[calls[1] :] if call[1] == process.pid]
            assert late == []
            done.set()
        await trio.sleep(1)
        assert await h.listdir(str(process.pid)) == ["1"]
        assert neighbour.pid != process.pid


@virtual
async def test_a_write_meanwhile_finds_the_directory_gone(spawn: Spawn) -> None:
    one, other = stubs()
    moving, done = trio.Event(), trio.Event()

    async def slow() -> None:
        moving.set()
        await done.wait()

    async with running(one, other) as h:
        process = await h.arrive(spawn().pid, gmem=MIB)
        one.script("migrate", slow)
        codes: list[int] = []

        async def write() -> None:
            codes.append(await h.refused(f"{process.pid}/0/gmem.limit.low", 300))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(h.write, f"{process.pid}/0/compute.migrate", 1)
            await moving.wait()
            nursery.start_soon(write)
            await settle()
            done.set()
        assert codes == [errno.ENODEV]
        assert await h.read(f"{process.pid}/1/gmem.limit.low") == "0\n"


@virtual
async def test_one_that_dies_on_the_way(spawn: Spawn) -> None:
    """No table keeps anything of it (the end of the harness checks that)."""
    one, other = stubs()
    child = spawn()

    async with running(one, other) as h:
        before = h.leftovers()
        process = await h.arrive(child.pid, gmem=MIB)

        async def dies() -> None:
            child.kill()
            child.wait()
            await h.gone(process)

        one.script("migrate", dies)
        assert await h.refused(f"{process.pid}/0/compute.migrate", 1) == errno.ENODEV
        assert h.leftovers() == before
        h.check()


@virtual
async def test_moves_take_turns(spawn: Spawn) -> None:
    """Two at once would share the bus: the second begins when the first has ended."""
    one, other = stubs()
    at_once = most = 0

    async def move() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await trio.sleep(20)
        at_once -= 1

    async with running(one, other) as h:
        three = [await h.arrive(spawn().pid, "/jobs", gmem=MIB) for _ in range(3)]
        one.script("migrate", move, move, move)
        async with trio.open_nursery() as nursery:
            for process in three:
                nursery.start_soon(h.write, f"{process.pid}/0/compute.migrate", 1)
        assert most == 1
        assert await pids(h, 1) == [str(process.pid) for process in three]


@virtual
async def test_a_slice_moves_with_all_that_is_in_it(spawn: Spawn) -> None:
    one, other = stubs()
    async with running(one, other) as h:
        members = [await h.arrive(spawn().pid, path, gmem=MIB) for path in ("/jobs", "/jobs/a", "/jobs/a/b")]
        stranger = await h.arrive(spawn().pid, "/other", gmem=MIB)
        there = await h.arrive(spawn().pid, "/jobs", gpu=1)
        await h.write("slice/jobs/0/compute.migrate", 1)
        assert set(await pids(h, 1)) == {str(process.pid) for process in (*members, there)}
        assert await pids(h, 0) == [str(stranger.pid)]
        assert "migrated 3\n" in await h.read("slice/jobs/1/compute.events")
        assert await h.read("slice/jobs/1/gmem.current") == f"{3 * MIB}\n"
        await h.write("slice/jobs/1/compute.freeze", 1)
        assert other.detached == {*members, there}


@virtual
async def test_the_software_gpu_moves_contents_and_work(spawn: Spawn) -> None:
    """Pages on the GPU and in the host, queued kernels, and the handles that the program knows."""
    one, other = two()
    async with running(one, other) as h:
        process = await h.arrive(spawn().pid)
        told: list[int] = []
        tsg = await one.open_context(process, 8, told.append)
        pages = await one.allocate(process, 16 * MIB)
        for page in pages:
            one.write(process, page, 1000 + page)
        await h.write(f"{process.pid}/0/gmem.limit.high", 8 * MIB)
        await one.launch(process, tsg, 100, 1000, range(0))
        await trio.sleep(0.0105)
        assert 0 < told[-1] < 100
        await h.write(f"{process.pid}/0/compute.migrate", 1)
        assert await h.read(f"{process.pid}/1/gmem.current") == f"{8 * MIB}\n"
        assert await h.read(f"{process.pid}/1/gmem.swap.current") == f"{8 * MIB}\n"
        h.check()
        assert (len(one._frames), len(one._slots)) == (0, 0)
        assert [other.read(process, page) for page in pages] == [1000 + page for page in pages]
        assert one.machine.meant(process, 0) == 1
        await trio.sleep(0.2)
        assert told[-1] == 100
        stat_ = dict(line.split() for line in (await h.read(f"{process.pid}/1/gcgroup.stat")).splitlines())
        assert (stat_["submitted"], stat_["finished"]) == ("100", "100")
        assert 100_000 <= int(stat_["gpu_usec"]) <= 110_000
        await h.write(f"{process.pid}/1/compute.migrate", 0)
        assert one.machine.meant(process, 0) == 0
        other.forget(process)
        one.free(process, pages)
        assert await h.read(f"{process.pid}/0/gmem.current") == "0\n"


@virtual
async def test_a_move_of_the_software_gpu_takes_its_time_and_stops_the_program(spawn: Spawn) -> None:
    one, other = two(capacity=1 << 34, other=1 << 34)
    async with running(one, other) as h:
        process = await h.arrive(spawn().pid)
        told: list[int] = []
        tsg = await one.open_context(process, 8, told.append)
        await one.allocate(process, 1650 * MIB)
        await one.launch(process, tsg, 1000, 1000, range(0))
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(h.write, f"{process.pid}/0/compute.migrate", 1)
            await settle()
            await trio.sleep(0.05)
            halfway = told[-1] if told else 0
            assert await one.reclaim(process, MIB) == 0
        took = trio.current_time() - began
        assert took == pytest.approx(2 * 1650 * MIB / 33e9, rel=0.01)
        assert (told[-1] if told else 0) == halfway
        await trio.sleep(0.5)
        assert told[-1] >= 490


@virtual
async def test_a_call_of_the_program_waits_for_the_move(spawn: Spawn) -> None:
    one, other = two()
    async with running(one, other) as h:
        process = await h.arrive(spawn().pid)
        tsg = await one.open_context(process, 8, lambda _: None)
        await one.allocate(process, 32 * MIB)
        order: list[str] = []

        async def call() -> None:
            async with one.machine.gate(process).passed():
                order.append("called")
                gpu = (one, other)[one.machine.meant(process, 0)]
                await gpu.launch(process, tsg, 1, 10, range(0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(h.write, f"{process.pid}/0/compute.migrate", 1)
            await settle()
            nursery.start_soon(call)
            await settle()
            assert order == []
        assert order == ["called"]
        assert h.controller.activity(Member(process, 1)).submitted == 1


@virtual
async def test_a_daemon_that_ends_meanwhile(spawn: Spawn) -> None:
    """The write is cancelled with everything else: nothing is detached, and the software GPU has only one tenant."""
    one, other = two()
    async with running(one, other) as h:
        process = await h.arrive(spawn().pid)
        await one.open_context(process, 8, lambda _: None)
        await one.allocate(process, 32 * MIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(h.write, f"{process.pid}/0/compute.migrate", 1)
            await settle()
            await trio.sleep(0.0005)
            nursery.cancel_scope.cancel()
        assert await h.listdir(str(process.pid)) == ["0"]
        assert one.activity(process).attached == 1
        assert not other._holds_work(process)
        h.check()
