"""Level 3: the settings that the slice of a family gets, none of which may be taken from a neighbour."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from unittest import mock

import pytest

from backend.core import familytree
from backend.core.families import Family
from backend.core.records import Books
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn, identify
from backend.scheduler.shares import Contender, Level, strata
from tests.support.harness import MIB, Harness, Spawn, StubGpu, running, settle, virtual
from tests.t3_program.families import NAME, ONE, USER, ask, where


@virtual
async def test_nothing_that_is_asked_for_takes_from_a_neighbour(spawn: Spawn) -> None:
    async with running(StubGpu(), scheduler=True) as h:
        greedy = Family(1, USER, {"low": 64 * MIB, "weight": 10_000, "priority": 0})
        modest = Family(2, USER, {"low": 1 * MIB, "weight": 7, "priority": 12})
        at_root = await h.arrive(spawn().pid)
        await ask(h, at_root.pid, greedy)
        books = h.ledger.books(SliceOn(Slice(f"/{greedy.name}"), 0))
        assert (books.low, books.weight, books.priority) == (0, 100, 8)
        await h.operations.mkdir(await h.inode("slice"), b"job", 0o755, h.ctx)
        await h.write("slice/job/0/gmem.limit.low", "16M")
        for family, expected in ((greedy, (16 * MIB, 100, 8)), (modest, (MIB, 7, 12))):
            process = await h.arrive(spawn().pid, "/job")
            await ask(h, process.pid, family)
            books = h.ledger.books(SliceOn(Slice(f"/job/{family.name}"), 0))
            assert (books.low, books.weight, books.priority) == expected


def shares(h: Harness, **processes: Process) -> list[Mapping[str, float]]:
    """Return the layers of some processes on GPU 0, as the scheduler gets them."""
    contenders, names = [], {process: name for name, process in processes.items()}
    for process in processes.values():
        path = h.controller.population.path(Member(process, 0))[-2::-1]
        levels = [(group, h.ledger.books(group)) for group in path]
        contenders.append(Contender(process, tuple(Level(at, one.priority, one.weight) for at, one in levels)))
    return [{names[process]: part for process, part in layer.items()} for layer in strata(contenders)]


@virtual
async def test_what_was_set_on_a_process_is_not_undone_by_asking(spawn: Spawn) -> None:
    """The slice of the family takes over weight and priority, which now compete with those of the siblings."""
    async with running(StubGpu(0), StubGpu(1), scheduler=True) as h:
        mine, other = await h.arrive(spawn().pid, "/job"), await h.arrive(spawn().pid, "/job")
        await h.write(f"{mine.pid}/0/compute.weight", "1")
        before = shares(h, mine=mine, other=other)
        await ask(h, mine.pid, ONE, Family(2, USER, {"weight": 50, "priority": 3}))
        assert shares(h, mine=mine, other=other) == before != [{"mine": 0.5, "other": 0.5}]
        for gpu in (0, 1):
            assert h.ledger.books(SliceOn(Slice(f"/job/{NAME}"), gpu)).weight == 1, "it may be moved to the other GPU"
        late = await h.arrive(spawn().pid, "/late")
        await h.write(f"{late.pid}/0/compute.priority", "15")
        await ask(h, late.pid, Family(3, USER))
        assert h.ledger.books(SliceOn(Slice(where(h, late)), 0)).priority == 15


@virtual
async def test_nor_by_coming_into_a_family_that_is_there(spawn: Spawn) -> None:
    async with running(StubGpu(), scheduler=True) as h:
        first, second = await h.arrive(spawn().pid, "/job"), await h.arrive(spawn().pid, "/job")
        await ask(h, first.pid, ONE)
        family = f"slice/job/{NAME}/0"
        await h.write(f"{family}/compute.weight", "500")
        third = await h.arrive(spawn().pid, "/job")
        await ask(h, third.pid, ONE)
        assert await h.read(f"{family}/compute.weight") == "500\n", "what root has raised stays"
        await h.write(f"{second.pid}/0/compute.weight", "7")
        await h.write(f"{second.pid}/0/compute.priority", "11")
        await ask(h, second.pid, ONE)
        assert await h.read(f"{family}/compute.weight") == "7\n"
        assert await h.read(f"{family}/compute.priority") == "11\n"


@virtual
async def test_a_low_is_none_beside_another_user(spawn: Spawn) -> None:
    """A low competes within the slice above, as memory.low does among children of a delegate, and not between users."""
    async with running(StubGpu()) as h:
        other = Family(0x99, USER + 1000, {"low": 8 * MIB})
        for cgroup in ("/alone", "/process", "/slice"):
            await h.operations.mkdir(await h.inode("slice"), cgroup[1:].encode(), 0o755, h.ctx)
            await h.write(f"slice{cgroup}/0/gmem.limit.low", "16M")
        await h.arrive(spawn().pid, "/process")
        processes = [await h.arrive(spawn().pid, cgroup) for cgroup in ("/alone", "/process", "/slice")]
        await ask(h, (await h.arrive(spawn().pid, "/slice")).pid, ONE)
        for process, low in zip(processes, (8 * MIB, 0, 0), strict=True):
            await ask(h, process.pid, other)
            assert h.ledger.books(SliceOn(Slice(where(h, process)), 0)).low == low, where(h, process)


@virtual
async def test_so_many_neighbours_are_taken_for_several_users(spawn: Spawn) -> None:
    with mock.patch.object(familytree, "NEIGHBOURS_MOST", 2):
        async with running(StubGpu()) as h:
            await h.operations.mkdir(await h.inode("slice"), b"job", 0o755, h.ctx)
            await h.write("slice/job/0/gmem.limit.low", "16M")
            for number, low in ((1, MIB), (2, MIB), (3, 0)):
                process = await h.arrive(spawn().pid, "/job")
                await h.arrive(spawn().pid, "/job")
                family = Family(number, USER, {"low": MIB})
                await ask(h, process.pid, family)
                assert h.ledger.books(SliceOn(Slice(f"/job/{family.name}"), 0)).low == low


@virtual
async def test_what_a_slice_cannot_be_given_leaves_none(spawn: Spawn) -> None:
    """A family without its limits is none: the next process that asks is not told that it has them."""
    async with running(StubGpu(0), StubGpu(1)) as h:
        process, coming = await h.arrive(spawn().pid, "/job"), identify(spawn().pid)
        before = h.leftovers()

        def refuse(group: SliceOn, **_: int) -> None:
            if group.gpu == 1:
                raise OSError(errno.EINTR, os.strerror(errno.EINTR))

        with mock.patch.object(h.ledger, "configure", refuse):
            with pytest.raises(InterruptedError):
                await ask(h, process.pid, ONE)
            with pytest.raises(InterruptedError):
                await ask(h, coming.pid, ONE, everywhere=True)
        assert where(h, process) == "/job"
        assert h.leftovers() == {**before, "families promised": 1, "places of families": 1, "pidfds": 2, "watched": 2}
        await ask(h, process.pid, ONE)
        assert h.ledger.books(SliceOn(Slice(where(h, process)), 1)).high == 8 * MIB


@virtual
async def test_a_slice_that_is_there_by_its_name_alone_is_given_what_was_asked(spawn: Spawn) -> None:
    """For example of a cgroup to which its user gave that name; a slice that a caller made stays the caller's."""
    async with running(StubGpu()) as h:
        before = h.leftovers()
        one, other = await h.arrive(spawn().pid, f"/job/{NAME}"), await h.arrive(spawn().pid, "/job")
        with (
            mock.patch.object(h.ledger, "configure", side_effect=InterruptedError(errno.EINTR, "")),
            pytest.raises(InterruptedError),
        ):
            await ask(h, other.pid, ONE)
        assert h.controller.population.families == 0
        await ask(h, other.pid, ONE)
        assert await h.read(f"slice/job/{NAME}/0/gmem.limit.high") == f"{8 * MIB}\n"
        for process in (one, other):
            h.controller._membership.expel(process)
        await settle()
        assert h.leftovers() == before
        made = Family(0x99, USER, {"high": MIB})
        h.controller.population.make(Slice(f"/{made.name}"))
        with pytest.raises(FileExistsError):
            await ask(h, (await h.arrive(spawn().pid)).pid, made)


def test_what_a_slice_is_given() -> None:
    """Root's low stays its own, and settings that are not requested are untouched."""

    def given(asked: dict[str, int], above: Slice = ROOT, own: Books | None = None, low: int = 9) -> dict[str, int]:
        return dict(Family(1, 0, asked).allowed(above, Books(low=low), own or Books(), shared=False))

    assert given({}) == {}
    assert given({"high": 5, "low": 5}) == {"high": 5, "low": 0}
    assert given({"low": 5}, Slice("/a")) == {"low": 5}
    assert given({}, own=Books(weight=500, priority=0)) == {}, "nor is it what root has raised"
    assert given({"weight": 9}, own=Books(weight=3, priority=12)) == {"weight": 3, "priority": 12}
