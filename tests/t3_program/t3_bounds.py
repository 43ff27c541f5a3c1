"""Bounds of what one user may have in the tree, in number and in depth, and of what that costs other users."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import trio

from backend.common.errors import fail
from backend.core import bounds
from backend.core.controller import Controller
from backend.core.membership import CGROUP_SWEEP_S
from backend.core.population import Population
from backend.core.protocols import Inherited
from backend.core.records import Wanted
from backend.ledgers.journal import format, state
from backend.ledgers.journal.attributes import Attributes
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import JournaledLedger
from backend.ledgers.soft import SoftLedger
from backend.process import delegated, procfs
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn, identify
from ggroupfs.fs.tree import Tree
from tests.support.harness import Harness, StubGpu, World, answers, running, settle, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

USER = 1000
OTHER = 1001
UID_ALONE = SimpleNamespace(
    update_uid=True, update_gid=False, update_mode=False, update_atime=False, update_mtime=False
)
"""Fields of a setattr that changes the owner alone."""


@pytest.fixture(autouse=True)
def few() -> Iterator[None]:
    """Bound the slices of a user at 40, which are quickly made."""
    with mock.patch.object(bounds, "SLICES_MOST", 40):
        yield


async def given(h: Harness, name: str, uid: int) -> int:
    """Have root make a slice and give it to a user; return its inode."""
    slices = await h.inode("slice")
    entry = await h.operations.mkdir(slices, name.encode(), 0o755, h.ctx)
    attributes = SimpleNamespace(st_uid=uid, st_gid=uid)
    await h.operations.setattr(entry.st_ino, attributes, UID_ALONE, None, h.ctx)
    return int(entry.st_ino)


async def mkdir(h: Harness, inode: int, name: str) -> int:
    """Make a directory; return its inode."""
    return int((await h.operations.mkdir(inode, name.encode(), 0o755, h.ctx)).st_ino)


async def chain(h: Harness, inode: int, levels: int) -> int:
    """Make `levels` directories, each in the one before; return the inode of the last."""
    for _ in range(levels):
        inode = await mkdir(h, inode, "d")
    return inode


@virtual
async def test_slices_of_a_user_are_bounded_in_number() -> None:
    """The error is EAGAIN, as with cgroup.max.descendants. A removed slice makes room, users do not share a bound, and
    root has none."""
    async with running() as h:
        mine, another = await given(h, "mine", USER), await given(h, "another", OTHER)
        for number in range(40):
            await mkdir(h, mine, f"s{number}")
        assert await answers(h.operations.mkdir(mine, b"more", 0o755, h.ctx)) == errno.EAGAIN
        below = await h.inode("slice/mine/s0")
        assert await answers(h.operations.mkdir(below, b"more", 0o755, h.ctx)) == errno.EAGAIN
        await h.operations.rmdir(mine, b"s39", h.ctx)
        await mkdir(h, below, "more")
        assert await answers(h.operations.mkdir(mine, b"s39", 0o755, h.ctx)) == errno.EAGAIN
        await mkdir(h, another, "theirs")
        slices = await h.inode("slice")
        for number in range(50):
            await mkdir(h, slices, f"root{number}")


@virtual
async def test_slices_of_a_user_are_bounded_in_depth() -> None:
    """A user has 32 levels below the root; root has 128."""
    async with running() as h:
        inode = await chain(h, await given(h, "mine", USER), 31)
        assert await answers(h.operations.mkdir(inode, b"d", 0o755, h.ctx)) == errno.EAGAIN
        inode = await chain(h, await h.inode("slice"), 128)
        assert await answers(h.operations.mkdir(inode, b"d", 0o755, h.ctx)) == errno.EAGAIN


@virtual
async def test_a_user_gives_no_slice_to_others() -> None:
    """Root of a user namespace has many uids and may chown among them; each of them would have bounds of its own."""
    async with running() as h:
        inode = await mkdir(h, await given(h, "mine", USER), "s")
        attributes = SimpleNamespace(st_uid=OTHER, st_gid=OTHER)
        user = SimpleNamespace(uid=USER, gid=USER, pid=os.getpid())
        assert await answers(h.operations.setattr(inode, attributes, UID_ALONE, None, user)) == errno.EPERM
        attributes.st_uid = USER
        assert await answers(h.operations.setattr(inode, attributes, UID_ALONE, None, user)) == 0


@virtual
async def test_only_another_owner_changes_what_is_below() -> None:
    """So a delegate that sets modes, or chowns to itself, causes no walk through all slices."""
    async with running() as h:
        inode = await given(h, "mine", USER)
        await mkdir(h, inode, "s")
        assert not h.tree.chown(inode, None, None, 0o700, USER)
        assert not h.tree.chown(inode, USER, None, None, USER)
        assert len(h.tree.chown(inode, OTHER, None, None)) > 1


@virtual
async def test_a_program_too_deep_is_counted_above_and_followed_on(
    spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    """The cgroup is 2030 levels deep, the most that a path allows. The process is in its nearest slice that exists, is
    limited there and logged once; other processes are followed, and so is this one, once its cgroup is less deep."""
    async with running(StubGpu()) as h:
        who, other = await h.arrive(spawn().pid, gmem=4096), await h.arrive(spawn().pid)
        h.world.cgroups |= {who.pid: Slice("/d" * 2030), other.pid: Slice("/other")}
        with caplog.at_level(logging.WARNING):
            for _ in range(4):
                await sweep()
        resident = h.controller.population.resident(who)
        assert resident is not None
        assert resident.slice == Slice("/d" * 128)
        assert h.controller.books(SliceOn(resident.slice, 0)).current == 4096
        assert h.controller.books(SliceOn(Slice("/d"), 0)).current == 4096
        assert [r.name for r in caplog.records] == ["backend.core.population"]
        assert f"process {who.pid}" in caplog.text
        caplog.clear()
        assert h.controller.population.by_pid(other.pid).slice == Slice("/other")  # type: ignore[union-attr]
        late = await h.arrive(spawn().pid, "/d" * 140)
        assert h.controller.population.by_pid(late.pid).slice == resident.slice  # type: ignore[union-attr]
        h.world.cgroups[who.pid] = Slice("/d/e")
        await sweep()
        assert resident.slice == Slice("/d/e")


@virtual
async def test_a_program_in_cgroups_of_a_user_counts_for_that_user(
    spawn: Spawn, caplog: pytest.LogCaptureFixture
) -> None:
    """Slices that come from a user's cgroups are charged to that user. Over the bound, a program is counted in a slice
    above, and in its own once there is room again."""
    owners = lambda cgroup: USER if Slice("/user/own").contains(cgroup) else 0  # noqa: E731
    async with running(StubGpu()) as h:
        with mock.patch.object(h.controller.population, "_delegate_of", owners):
            programs = [await h.arrive(spawn().pid, f"/user/own/{n}" + "/d" * 12) for n in range(3)]
            with caplog.at_level(logging.WARNING):
                late = await h.arrive(spawn().pid, "/user/own/late/deep/deeper")
            assert caplog.text.count(f"of user {USER}") == 1
            caplog.clear()
            resident = h.controller.population.resident(late)
            assert resident is not None
            assert resident.slice == Slice("/user/own/late")
            h.world.cgroups[programs[0].pid] = Slice("/elsewhere")
            await sweep()
            await sweep()
            assert resident.slice == Slice("/user/own/late/deep/deeper")
            # No bound where root makes the cgroups: no user gets out of a limit there.
            for number in range(50):
                h.world.cgroups[late.pid] = Slice(f"/system/{number}")
                h.controller.population.hold(Slice(f"/system/{number}"))
                await sweep()
                assert resident.slice == Slice(f"/system/{number}")


@virtual
async def test_what_goes_wrong_with_one_process_is_no_other_s(spawn: Spawn, caplog: pytest.LogCaptureFixture) -> None:
    """A look at a cgroup that fails is logged once with the pid, and the mount goes on."""
    world = World()
    world.cgroup_of = mock.Mock(side_effect=lambda pid: World.cgroup_of(world, pid))  # type: ignore[method-assign]
    async with running(StubGpu(), world=world) as h:
        bad, good = await h.arrive(spawn().pid), await h.arrive(spawn().pid)

        def look(pid: int) -> Slice:
            if pid == bad.pid:
                raise RecursionError("too deep")
            return Slice("/good")

        world.cgroup_of.side_effect = look
        with caplog.at_level(logging.ERROR):
            await sweep()
            await sweep()
        assert [record.getMessage() for record in caplog.records] == [f"process {bad.pid}: its cgroup is not followed"]
        caplog.clear()
        assert h.controller.population.resident(good).slice == Slice("/good")  # type: ignore[union-attr]
        assert h.controller.population.resident(bad).slice == ROOT  # type: ignore[union-attr]


async def sweep() -> None:
    """Wait until every process's cgroup has been looked at."""
    await trio.sleep(2 * CGROUP_SWEEP_S)
    await settle()


