"""Deaths in the middle of everything, reused pids, and the end of the mount: nothing may be left behind."""

from __future__ import annotations

import errno
import functools
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from backend.core.controller import DEADLINE_S
from backend.core.records import MAX
from backend.core.settings import TIMESLICE
from backend.door import tenants
from backend.process.identity import Member, Slice, SliceOn
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import MIB, Spawn, StubGpu, answers, hang, raises, refuses, running, settle, until, virtual
from tests.support.levers import each_lever
from tests.support.proc import WITHOUT_MAIN_THREAD, stat_of

# Death


@each_lever
@pytest.mark.parametrize("where", ["process", "slice"])
@virtual
async def test_death_in_the_middle_of_a_write(
    spawn: Spawn, where: str, name: str, lever: str, value: str, before: str
) -> None:
    """A write to the process itself is ENODEV, one to its slice is unaffected; nothing is left of the process."""
    gpu = StubGpu()
    async with running(gpu) as h:
        survivor = await h.arrive(spawn().pid, "/job", gmem=8 * MIB)
        await h.write("slice/job/0/gmem.limit.low", 0)  # so that it stays
        await h.inode("slice/job/0/gmem.limit.low")
        start = h.leftovers()
        victim = spawn()
        who = await h.arrive(victim.pid, "/job", gmem=8 * MIB)

        async def die() -> None:
            victim.kill()
            await h.gone(who)
            raise ProcessLookupError

        gpu.script(lever, die, pid=who.pid)
        if where == "process":
            assert await h.refused(f"{who.pid}/0/{name}", value) == errno.ENODEV
        else:
            await h.write(f"slice/job/0/{name}", value)
            await h.write(f"slice/job/0/{name}", before.strip() if name != "compute.timeslice" else "default")
        await settle()
        assert gpu.detached == set()
        assert gpu.timeslices == {}
        assert h.leftovers() == start
        assert h.controller.population.resident(survivor) is not None


