"""The GPU size that a program sees from its first question on, which follows from where it is, or would be."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

import backend.process.identity
from backend.core import sight
from backend.core.families import Family
from backend.core.records import Books
from backend.door.wire import CUDA, VERSION, Feature, Op
from backend.process.identity import Process, Slice
from tests.support.cuda_session import GIB, MIB, U64, Drive, Program, Rig, drive, pieces
from tests.support.harness import Harness, Spawn, settle, virtual
from tests.support.units import FakeManager, manager, policy
from tests.t3_program.families import ask

__all__ = ["drive", "manager", "pieces"]  # fixtures

CAPACITY = 80 * GIB


@pytest.mark.parametrize(
    ("levels", "total", "limits"),
    [
        ([], sight.WHOLE, (sight.WHOLE, 0)),
        ([Books(current=GIB)], sight.WHOLE, (sight.WHOLE, 0)),
        ([Books(high=4 * GIB, current=GIB)], 4 * GIB, (4 * GIB, 3 * GIB)),
        ([Books(limit_max=4 * GIB, current=GIB)], 4 * GIB, (4 * GIB, 3 * GIB)),
        ([Books(high=2 * GIB, limit_max=4 * GIB, current=GIB)], 4 * GIB, (2 * GIB, GIB)),
        ([Books(high=8 * GIB, limit_max=4 * GIB, current=GIB)], 4 * GIB, (4 * GIB, 3 * GIB)),
        ([Books(high=2 * GIB, current=GIB), Books(limit_max=4 * GIB, current=4 * GIB)], 4 * GIB, (2 * GIB, 0)),
        ([Books(limit_max=6 * GIB), Books(limit_max=4 * GIB, current=5 * GIB)], 4 * GIB, (4 * GIB, 0)),
        ([Books(high=3 * GIB), Books(high=2 * GIB)], 2 * GIB, (2 * GIB, 2 * GIB)),
        ([Books(high=4 * GIB, limit_max=CAPACITY)], 4 * GIB, (4 * GIB, 4 * GIB)),
        ([Books(high=CAPACITY, limit_max=CAPACITY)], sight.WHOLE, (sight.WHOLE, 0)),
        ([Books(limit_max=0)], 0, (0, 0)),
    ],
)
def test_the_hard_limit_counts_and_else_the_high(levels: list[Books], total: int, limits: tuple[int, int]) -> None:
    """The smallest limit on the path counts. Free memory is free under all limits, and at most the total."""
    path = [*levels, Books(high=CAPACITY, current=70 * GIB)]
    assert sight.total(path, CAPACITY) == total
    assert sight.limits(path, CAPACITY) == limits
    assert 0 <= limits[1] <= total


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([Books(current=GIB)], (sight.WHOLE, 0)),
        ([Books(high=4 * GIB, current=GIB)], (3 * GIB, GIB)),
        ([Books(current=GIB), Books(limit_max=4 * GIB, current=3 * GIB)], (GIB, 3 * GIB)),
        ([Books(high=2 * GIB, current=GIB), Books(limit_max=4 * GIB, current=4 * GIB)], (0, GIB)),
        ([Books(high=2 * GIB, current=GIB), Books(high=2 * GIB, current=2 * GIB)], (0, GIB)),
        ([Books(high=2 * GIB, current=3 * GIB)], (0, 3 * GIB)),
    ],
)
def test_what_nvml_says_is_of_the_level_with_the_least_limit(levels: list[Books], expected: tuple[int, int]) -> None:
    """The free bytes are those under all limits."""
    assert sight.view([*levels, Books(high=CAPACITY, current=70 * GIB)], CAPACITY) == expected


async def total(program: Program, gpu: int = 0) -> int:
    return (await program.ask(Op.TOTAL, gpu=gpu)).check().args[0]


async def greeted(rig: Rig, process: Process) -> Program:
    """Connect a program that has only greeted."""
    program = rig.connect(process)
    (await program.ask(Op.HELLO, VERSION, CUDA)).check()
    return program


def test_a_hard_limit_alone_is_seen(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        assert await total(program) == U64
        await rig.h.write(program.file + "gmem.limit.max", "4G")
        assert (await program.ask(Op.LIMITS)).check().args[:3] == (4 * GIB, 3 * GIB, 0)
        assert await total(program) == 4 * GIB
        await rig.h.write(program.file + "gmem.limit.high", "2G")
        assert (await program.ask(Op.LIMITS)).check().args[:3] == (2 * GIB, GIB, 0)
        assert await total(program) == 4 * GIB, "what it can ever have"
        await rig.h.write("slice/job/0/gmem.limit.max", "3G")
        assert await total(program) == 3 * GIB, "the least of the path"

    drive(test)


def test_one_that_only_asks_is_told_and_not_in_the_tree(drive: Drive) -> None:
    """The answer follows the limits of its place; the program reports no memory, and uses no GPU."""

    async def test(rig: Rig) -> None:
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"job", 0o755, rig.h.ctx)
        await rig.h.write("slice/job/0/gmem.limit.high", "4G")
        program = await greeted(rig, rig.process("/job/part"))
        assert await total(program) == 4 * GIB
        assert str(program.process.pid) not in await rig.h.listdir("/")
        assert "part" not in await rig.h.listdir("slice/job"), "no slice came by it"
        rig.h.world.cgroups[program.process.pid] = Slice("/other")
        assert await total(program) == U64, "it is elsewhere by now"
        assert (await program.ask(Op.TOTAL, gpu=1)).status == -errno.ENODEV
        assert (await program.ask(Op.LIMITS)).status == -errno.ENODEV, "that is for what is managed"

    drive(test)


def test_what_was_set_on_a_process_before_it_begins(drive: Drive) -> None:
    """`ggroupfs run` does so."""

    async def test(rig: Rig) -> None:
        process = rig.process()
        await rig.h.controller.make_process(process.pid)
        await rig.h.write(f"{process.pid}/0/gmem.limit.high", "1G")
        program = await greeted(rig, process)
        assert await total(program) == 1 * GIB
        await rig.h.write(f"{process.pid}/0/gmem.limit.max", "2G")
        assert await total(program) == 2 * GIB

    drive(test)


@pytest.mark.logs("its library is older than this daemon and lacks view")
def test_what_is_free_and_used_is_told_with_it_each_time(drive: Drive) -> None:
    """They are those of the slice that the sender is in, without a context, too; an older library is told the size
    alone."""

    class Older(Program):
        features = CUDA & ~Feature.VIEW

    async def test(rig: Rig) -> None:
        await rig.program(1 * GIB, "/job")
        program = await greeted(rig, rig.process("/job/part"))
        assert (await program.ask(Op.TOTAL)).check().args[:3] == (U64, U64, 0)
        await rig.h.write("slice/job/0/gmem.limit.max", "4G")
        assert (await program.ask(Op.TOTAL)).check().args[:3] == (4 * GIB, 3 * GIB, GIB)
        await rig.h.write("slice/job/0/gmem.limit.high", "2G")
        assert (await program.ask(Op.TOTAL)).check().args[:3] == (4 * GIB, GIB, GIB)
        assert str(program.process.pid) not in await rig.h.listdir("/")
        older = rig.connect(rig.process("/job/part"), Older)
        (await older.ask(Op.HELLO, VERSION, Older.features)).check()
        assert (await older.ask(Op.TOTAL)).check().args == (4 * GIB, 0, 0, 0, 0)

    drive(test)


def test_each_gpu_by_itself(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        await rig.h.write("slice/job/1/gmem.limit.max", "4G")
        assert (await total(program), await total(program, 1)) == (U64, 4 * GIB)
        assert not rig.h.controller.bookkeeper.knows(program.process, 1)

    drive(test, 2)


def test_families_that_it_was_promised(drive: Drive) -> None:
    """Their slices are made with its first context."""

    async def test(rig: Rig) -> None:
        outer, inner = Family(7, os.geteuid(), {"limit_max": 8 * GIB}), Family(8, os.geteuid(), {"high": 4 * GIB})
        process = rig.process("/job")
        await ask(rig.h, process.pid, outer)
        program = await greeted(rig, process)
        assert await total(program) == 8 * GIB
        await ask(rig.h, process.pid, outer, inner)
        assert await total(program) == 8 * GIB
        another = rig.process("/job")
        await ask(rig.h, another.pid, inner)
        assert await total(await greeted(rig, another)) == 4 * GIB
        assert len(rig.h.controller.population) == 0
        await program.manage()
        assert await total(program) == 8 * GIB, "as it was"

    drive(test)


@pytest.mark.logs("its library is older than this daemon and lacks total")
def test_a_library_that_does_not_know_of_it_is_told_the_limit_of_the_moment(drive: Drive) -> None:
    class Older(Program):
        features = CUDA & ~Feature.TOTAL

    async def test(rig: Rig) -> None:
        program = await rig.connect(rig.process(), Older).manage()
        assert (await program.ask(Op.TOTAL)).status == -errno.ENOSYS
        for limit in (4 * GIB, 2 * GIB):
            await rig.h.write(program.file + "gmem.limit.max", limit)
            assert (await program.ask(Op.LIMITS)).check().args[0] == limit

    drive(test)


# Settings from files


async def prospect(h: Harness, pid: int) -> int:
    process = backend.process.identity.identify(pid)
    return sight.total(await h.controller.bookkeeper.prospect(process, 0), h.controller.gpus[0].info.capacity)


@virtual
async def test_what_files_ask_of_a_slice_that_is_not_there(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """The slice comes with the first process that uses a GPU, with the limits of slices.d or of a unit."""
    (tmp_path / "a.conf").write_text("[/*]\nGMemHigh=8M\n[/x.slice/*]\nGMemMax=25%\n")
    manager.unit("/x.slice", "GMemHigh=16M")
    async with policy(tmp_path, manager) as h:
        pid = spawn().pid
        for cgroup, expected in (
            ("/y", 8 * MIB),
            ("/y/inner", 8 * MIB),
            ("/x.slice", 16 * MIB),
            ("/x.slice/inner", 16 * MIB),
        ):
            h.world.cgroups[pid] = Slice(cgroup)
            found = await prospect(h, pid)
            assert found == expected
            assert h.controller.population.slice_entry(Slice("/y")) is None
        process = await h.arrive(pid, "/x.slice/inner")
        assert sight.total(h.controller.bookkeeper.levels(process, 0), 64 * MIB) == expected, "as it was foreseen"


@virtual
async def test_files_are_waited_for(tmp_path: Path, manager: FakeManager, spawn: Spawn) -> None:
    """A program that allocates waits, too: the total that it gets is final."""
    async with policy(tmp_path, manager) as h:
        manager.unit("/job.service", "GMemMax=8M", active=False)
        released, pid = manager.hold(), spawn().pid
        h.world.cgroups[pid] = Slice("/job.service")
        told: list[int] = []

        async def look() -> None:
            told.append(await prospect(h, pid))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await settle()
            assert told == []
            released.set()
        assert told == [8 * MIB]