class Refusing(SoftLedger):
    """Books that refuse a slice on one GPU, as those of the kernel may."""

    def add(self, group: Group, parent: Group) -> None:
        if group.gpu == 1 and group.node == Slice("/a/b/c"):
            raise fail(errno.EAGAIN)
        super().add(group, parent)


@pytest.mark.logs("is counted in '/a/b'")
def test_what_the_books_refuse_on_one_gpu_is_on_none() -> None:
    """The kernel's EAGAIN reaches the caller, and no part of the refused slice stays."""
    ledger = Refusing()
    for gpu in (0, 1):
        ledger.add_gpu(gpu, 1 << 30)
    population = Population(ledger, (0, 1))
    with pytest.raises(OSError, match="Resource temporarily") as refused:
        population.hold(Slice("/a/b/c"))
    assert refused.value.errno == errno.EAGAIN
    assert population.slices() == [ROOT]
    assert len(ledger._accounts) == 2
    resident = population.admit(identify(os.getpid()), Slice("/a/b/c"), {0, 1})
    assert resident.slice == Slice("/a/b")
    assert SliceOn(Slice("/a/b/c"), 0) not in ledger._accounts


def test_what_was_there_before_is_counted_and_stays() -> None:
    """A daemon that takes over books counts the slices of each owner anew, and removes none."""
    ledger = SoftLedger()
    ledger.add_gpu(0, 1 << 30)
    slices = [Slice("/mine"), *(Slice(f"/mine/{'s' * n}") for n in range(1, 60))]
    for slice_ in slices:
        ledger.add(SliceOn(slice_, 0), SliceOn(slice_.parent or ROOT, 0))
        ledger.configure(SliceOn(slice_, 0), kept=True)
    ledger.configure(SliceOn(slices[0], 0), uid=USER)
    population = Population(ledger, (0,))
    population.take_over([Inherited(SliceOn(s, 0), SliceOn(s.parent or ROOT, 0), Wanted(), False) for s in slices], {})
    assert len(population.slices()) == 61
    with pytest.raises(BlockingIOError):
        population.make(Slice("/mine/more"))
    for slice_ in slices[1:21]:
        population.unmake(slice_)
    population.make(Slice("/mine/more"))
    population.make(Slice("/theirs"))