@virtual
async def test_death_of_a_member_while_its_slice_waits_for_it(spawn: Spawn) -> None:
    """One of two writers hangs on a process that then dies; the other freezes the slice, and succeeds."""
    gpu = StubGpu()
    async with running(gpu) as h:
        survivor, victim = await h.arrive(spawn().pid, "/job"), spawn()
        await h.write("slice/job/0/gmem.limit.low", 0)
        await h.inode("slice/job/0/compute.freeze")
        start = h.leftovers()
        who = await h.arrive(victim.pid, "/job")
        released = trio.Event()

        async def wait_and_die() -> None:
            await released.wait()
            raise ProcessLookupError

        gpu.script("set_timeslice", wait_and_die, pid=who.pid)
        codes: list[int] = []

        async def first() -> None:
            codes.append(await h.refused(f"{who.pid}/0/compute.timeslice", 1))

        async def second() -> None:
            await h.write("slice/job/0/compute.freeze", 1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            await settle()
            nursery.start_soon(second)
            await settle()
            victim.kill()
            await h.gone(who)
            released.set()
        assert codes == [errno.ENODEV]
        assert gpu.detached == {survivor}
        await h.write("slice/job/0/compute.freeze", 0)
        assert h.leftovers() == start


@virtual
async def test_crowds_that_die_leave_nothing(spawn: Spawn) -> None:
    """Killed with limits, freezes, open files and memory, they leave every table as it was, the software GPU's too."""
    gpu = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    async with running(gpu) as h:
        start = h.leftovers()
        processes = [spawn() for _ in range(20)]
        for index, process in enumerate(processes):
            who = await h.arrive(process.pid, f"/job/{chr(97 + index % 3)}")
            tsg = await gpu.open_context(who, 1, lambda finished: None)
            pages = await gpu.allocate(who, 4 * MIB)
            await gpu.launch(who, tsg, 10, 1000, pages)
            await h.write(f"{process.pid}/0/gmem.limit.high", "2M")
            await h.write(f"{process.pid}/0/compute.freeze", index % 2)
            await h.listdir(f"{process.pid}/0")
        h.check()
        for process in processes:
            process.kill()
        await until(lambda: len(h.controller.population) == 0, "all are gone")
        await settle()
        assert h.leftovers() == start
        assert h.ledger.books(SliceOn(Slice("/"), 0)).current == 0
        assert (len(gpu._tenants), len(gpu._frames), len(gpu._slots), len(gpu._engine)) == (0, 0, 0, 0)


@pytest.mark.parametrize("late", ["close_context", "free", "write", "set_timeslice", "attach", "launch"])
@virtual
async def test_what_comes_too_late_does_not_bring_a_process_back(spawn: Spawn, late: str) -> None:
    """A connection that is closed, or used, after its process died finds nothing and makes nothing."""
    gpu = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    async with running(gpu) as h:
        process = spawn()
        who = await h.arrive(process.pid)
        tsg = await gpu.open_context(who, 1, lambda finished: None)
        pages = await gpu.allocate(who, 4 * MIB)
        process.kill()
        await h.gone(who)
        calls: dict[str, Callable[[], Any]] = {
            "close_context": functools.partial(gpu.close_context, who, tsg),
            "free": functools.partial(gpu.free, who, pages),
            "write": functools.partial(gpu.write, who, pages.start, 1),
            "launch": functools.partial(gpu.launch, who, tsg, 1, 1, pages),
            "set_timeslice": functools.partial(gpu.set_lever, TIMESLICE, who, 1000),
            "attach": functools.partial(gpu.attach, who),
        }

        async def act() -> None:
            result = calls[late]()
            if result is not None:
                await result

        with pytest.raises(OSError):  # noqa: PT011 - which one is its own business
            await act()
        assert who not in gpu._tenants


# Identity


@virtual
async def test_a_process_outlives_its_main_thread(spawn: Spawn) -> None:
    """/proc/<pid>/stat says Z once the first thread has ended, but the process runs on and counts."""
    gpu = StubGpu()
    async with running(gpu) as h:
        process = spawn(sys.executable, "-c", WITHOUT_MAIN_THREAD)
        await until(lambda: stat_of(process.pid)[0] == "Z", "its main thread has ended")
        assert process.poll() is None
        await h.operations.mkdir(1, b"%d" % process.pid, 0o755, h.ctx)
        await h.write(f"{process.pid}/0/gmem.limit.high", "1M")
        resident = h.controller.population.by_pid(process.pid)
        assert resident is not None
        process.kill()
        await h.gone(resident.process)


@virtual
async def test_a_recycled_pid_inherits_nothing(spawn: Spawn) -> None:
    """A new process with the same pid, before the exit was noticed, has default limits, freeze, owner and charges."""
    gpu = StubGpu()
    async with running(gpu) as h:
        pid = spawn().pid
        start = h.leftovers()
        old = await h.arrive(pid, gmem=8 * MIB)
        for name, value in (
            ("gmem.limit.high", "4M"),
            ("gmem.limit.low", "1M"),
            ("gmem.swap.max", "4M"),
            ("compute.timeslice", 4),
            ("compute.freeze", 1),
        ):
            await h.write(f"{pid}/0/{name}", value)
        h.tree.chown(await h.inode(f"{pid}/0/gmem.limit.high"), 1000, 1000, 0o600)
        h.tree.chown(await h.inode(str(pid)), 1000, 1000, None)
        h.world.later[pid] = 7
        new = await h.arrive(pid)
        assert gpu.forgotten == [old]
        assert gpu.detached == set()
        assert gpu.timeslices == {}
        books = h.ledger.books(Member(new, 0))
        assert (books.high, books.low, books.swap_max) == (MAX, 0, MAX)
        assert (books.current, books.swap, books.frozen, books.timeslice_us) == (0, 0, False, 0)
        attributes = h.tree.attributes(await h.inode(f"{pid}/0/gmem.limit.high"))
        assert (attributes.uid, attributes.gid, attributes.mode & 0o777) == (0, 0, 0o644)
        assert h.tree.attributes(await h.inode(str(pid))).uid == 0
        # Late calls for the old process change nothing of the new one's.
        h.controller.bookkeeper.observe(old, 0, 99)
        with pytest.raises(OSError, match="No such device"):
            await h.controller.bookkeeper.charge(old, 0, MIB)
        assert h.ledger.books(Member(new, 0)) == books
        del h.world.later[pid]
        await h.arrive(pid)
        assert h.leftovers()["residents"] == start["residents"] + 1


@virtual
async def test_mkdir_of_a_recycled_pid(spawn: Spawn) -> None:
    """mkdir notices, too, that the existing directory belongs to a dead process."""
    gpu = StubGpu()
    async with running(gpu) as h:
        pid = spawn().pid
        await h.arrive(pid)
        await h.write(f"{pid}/0/compute.freeze", 1)
        assert await answers(h.operations.mkdir(1, b"%d" % pid, 0o755, h.ctx)) == errno.EEXIST
        h.world.later[pid] = 7
        await h.operations.mkdir(1, b"%d" % pid, 0o755, h.ctx)
        assert await h.read(f"{pid}/0/compute.freeze") == "0\n"


# The end


@virtual
async def test_the_end_thaws_everybody(spawn: Spawn) -> None:
    """After cancellation, frozen processes run again with default timeslices, and no descriptor is left."""
    gpu = StubGpu()
    async with running(gpu) as h:
        for _ in range(5):
            await h.arrive(spawn().pid, "/job")
        await h.write("slice/job/0/compute.timeslice", "5")
        await h.write("slice/job/0/compute.freeze", 1)
        assert len(gpu.detached) == len(gpu.timeslices) == 5
        h.scope.cancel()
    assert gpu.detached == set()
    assert gpu.timeslices == {}


@pytest.mark.parametrize(
    "behave",
    [hang, refuses(errno.EIO), raises(ProcessLookupError()), raises(RuntimeError("the bug"))],
    ids=["hang", "EIO", "dead", "bug"],
)
@virtual
async def test_the_end_thaws_everybody_but_the_one_that_cannot_be(
    spawn: Spawn, behave: Callable[[], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """A process whose lever hangs or fails neither keeps others frozen nor delays the end of the mount."""
    gpu = StubGpu()
    async with running(gpu) as h:
        for _ in range(3):
            await h.arrive(spawn().pid, "/job")
        await h.write("slice/job/0/compute.freeze", 1)
        gpu.script("attach", behave)  # applies to the first process
        began = trio.current_time()
        h.scope.cancel()
    assert trio.current_time() - began <= 2 * DEADLINE_S
    assert len(gpu.detached) == 1
    caplog.clear()  # whether there is a line depends on what failed


@virtual
async def test_the_socket_of_who_mounts_next_is_not_removed(tmp_path: Path) -> None:
    """The path is taken again before the unmounted daemon has ended."""
    path = tmp_path / "tree.sock"
    with tenants.listening(path):
        path.rename(tmp_path / "ours")
        path.touch()
    assert path.exists()
    path.unlink()
    with tenants.listening(path):
        assert path.is_socket()
    assert not path.exists()


@virtual
async def test_a_socket_is_taken_over_once_nobody_listens_there(tmp_path: Path) -> None:
    """A killed daemon's socket is a leftover; a live daemon keeps its own, however busy it is."""
    path = tmp_path / "tree.sock"
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
        with socket.socket(socket.AF_UNIX, kind) as other, socket.socket(socket.AF_UNIX, kind) as waiting:
            other.bind(os.fspath(path))
            other.listen(0)
            waiting.connect(os.fspath(path))
            with pytest.raises(OSError, match="another daemon listens") as caught, tenants.listening(path):
                pass
            assert caught.value.errno == errno.EADDRINUSE
            assert tenants.is_served(path)
        assert not tenants.is_served(path)
        with tenants.listening(path):
            assert tenants.is_served(path)
        assert not path.exists()


def test_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 110)
    assert not tenants.is_served(path)
    with pytest.raises(OSError, match="107 at most: name another") as caught, tenants.listening(path):
        pass
    assert caught.value.errno == errno.ENAMETOOLONG


def test_each_place_has_a_socket_of_its_own() -> None:
    """Its name is short enough for a socket, whatever the mountpoint is called, and the same each time."""
    folder = Path("/run/ggroupfs")
    places = [
        "/",
        "/run/ggroup",
        "/run_ggroup",
        "/run/ggroup%2F",
        "/a b,c",
        "/ü",
        "/\udcff",
        "/" + "x" * 300,
        "/" + "y" * 300,
    ]
    found = [tenants.default_path(folder, place) for place in places]
    assert found == [tenants.default_path(folder, place) for place in places]
    assert len({*found}) == len(places)
    assert str(found[1]) == "/run/ggroupfs/run%2Fggroup.sock"
    for path in found:
        assert path.parent == folder
        assert len(os.fsencode(path)) <= tenants.PATH_MOST
        assert "," not in path.name
