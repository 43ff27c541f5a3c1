"""A killed daemon and the next one: books that outlive a daemon, and hardware in the state in which it was left."""

from __future__ import annotations

import contextlib
import copy
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

import backend.process.identity
from backend.core.records import MAX, NOBODY
from backend.ledgers.account import Account
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.journal.levers import JournaledGpu
from backend.ledgers.journal.moves import WrittenMoves
from backend.ledgers.journal.state import Operation
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn
from backend.soft.config import SoftConfig
from backend.soft.gpu import SoftGpu
from tests.support.harness import (
    MIB,
    Harness,
    Spawn,
    StubGpu,
    World,
    hang,
    raises,
    refuses,
    running,
    settle,
    until,
    virtual,
)
from tests.support.journaled import BOOT, MEMORY, let_go
from tests.support.levers import ASKED, stubs
from tests.support.restarted import Machine


def owner(uid: int, gid: int = 0) -> SimpleNamespace:
    """Return the attributes of a chown."""
    return SimpleNamespace(st_uid=uid, st_gid=gid, st_mode=0)


async def chown(h: Harness, path: str, uid: int, gid: int) -> None:
    fields = SimpleNamespace(
        update_atime=False, update_mtime=False, update_uid=True, update_gid=True, update_mode=False
    )
    await h.operations.setattr(await h.inode(path), owner(uid, gid), fields, None, h.ctx)


async def uid_of(h: Harness, path: str) -> int:
    return int((await h.operations.getattr(await h.inode(path), h.ctx)).st_uid)


@virtual
async def test_what_was_set_is_there_again(spawn: Spawn) -> None:
    """Limits, counts, freeze and timeslice of a process are there again, and the hardware agrees."""
    gpu = StubGpu()
    machine = Machine(gpu)
    pid = spawn().pid
    async with machine.daemon() as h:
        who = await h.arrive(pid, "/job", gmem=8 * MIB)
        for name, value in (("gmem.limit.high", "4M"), ("gmem.limit.low", "1M"), ("gmem.swap.max", "16M")):
            await h.write(f"{pid}/0/{name}", value)
        await h.write(f"{pid}/0/compute.timeslice", "4")
        await h.write(f"{pid}/0/compute.freeze", 1)
        before = machine.ledger.books(Member(who, 0))
        h.kill()
    assert gpu.detached == {who}
    async with machine.daemon() as h:
        assert "frozen 1" in await h.read(f"{pid}/0/compute.events"), "it never was otherwise"
        await settle()
        assert machine.ledger.books(Member(who, 0)) == before
        assert before.events_reclaim == 1
        assert (await h.listdir("slice/job"), await h.listdir("slice")) == (["0"], ["job"])
        for name, value in (("gmem.limit.high", 4 * MIB), ("compute.freeze", 1), ("compute.timeslice", 4)):
            assert await h.read(f"{pid}/0/{name}") == f"{value}\n"
        assert gpu.detached == {who}
        assert gpu.timeslices == {who: 4000}
        await h.arrive(pid, "/job")
        await h.write(f"{pid}/0/compute.freeze", 0)
        assert gpu.detached == set()
        assert "frozen 0" in await h.read(f"{pid}/0/compute.events")
    assert gpu.timeslices == {}, "at the end it has its own timeslice back"


@virtual
async def test_a_new_gpu_is_told_everything_again(spawn: Spawn) -> None:
    """The next GPU object may know nothing of what its predecessor was told."""
    first = StubGpu()
    machine = Machine(first)
    pid = spawn().pid
    async with machine.daemon() as h:
        who = await h.arrive(pid)
        await h.write(f"{pid}/0/compute.timeslice", "4")
        await h.write(f"{pid}/0/compute.freeze", 1)
        h.kill()
    second = StubGpu()
    async with machine.daemon(second) as h:
        await settle()
        assert second.detached == {who}
        assert second.timeslices == {who: 4000}