def test_below_is_as_quick_as_there_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search for the processes of a slice skips slices that are empty, whether or not they were before."""
    ledger = SoftLedger()
    ledger.add_gpu(0, 1 << 30)
    population = Population(ledger, (0,))
    for number in range(200):
        population.hold(Slice(f"/top/{number}/d"))
    process = Process(1, 1)
    resident = population.admit(process, Slice("/top/7/d"), {0})
    top = SliceOn(Slice("/top"), 0)
    assert list(population.below(top)) == list(population.below(SliceOn(ROOT, 0))) == [resident]
    looked = []
    entries = [population.slice_entry(slice_) for slice_ in population.slices()]
    for entry in entries:
        assert entry is not None
        looked.append(len(entry.occupied))
    assert sorted(looked)[-4:] == [0, 1, 1, 1]
    population.relocate(resident, Slice("/top/8"))
    assert list(population.below(SliceOn(Slice("/top/7"), 0))) == []
    assert list(population.below(top)) == [resident]
    population.expel(process)
    assert list(population.below(top)) == []
    assert not any(entry.occupied for entry in entries if entry is not None)


def test_who_shares_a_timeslice_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number is kept and not counted for each process, since freezing a thousand would then block all requests."""
    ledger = SoftLedger()
    ledger.add_gpu(0, 1 << 30)
    ledger.add_gpu(1, 1 << 30)
    population = Population(ledger, (0, 1))
    top, low = SliceOn(Slice("/top"), 0), SliceOn(Slice("/top/low"), 0)
    residents = [population.admit(Process(pid, 1), Slice("/top/low"), {0, 1}) for pid in range(1, 4)]
    for resident in residents:
        population.join(resident, 0)
        population.join(resident, 0)
    monkeypatch.setattr(population, "below", None)
    assert population.sharers(top) == population.sharers(low) == 3
    population.relocate(residents[0], Slice("/top"))
    assert (population.sharers(top), population.sharers(low)) == (3, 2)
    population.expel(residents[1].process)
    population.migrated(Member(residents[2].process, 0), Member(residents[2].process, 1))
    assert (population.sharers(top), population.sharers(low)) == (1, 0)
    assert population.sharers(SliceOn(Slice("/top/low"), 1)) == 1
    population.quit(residents[0], 0)
    assert population.sharers(top) == population.sharers(Member(residents[0].process, 0)) == 0


