"""Slices in which new programs wait before their first context: those frozen on all GPUs, directly or from above."""

from __future__ import annotations

import trio

from backend.process.identity import ROOT, SliceOn
from ggroupfs.fs.inodes import ROOT_INODE
from tests.support.harness import Harness, Spawn, StubGpu, running, settle, virtual

SLICES = ("job", "job/a", "job/a/b", "job/c")


async def made(h: Harness) -> None:
    """Make the slices."""
    for path in SLICES:
        above, _, name = f"slice/{path}".rpartition("/")
        await h.operations.mkdir(await h.inode(above) if above else ROOT_INODE, name.encode(), 0o755, h.ctx)


async def freeze(h: Harness, path: str, value: int, *gpus: int) -> None:
    for gpu in gpus:
        await h.write(f"slice/{path}/{gpu}/compute.freeze", value)


def frozen(h: Harness) -> set[str]:
    return {slice_.path for slice_ in h.controller.frozen.highest()}


def by_the_books(h: Harness) -> set[str]:
    """Return the same set, computed from its definition."""
    population, ledger = h.controller.population, h.controller.ledger
    found = {
        slice_
        for slice_ in population.slices()
        if slice_ != ROOT
        and all(
            any(ledger.books(level).frozen for level in population.path(SliceOn(slice_, gpu)))
            for gpu in h.controller.gpus
        )
    }
    return {slice_.path for slice_ in found if slice_.parent not in found}


@virtual
async def test_only_what_is_frozen_on_every_gpu() -> None:
    async with running(StubGpu(0), StubGpu(1)) as h:
        await made(h)
        for path, value, gpus, expected in (
            ("job", 1, (0,), set()),
            ("job", 1, (1,), {"/job"}),
            ("job/a", 1, (0, 1), {"/job"}),
            ("job", 0, (0,), {"/job/a"}),
            ("job/a", 0, (1,), {"/job/a"}),  # the job is still frozen there
            ("job", 0, (1,), set()),
            ("job/c", 1, (0, 1), {"/job/c"}),
            ("job/a/b", 1, (0, 1), {"/job/c", "/job/a/b"}),
        ):
            await freeze(h, path, value, *gpus)
            assert frozen(h) == expected == by_the_books(h)


@virtual
async def test_a_gpu_that_is_lost_is_none_that_a_program_can_use() -> None:
    """Nor can a slice be frozen there: the other GPU alone decides."""
    gpus = StubGpu(0), StubGpu(1)

    async with running(*gpus) as h:
        told: list[set[str]] = []
        h.controller.frozen.watcher = lambda: told.append(frozen(h))

        def turn(gpu: int, lost: bool) -> None:
            gpus[gpu].lost = lost
            h.controller.bookkeeper.presence(gpu)

        await made(h)
        await freeze(h, "job/a/b", 1, 1)
        assert frozen(h) == set()
        turn(0, lost=True)
        assert frozen(h) == {"/job/a/b"}
        await freeze(h, "job/c", 1, 1)
        assert frozen(h) == {"/job/a/b", "/job/c"}
        await freeze(h, "job/c", 0, 1)
        assert frozen(h) == {"/job/a/b"}
        turn(0, lost=False)
        assert frozen(h) == set(), "it may be used"
        await freeze(h, "job/a/b", 1, 0)
        turn(0, lost=True)
        turn(1, lost=True)
        assert frozen(h) == {"/job/a/b"}, "as it was before"
        assert told == [{"/job/a/b"}, {"/job/a/b", "/job/c"}, {"/job/a/b"}, set(), {"/job/a/b"}]


@virtual
async def test_a_slice_that_goes_is_none_of_them() -> None:
    async with running() as h:
        await made(h)
        await freeze(h, "job/c", 1, 0)
        assert frozen(h) == {"/job/c"}
        await h.operations.rmdir(await h.inode("slice/job"), b"c", h.ctx)
        assert frozen(h) == set()


@virtual
async def test_one_that_comes_below_is_one_of_them(spawn: Spawn) -> None:
    """A slice that comes with a program is covered by the frozen one above, whether or not it has a directory."""
    async with running() as h:
        await made(h)
        await freeze(h, "job", 1, 0)
        process = spawn()
        await h.arrive(process.pid, cgroup="/job/new")
        await settle()
        assert frozen(h) == {"/job"} == by_the_books(h)
        await freeze(h, "job", 0, 0)
        assert frozen(h) == set()


@virtual
async def test_a_program_alone_is_no_slice(spawn: Spawn) -> None:
    async with running() as h:
        await made(h)
        process = await h.arrive(spawn().pid, cgroup="/job")
        await h.write(f"{process.pid}/0/compute.freeze", 1)
        assert frozen(h) == set()


@virtual
async def test_a_writer_waits_until_it_is_announced() -> None:
    """The usher knows by then, so a program that starts after the write waits."""
    async with running() as h:
        await made(h)
        known: list[set[str]] = []
        gate = trio.Event()

        async def announce() -> None:
            await gate.wait()
            known.append(frozen(h))

        h.controller.announce = announce
        async with trio.open_nursery() as nursery:
            nursery.start_soon(freeze, h, "job", 1, 0)
            await settle()
            assert frozen(h) == {"/job"}
            assert not known
            gate.set()
        assert known == [{"/job"}]


@virtual
async def test_the_watcher_is_told_of_what_turns_and_of_nothing_else() -> None:
    async with running(StubGpu(0), StubGpu(1)) as h:
        await made(h)
        told: list[set[str]] = []
        h.controller.frozen.watcher = lambda: told.append(frozen(h))
        await freeze(h, "job/c", 1, 0)
        assert told == []
        await freeze(h, "job/c", 1, 1)
        await freeze(h, "job/c", 1, 1)
        assert told == [{"/job/c"}]
        await freeze(h, "job/c", 0, 0)
        assert told == [{"/job/c"}, set()]