@virtual
async def test_a_slice_is_there_again_if_it_was_kept(spawn: Spawn) -> None:
    """It has its limits and owner. A slice that came by itself, and that has no process any more, is gone."""
    gpus = StubGpu(0), StubGpu(1)
    machine = Machine(*gpus)
    victim, survivor = spawn(), spawn()
    async with machine.daemon() as h:
        for path in ("made", "made/inner"):
            above, _, name = f"slice/{path}".rpartition("/")
            await h.operations.mkdir(await h.inode(above), name.encode(), 0o755, h.ctx)
        await h.write("slice/made/1/gmem.limit.high", "1G")
        await chown(h, "slice/made", 1000, 1001)
        await h.operations.mkdir(await h.inode("slice/made"), b"back", 0o755, h.ctx)
        await chown(h, "slice/made/back", 0, 0)
        await h.arrive(victim.pid, "/came/by")
        await h.arrive(survivor.pid, "/made/inner")
        h.kill()
    victim.kill()
    victim.wait()
    async with machine.daemon() as h:
        assert await h.listdir("slice") == ["made"]
        assert sorted(await h.listdir("slice/made")) == ["0", "1", "back", "inner"]
        assert await uid_of(h, "slice/made/back") == 0, "taken back from whom the slice above was given to"
        await h.operations.rmdir(await h.inode("slice/made"), b"back", h.ctx)
        assert await h.read("slice/made/1/gmem.limit.high") == f"{1 << 30}\n"
        assert await uid_of(h, "slice/made") == 1000
        assert (await h.operations.getattr(await h.inode("slice/made"), h.ctx)).st_gid == 1001
        assert await uid_of(h, "slice/made/0/gmem.limit.high") == 0
        assert await uid_of(h, "slice/made/inner") == 1000
        assert await uid_of(h, f"{survivor.pid}/0/compute.freeze") == 1000
        survivor.kill()
        await until(lambda: len(h.controller.population) == 0, "the last one is gone")
        assert await h.listdir("slice/made") == ["0", "1", "inner"]
        await h.operations.rmdir(await h.inode("slice/made"), b"inner", h.ctx)
        await h.operations.rmdir(await h.inode("slice"), b"made", h.ctx)
        h.kill()
    async with machine.daemon() as h:
        assert await h.listdir("slice") == []
        await h.operations.mkdir(await h.inode("slice"), b"made", 0o755, h.ctx)
        assert await uid_of(h, "slice/made") == 0, "what is made again is not the one that was given away"


@virtual
async def test_the_dead_are_dropped(spawn: Spawn) -> None:
    """A process that died while no daemon ran has nothing, nor has a new one with its pid; the sums are right."""
    gpu = StubGpu()
    machine = Machine(gpu)
    victim, recycled, survivor = spawn(), spawn(), spawn()
    async with machine.daemon() as h:
        for process in (victim, recycled, survivor):
            await h.arrive(process.pid, "/job", gmem=MIB)
            await h.write(f"{process.pid}/0/gmem.limit.high", "8M")
        h.kill()
    victim.kill()
    victim.wait()
    machine.world.later[recycled.pid] = 1
    async with machine.daemon() as h:
        assert await h.listdir("slice/job") == ["0"]
        assert list(h.controller.population.pids()) == [survivor.pid]
        assert await h.read("slice/job/0/gmem.current") == f"{MIB}\n"
        who = await h.arrive(recycled.pid, "/job")
        assert machine.ledger.books(Member(who, 0)).high == MAX
        survivor.kill()
        recycled.kill()
        await until(lambda: len(h.controller.population) == 0, "exits are noticed as ever")
        assert await h.listdir("slice") == []


@virtual
async def test_who_moved_meanwhile_is_where_he_is_now(spawn: Spawn) -> None:
    """It has the charges, limits and policy of its new cgroup; the slice that it left goes."""
    gpu = StubGpu()
    machine = Machine(gpu)
    pid = spawn().pid
    async with machine.daemon() as h:
        who = await h.arrive(pid, "/before", gmem=8 * MIB)
        await h.operations.mkdir(await h.inode("slice"), b"after", 0o755, h.ctx)
        await h.write("slice/after/0/compute.freeze", 1)
        await h.write("slice/after/0/gmem.limit.high", "2M")
        h.kill()
    machine.world.cgroups[pid] = Slice("/after/deep")
    async with machine.daemon() as h:
        await settle()
        assert await h.listdir("slice") == ["after"]
        assert await h.listdir("slice/after") == ["0", "deep"]
        assert gpu.detached == {who}
        assert await h.read("slice/after/0/gmem.current") == f"{2 * MIB}\n"
        h.kill()
    machine.world.cgroups[pid] = Slice("/")
    async with machine.daemon() as h:
        await settle()
        assert gpu.detached == set(), "frozen no more where it is now"
        assert "frozen 0" in await h.read(f"{pid}/0/compute.events")