def test_whose_a_cgroup_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of its directory; of the nearest existing one above if it is gone; root where there is no hierarchy."""
    trees = {"cgroup2": procfs.Mount("0:1", "/", os.fspath(tmp_path), "cgroup2", ())}
    monkeypatch.setattr(procfs.trees, "_found", trees)
    monkeypatch.setattr(delegated, "HIERARCHIES", ("cgroup2", "no such hierarchy"))
    os.makedirs(os.path.join(tmp_path, "user/own"))
    os.chown(os.path.join(tmp_path, "user/own"), USER, USER)
    assert delegated.delegate_of(Slice("/user")) == 0
    assert delegated.delegate_of(Slice("/user/own")) == USER
    assert delegated.delegate_of(Slice("/user/own/gone/too")) == USER
    assert delegated.delegate_of(Slice("/other")) == 0
    # Only a part of the hierarchy is mounted, at another place.
    trees["cgroup2"] = procfs.Mount("0:1", "/user", os.fspath(tmp_path / "user"), "cgroup2", ())
    assert delegated.delegate_of(Slice("/user/own")) == USER
    assert delegated.delegate_of(Slice("/own")) == 0


def test_a_restart_takes_as_long_as_there_are_slices(tmp_path: Path) -> None:
    """CPU time of reading the journal, taking over the books and building the tree: ten times as many slices take about
    ten times as long. Making and removing one slice takes the same time, however many there are."""
    few_, many = Restart(tmp_path, 1000), Restart(tmp_path, 10_000)
    again = Restart(tmp_path, 1000)
    assert many.begin < 20 * max(few_.begin, again.begin)
    assert many.begin < 8, "seconds on a processor that is four times slower than those it was made on"
    assert many.change < 5 * max(few_.change, again.change)


class Restart:
    """A daemon that takes over `slices` slices, and makes and removes a few; CPU seconds of this thread for both."""

    def __init__(self, folder: Path, slices: int) -> None:
        found = state.State()
        found.apply(state.gpu("GPU-0"))
        for slice_ in (Slice("/top"), *(Slice(f"/top/s{number}") for number in range(slices))):
            assert slice_.parent is not None
            found.apply(state.add(("GPU-0", slice_), slice_.parent))
            found.apply(state.put(("GPU-0", slice_), {"kept": 1}))
        path = folder / f"{slices}.journal"
        path.touch(0o600)
        path.write_bytes(format.begin("boot", found)[0])
        gc.collect()
        gc.disable()  # as the daemon does
        try:
            began = time.thread_time()
            journal = Journal(path, boot="boot")
            controller = Controller(JournaledLedger(journal, {0: "GPU-0"}), [StubGpu()])
            tree = Tree(controller, Attributes(journal, {0: "GPU-0"}))
            self.begin = time.thread_time() - began
            population = controller.population
            assert len(population.slices()) == slices + 2
            assert len(list(tree.entries(tree.slices.inode))) == 1
            began = time.thread_time()
            for number in range(200):
                population.make(Slice(f"/top/more{number}"))
            for number in range(200):
                population.unmake(Slice(f"/top/more{number}"))
            self.change = time.thread_time() - began
        finally:
            gc.enable()
        controller._membership.exits.close()
        journal.close()