@virtual
async def test_a_freeze_in_doubt_is_not_said_to_hold_until_it_does(spawn: Spawn) -> None:
    """The daemon died while the lever moved: it is moved again, and if that fails, compute.events says so."""
    gpu = StubGpu()
    machine = Machine(gpu)
    pid = spawn().pid
    async with machine.daemon() as h:
        who = await h.arrive(pid)
        await h.write(f"{pid}/0/compute.freeze", 1)
        h.kill()
    machine.ledger.doubtful.add(who)
    gpu.calls.clear()
    async with machine.daemon() as h:
        assert "frozen 0" in await h.read(f"{pid}/0/compute.events")
        await settle()
        assert ("detach", pid, 0) in gpu.calls
        assert "frozen 1" in await h.read(f"{pid}/0/compute.events")
        await h.write(f"{pid}/0/compute.freeze", 0)
        assert gpu.detached == set()


@pytest.mark.parametrize("error", [refuses(errno.EIO), raises(RuntimeError("the bug"))], ids=["EIO", "bug"])
@pytest.mark.logs("does not follow")
@virtual
async def test_a_freeze_that_cannot_be_had_again_ends_nothing(spawn: Spawn, error: object) -> None:
    gpu = StubGpu()
    machine = Machine(gpu)
    pid, other = spawn().pid, spawn().pid
    async with machine.daemon() as h:
        for each in (pid, other):
            await h.arrive(each)
            await h.write(f"{each}/0/compute.freeze", 1)
        h.kill()
    gpu = StubGpu()
    gpu.script("detach", error, pid=pid)  # type: ignore[arg-type]
    async with machine.daemon(gpu) as h:
        await settle()
        assert {process.pid for process in gpu.detached} == {other}
        assert "frozen 0" in await h.read(f"{pid}/0/compute.events")
        await h.write(f"{pid}/0/compute.freeze", 1)
        assert {process.pid for process in gpu.detached} == {pid, other}


@virtual
async def test_what_is_detached_and_not_to_be_is_attached(spawn: Spawn) -> None:
    """The daemon died between the books and the lever: the books decide."""
    gpu = StubGpu()
    machine = Machine(gpu)
    pid = spawn().pid
    async with machine.daemon() as h:
        who = await h.arrive(pid)
        await h.write(f"{pid}/0/compute.freeze", 1)
        await h.write(f"{pid}/0/compute.timeslice", 4)
        h.kill()
    machine.ledger.configure(Member(who, 0), frozen=False, timeslice_us=0)
    async with machine.daemon() as h:
        await settle()
        assert gpu.detached == set()
        assert gpu.timeslices == {}
        assert "frozen 0" in await h.read(f"{pid}/0/compute.events")


@virtual
async def test_the_end_before_anything_was_followed_gives_everything_back(spawn: Spawn) -> None:
    """The second daemon is told to end right after its start, and yet thaws what the first one froze."""
    gpu = StubGpu()
    machine = Machine(gpu)
    pid = spawn().pid
    async with machine.daemon() as h:
        await h.arrive(pid)
        await h.write(f"{pid}/0/compute.freeze", 1)
        await h.write(f"{pid}/0/compute.timeslice", 4)
        h.kill()
    async with machine.daemon() as h:
        h.scope.cancel()
    assert gpu.detached == set()
    assert gpu.timeslices == {}
    assert h.controller.released


@pytest.mark.logs("could not give process")
@virtual
async def test_what_could_not_be_released_is_not_said_to_be(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        await h.write(f"{who.pid}/0/compute.freeze", 1)
        gpu.script("attach", refuses(errno.EIO))
        h.scope.cancel()
    assert not h.controller.released


@virtual
async def test_what_was_left_half_done_is_made_whole(spawn: Spawn) -> None:
    """A slice on one GPU only, or a process in two slices, as after a kill in the middle of a call."""
    gpus = StubGpu(0), StubGpu(1)
    machine = Machine(*gpus)
    pid = spawn().pid
    async with machine.daemon() as h:
        await h.operations.mkdir(await h.inode("slice"), b"there", 0o755, h.ctx)
        who = await h.arrive(pid, "/there")
        await h.arrive(pid, "/there", gpu=1)
        h.kill()
    ledger = machine.ledger
    half, one = Slice("/half"), Slice("/there/one")
    ledger.add(SliceOn(half, 1), SliceOn(ROOT, 1))
    ledger.configure(SliceOn(half, 1), kept=True, uid=7)
    ledger.add(SliceOn(one, 1), SliceOn(Slice("/there"), 1))
    ledger.move(Member(who, 1), SliceOn(one, 1))
    async with machine.daemon() as h:
        assert sorted(await h.listdir("slice")) == ["half", "there"]
        assert await h.listdir("slice/there") == ["0", "1"], "who was on the way is where its cgroup is"
        assert {ledger.parent(Member(who, gpu)) for gpu in (0, 1)} == {SliceOn(Slice("/there"), gpu) for gpu in (0, 1)}
        assert all(
            ledger.books(SliceOn(half, gpu)).kept and ledger.books(SliceOn(half, gpu)).uid == 7 for gpu in (0, 1)
        )
        assert await h.read("slice/half/0/gmem.current") == "0\n"


@virtual
async def test_a_program_that_comes_back_is_frozen_before_it_has_a_context(spawn: Spawn) -> None:
    """The software GPU ends with its daemon and its programs do not: the next one holds their settings."""
    stub = StubGpu()
    machine = Machine(stub)
    first = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    pid = spawn().pid
    async with machine.daemon(first) as h:
        who = await h.arrive(pid, "/job")
        await h.write("slice/job/0/compute.freeze", 1)
        h.kill()
    stub.detached.add(who)  # the freeze was acknowledged
    second = SoftGpu(0, SoftConfig(capacity=64 * MIB))
    async with machine.daemon(second) as h:
        await second.open_context(who, 1, lambda finished: None)
        assert second.activity(who).attached == 0
        await h.write("slice/job/0/compute.freeze", 0)
        assert second.activity(who).attached == 1


@virtual
async def test_giving_away_is_in_the_books(spawn: Spawn) -> None:
    """A chown of a slice is in the books, a chmod is not, and neither is the root of the slices."""
    gpus = StubGpu(0), StubGpu(1)
    async with running(*gpus) as h:
        await h.operations.mkdir(await h.inode("slice"), b"job", 0o755, h.ctx)
        groups = [SliceOn(Slice("/job"), gpu) for gpu in (0, 1)]
        assert all(h.ledger.books(group).kept for group in groups)
        await chown(h, "slice/job", 1000, 100)
        h.tree.chown(await h.inode("slice/job"), None, 5, None)
        h.tree.chown(await h.inode("slice/job"), None, None, 0o700)
        h.tree.chown(await h.inode("slice/job/0/gmem.limit.high"), 9, 9, None)
        assert [(h.ledger.books(group).uid, h.ledger.books(group).gid) for group in groups] == [(1000, 5)] * 2
        await chown(h, "slice", 1000, 100)
        assert await uid_of(h, "slice") == 1000
        assert h.ledger.books(SliceOn(ROOT, 0)).uid == NOBODY


# Killed while a program moves from one GPU to another

NAMES = {0: "GPU-0", 1: "GPU-1"}


class Watched(Journal):
    """A journal that remembers the content of its file after each change."""

    def __init__(self, path: Path) -> None:
        self.pages: list[bytes] = []
        super().__init__(path, boot=BOOT)

    def commit(self, *operations: Operation) -> None:
        super().commit(*operations)
        self.pages.append(self.path.read_bytes())


@contextlib.contextmanager
def a_journal() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ggroup-restart-", dir=MEMORY) as folder:
        yield Path(folder) / "one.journal"


def journaled(
    journal: Journal, world: World, gpus: tuple[StubGpu, ...]
) -> contextlib.AbstractAsyncContextManager[Harness]:
    """Run a daemon on a journal, with everything that it writes there."""
    noted = [JournaledGpu(gpu, journal) for gpu in gpus]
    moves = WrittenMoves(journal, NAMES)
    return running(*noted, ledger=JournaledLedger(journal, NAMES), world=world, moves=moves, scheduler=True)


async def asked(h: Harness, pid: int, *, made: bool) -> None:
    """Start a program on GPU 0, with every setting made. `made`: it was made by mkdir, so it has a directory on GPU 1,
    too, with a setting there."""
    if made:
        await h.controller.make_process(pid)
        await h.write(f"{pid}/1/gmem.limit.high", 8 * MIB)
    await h.arrive(pid, "/jobs", gmem=MIB)
    for name, value in ASKED.items():
        await h.write(f"{pid}/0/{name}", value.strip())
    await settle()


async def is_on(h: Harness, gpus: tuple[StubGpu, StubGpu], process: Process, here: int, *, made: bool = False) -> None:
    """Check that a process has a directory and all its settings on GPU `here`, and nothing on the other one (or, with
    `made`, what it had there before)."""
    pid, there = process.pid, 1 - here
    assert await h.listdir(str(pid)) == (["0", "1"] if made else [str(here)])
    assert {name: await h.read(f"{pid}/{here}/{name}") for name in ASKED} == ASKED
    assert (gpus[here].detached, gpus[here].timeslices) == ({process}, {process: 4000})
    assert "frozen 1" in await h.read(f"{pid}/{here}/compute.events")
    assert (gpus[there].detached, gpus[there].timeslices) == (set(), {})
    assert await h.read(f"slice/jobs/{there}/gmem.current") == "0\n"
    if made:
        assert await h.read(f"{pid}/{there}/gmem.limit.high") == f"{8 * MIB}\n"
        assert await h.read(f"{pid}/{there}/compute.freeze") == "0\n"
    assert h.leftovers()["moves"] == 0


@pytest.mark.parametrize("made", [False, True], ids=["alone", "made"])
@virtual
async def test_killed_at_any_moment_of_a_move(spawn: Spawn, made: bool) -> None:
    """The next daemon waits while an agent is at work; then the process is where the agent has left it, only there,
    with its settings. For each change of the journal, from before the move to its end."""
    world, pid = World(), spawn().pid
    process = backend.process.identity.identify(pid)
    with a_journal() as path:
        journal = Watched(path)
        async with journaled(journal, world, stubs()) as h:
            await asked(h, pid, made=made)
            journal.pages = journal.pages[-1:]
            await h.write(f"{pid}/0/compute.migrate", 1)
            pages = journal.pages
            h.kill()
        let_go(journal)
        assert len(pages) > 8
        undecided = 0
        for page in pages:
            for outcome in (0, 1):
                path.write_bytes(page)
                path.chmod(0o600)
                journal = Journal(path, boot=BOOT)
                on_the_way = process in journal.state.moves and ("GPU-0", process) in journal.state.groups
                undecided += on_the_way
                if not on_the_way and ("GPU-0", process) in journal.state.groups and outcome == 1:
                    let_go(journal)
                    continue  # impossible: the agent was not started
                if ("GPU-0", process) not in journal.state.groups and outcome == 0:
                    let_go(journal)
                    continue  # impossible: the agent had finished
                gpus = stubs()
                gpus[0].found[process] = gpus[1].found[process] = None
                async with journaled(journal, world, gpus) as h:
                    await h.controller.bookkeeper.arrive(process, 0 if on_the_way else outcome)
                    await trio.sleep(7)
                    if on_the_way:
                        assert h.leftovers()["moves"] == 1, "somebody is at it still"
                        assert await h.refused(f"{pid}/0/compute.migrate", 1) == errno.EBUSY
                    for gpu in gpus:
                        gpu.found[process] = gpu.info.index == outcome
                    await h.controller.bookkeeper.arrive(process, outcome)
                    await trio.sleep(2)
                    await is_on(h, gpus, process, outcome, made=made and outcome == 0)
                    h.kill()
                assert journal.state.moves == {}
                let_go(journal)
        assert undecided > 8


@pytest.mark.parametrize("outcome", [0, 1], ids=["stays", "went"])
@virtual
async def test_killed_on_the_way_with_the_kernel_s_books(spawn: Spawn, outcome: int) -> None:
    """The books have both groups and their charges; the journal, which exists with any ledger, says what they are."""
    gpus = stubs()
    machine, process = Machine(*gpus), backend.process.identity.identify(spawn().pid)
    with a_journal() as path:
        journal = Journal(path, boot=BOOT)
        moves = WrittenMoves(journal, NAMES)
        async with running(*gpus, ledger=machine.ledger, world=machine.world, moves=moves, scheduler=True) as h:
            await asked(h, process.pid, made=False)
            moment: list[tuple[dict[Group, Account], bytes]] = []

            async def killed() -> None:
                moment.append((copy.deepcopy(machine.ledger._accounts), path.read_bytes()))
                h.kill()
                await hang()

            gpus[0].script("migrate", killed)
            await h.write(f"{process.pid}/0/compute.migrate", 1)
        let_go(journal)
        machine.ledger._accounts = moment[0][0]
        path.write_bytes(moment[0][1])
        journal = Journal(path, boot=BOOT)
        gpus[0].found[process] = gpus[1].found[process] = None
        moves = WrittenMoves(journal, NAMES)
        async with running(*gpus, ledger=machine.ledger, world=machine.world, moves=moves, scheduler=True) as h:
            await trio.sleep(7)
            assert sorted(await h.listdir(str(process.pid))) == ["0", "1"], "somebody is at it still"
            assert await h.read("slice/jobs/1/gmem.current") == f"{MIB}\n", "it is booked"
            for gpu in gpus:
                gpu.found[process] = gpu.info.index == outcome
            await h.controller.bookkeeper.arrive(process, outcome)
            await trio.sleep(2)
            assert await h.listdir(str(process.pid)) == [str(outcome)]
            assert await h.read(f"slice/jobs/{outcome}/gmem.current") == f"{MIB}\n"
            await is_on(h, gpus, process, outcome)
        let_go(journal)


@pytest.mark.parametrize("outcome", [0, 1], ids=["stays", "went"])
@pytest.mark.parametrize("upgraded", [False, True], ids=["ended", "upgraded"])
@virtual
async def test_a_daemon_that_ends_while_an_agent_is_at_it(spawn: Spawn, upgraded: bool, outcome: int) -> None:
    """The agent goes on, and the next daemon finds the process where the agent has left it, with its settings."""
    gpus, world, process = stubs(), World(), backend.process.identity.identify(spawn().pid)
    with a_journal() as path:
        journal = Journal(path, boot=BOOT)
        async with journaled(journal, world, gpus) as h:
            await asked(h, process.pid, made=False)

            async def ends() -> None:
                if upgraded:
                    h.controller.hand_over()
                h.scope.cancel()
                await hang()

            gpus[0].script("migrate", ends)
            await h.write(f"{process.pid}/0/compute.migrate", 1)
        let_go(journal)
        assert (gpus[0].detached, gpus[1].detached) == (set(), set())
        journal = Journal(path, boot=BOOT)
        for gpu in gpus:
            gpu.found[process] = gpu.info.index == outcome
        async with journaled(journal, world, gpus) as h:
            await h.controller.bookkeeper.arrive(process, outcome)
            await trio.sleep(2)
            await is_on(h, gpus, process, outcome)
        let_go(journal)


async def not_waited_for(h: Harness, gpus: list[StubGpu], process: Process) -> None:
    """Begin a move that takes longer than its write may."""
    await asked(h, process.pid, made=False)
    gpus[0].found[process] = gpus[1].found[process] = None
    gpus[0].script("migrate", refuses(errno.ETIMEDOUT))
    assert await h.refused(f"{process.pid}/0/compute.migrate", 1) == errno.ETIMEDOUT


@virtual
async def test_an_agent_that_comes_back_after_nobody_waited(spawn: Spawn) -> None:
    """The write has failed, and the move is done all the same: the directory goes to the other GPU."""
    gpus = stubs()
    process = backend.process.identity.identify(spawn().pid)
    async with running(*gpus, scheduler=True) as h:
        await not_waited_for(h, gpus, process)
        await trio.sleep(5)
        assert await h.listdir(str(process.pid)) == ["0"]
        h.controller.bookkeeper.uncharge(process, 0, MIB, swapped=False)  # as the driver reports it
        await h.controller.bookkeeper.arrive(process, 1)
        gpus[0].found[process], gpus[1].found[process] = False, True
        await trio.sleep(2)
        await is_on(h, gpus, process, 1)


@pytest.mark.logs("after a move is not known")
@virtual
async def test_books_that_fail_when_they_are_to_follow_it_are_asked_again(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mount goes on, and so does the search."""
    gpus = stubs()
    process = backend.process.identity.identify(spawn().pid)
    async with running(*gpus, scheduler=True) as h:
        await not_waited_for(h, gpus, process)
        h.controller.bookkeeper.uncharge(process, 0, MIB, swapped=False)
        await h.controller.bookkeeper.arrive(process, 1)
        configure = type(h.ledger).configure
        calls: list[Group] = []

        def fails_at_first(ledger: SoftLedger, group: Group, **changes: int | bool) -> None:
            calls.append(group)
            if len(calls) == 1:
                raise OSError(errno.ENODEV, "the module is busy")
            configure(ledger, group, **changes)

        monkeypatch.setattr(type(h.ledger), "configure", fails_at_first)
        gpus[0].found[process], gpus[1].found[process] = False, True
        await trio.sleep(3)
        assert len(calls) > 1
        await is_on(h, gpus, process, 1)
