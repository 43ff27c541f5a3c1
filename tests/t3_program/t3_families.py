"""Level 3: programs that limit themselves: the families that they are in, and what becomes of these."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import trio

from backend.core.descent import families_above
from backend.core.families import Families, Family, believed, below, joined, parsed
from backend.process import procfs
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn, identify
from tests.support.harness import MIB, Harness, Spawn, StubGpu, running, settle, until, virtual
from tests.support.restarted import Machine
from tests.t3_program.families import NAME, ONE, USER, ask, where

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""


@pytest.fixture
def parent() -> Iterator[tuple[int, int]]:
    """Yield the pids of a process and of its child."""
    words = [sys.executable, "-c", PARENT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        assert process.stdin is not None
        process.stdin.close()


@virtual
async def test_a_family_holds_for_its_processes_together_and_goes_with_the_last(spawn: Spawn) -> None:
    async with running(StubGpu()) as h:
        before = h.leftovers()
        one, other = spawn(), spawn()
        for process in (one, other):
            await ask(h, process.pid, ONE)
            await h.arrive(process.pid, "/job", gmem=6 * MIB)
        path = f"slice/job/{NAME}/0"
        assert await h.read(f"{path}/gmem.limit.high") == f"{8 * MIB}\n"
        assert await h.read(f"{path}/gmem.current") == f"{8 * MIB}\n", "both together are brought under it"
        assert await h.read("slice/job/0/gmem.current") == f"{8 * MIB}\n"
        h.check()
        one.kill()
        await h.gone(identify_dead(one.pid, h))
        assert await h.read(f"{path}/gmem.limit.high") == f"{8 * MIB}\n"
        await h.write(f"{path}/gmem.limit.high", "64M")
        other.kill()
        await h.gone(identify_dead(other.pid, h))
        assert h.leftovers() == before, "what root wrote there goes with it"


def identify_dead(pid: int, h: Harness) -> Process:
    """Return the process that had a pid in the tree."""
    found = h.controller.population.by_pid(pid)
    return found.process if found is not None else Process(pid, 0)


@virtual
async def test_a_process_that_asks_and_never_comes_leaves_nothing(spawn: Spawn) -> None:
    async with running(StubGpu()) as h:
        before = h.leftovers()
        child = spawn()
        await ask(h, child.pid, ONE)
        assert h.leftovers() != before
        child.kill()
        await until(lambda: h.leftovers() == before, "its exit is seen")


@virtual
async def test_one_that_is_in_the_tree_is_brought_under_its_limit(spawn: Spawn) -> None:
    """NVML may have reported it before its library connects."""
    async with running(StubGpu()) as h:
        process = await h.arrive(spawn().pid, "/job", gmem=32 * MIB)
        await ask(h, process.pid, ONE)
        assert where(h, process) == f"/job/{NAME}"
        await settle()
        assert await h.read(f"{process.pid}/0/gmem.current") == f"{8 * MIB}\n"
        await ask(h, process.pid, ONE)
        assert where(h, process) == f"/job/{NAME}", "as after a reconnect"
        h.check()


@virtual
async def test_what_is_new_is_below_what_there_is(spawn: Spawn) -> None:
    """No later request leads out of a family."""
    async with running(StubGpu()) as h:
        process = await h.arrive(spawn().pid, "/job")
        await ask(h, process.pid, ONE)
        wider = Family(0x99, USER, {"high": 1 << 40})
        await ask(h, process.pid, wider)
        assert where(h, process) == f"/job/{NAME}/{wider.name}"
        await ask(h, process.pid, ONE)
        await ask(h, process.pid)
        assert where(h, process) == f"/job/{NAME}/{wider.name}"
        many = [Family(number, USER) for number in range(1, 20)]
        assert len(joined((), many)) == 8


@virtual
async def test_a_child_that_says_nothing_is_found_by_its_parents(parent: tuple[int, int]) -> None:
    async with running(StubGpu()) as h:
        above, child = parent
        await ask(h, above, ONE)
        process = await h.arrive(child, "/job", gmem=4 * MIB)
        assert where(h, process) == f"/job/{NAME}"
        own = Family(0x77, USER, {"high": 1 << 40})
        await ask(h, child, own)
        assert where(h, process) == f"/job/{NAME}/{own.name}"


@virtual
async def test_a_user_has_no_process_of_another_in_its_family(parent: tuple[int, int]) -> None:
    async with running(StubGpu()) as h:
        above, child = parent
        await ask(h, above, Family(0x1234, USER + 1000, {"high": 8 * MIB}))
        process = await h.arrive(child, "/job")
        assert where(h, process) == "/job"


def test_a_chain_that_changes_as_it_is_read_leads_nowhere(parent: tuple[int, int]) -> None:
    above, child = parent
    known: dict[int, Families] = {above: (ONE,)}
    assert families_above(child, lambda pid: known.get(pid, ())) == (ONE,)
    real, calls = procfs.descent, []

    def descent(pid: int) -> procfs.Descent:
        calls.append(pid)
        found = real(pid)
        return procfs.Descent(1, found.uid) if calls.count(child) > 1 else found

    with mock.patch.object(procfs, "descent", descent):
        assert families_above(child, lambda pid: known.get(pid, ())) == ()


@virtual
async def test_one_that_the_books_refuse_is_nowhere(spawn: Spawn) -> None:
    async with running(StubGpu(0), StubGpu(1)) as h:
        before, add = h.leftovers(), h.ledger.add

        def refuse(group: Member | SliceOn, parent: SliceOn) -> None:
            if isinstance(group, Member) and group.gpu == 1:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            add(group, parent)

        child, other = spawn(), spawn()
        h.world.cgroups[child.pid] = Slice("/job")
        with mock.patch.object(h.ledger, "add", refuse):
            with pytest.raises(BlockingIOError):
                await h.controller.bookkeeper.arrive(identify(child.pid), 1)
            assert h.leftovers() == before
            with pytest.raises(BlockingIOError):
                await ask(h, other.pid, ONE, everywhere=True)
        other.kill()
        await until(lambda: h.leftovers() == before, "what it was promised goes with it")


@virtual
async def test_it_follows_its_process_to_another_cgroup(spawn: Spawn) -> None:
    """There it is in another slice of that name with those limits, and the cgroup's own limits hold as well."""
    async with running(StubGpu()) as h:
        await ask(h, (child := spawn()).pid, ONE)
        process = await h.arrive(child.pid, "/a", gmem=4 * MIB)
        h.world.cgroups[child.pid] = Slice("/b")
        await until_moved(h, process, f"/b/{NAME}")
        assert await h.read(f"slice/b/{NAME}/0/gmem.limit.high") == f"{8 * MIB}\n"
        assert await h.read(f"slice/b/{NAME}/0/gmem.current") == f"{4 * MIB}\n"
        assert not h.controller.population.holds(SliceOn(Slice("/a"), 0))
        h.check()


@virtual
async def test_what_root_set_on_it_goes_along(spawn: Spawn) -> None:
    """On each GPU; and so does a family within it."""
    async with running(StubGpu(0), StubGpu(1)) as h:
        inner = Family(0x77, USER, {"swap_max": 64 * MIB})
        process = await h.arrive(spawn().pid, "/a", gmem=4 * MIB)
        await ask(h, process.pid, ONE, inner)
        await h.write(f"slice/a/{NAME}/1/gmem.limit.high", "2M")
        await h.write(f"slice/a/{NAME}/0/compute.freeze", "1")
        await h.write(f"slice/a/{NAME}/{inner.name}/0/gmem.swap.max", "0")
        h.world.cgroups[process.pid] = Slice("/b")
        await until_moved(h, process, f"/b/{NAME}/{inner.name}")
        assert await h.read(f"slice/b/{NAME}/0/gmem.limit.high") == f"{8 * MIB}\n"
        assert await h.read(f"slice/b/{NAME}/1/gmem.limit.high") == f"{2 * MIB}\n"
        assert await h.read(f"slice/b/{NAME}/{inner.name}/0/gmem.swap.max") == "0\n"
        assert await h.read(f"slice/b/{NAME}/0/compute.freeze") == "1\n"
        assert "frozen 1" in (await h.read(f"slice/b/{NAME}/0/compute.events")).splitlines()
        h.check()


@virtual
async def test_what_root_made_less_goes_along_into_one_that_is_there(spawn: Spawn) -> None:
    """There, a process of the family still has the first values; what root set there stays."""
    async with running(StubGpu(), scheduler=True) as h:
        process, there = await h.arrive(spawn().pid, "/a"), await h.arrive(spawn().pid, "/b")
        inner = Family(0x77, USER, {"high": 4 * MIB})
        for one in (process, there):
            await ask(h, one.pid, ONE, inner)
        await h.write(f"slice/a/{NAME}/0/gmem.limit.high", "2M")
        await h.write(f"slice/a/{NAME}/0/gmem.swap.max", "64M")
        await h.write(f"slice/a/{NAME}/0/compute.weight", "3")
        await h.write(f"slice/b/{NAME}/{inner.name}/0/gmem.limit.high", "1G")
        h.world.cgroups[process.pid] = Slice("/b")
        await until_moved(h, process, f"/b/{NAME}/{inner.name}")
        books = h.ledger.books(SliceOn(Slice(f"/b/{NAME}"), 0))
        assert (books.high, books.swap_max, books.weight) == (2 * MIB, 64 * MIB, 3)
        assert await h.read(f"slice/b/{NAME}/{inner.name}/0/gmem.limit.high") == f"{1 << 30}\n"


@virtual
async def test_a_gpu_that_is_new_to_the_next_daemon_has_the_limits_too(spawn: Spawn) -> None:
    machine = Machine(StubGpu(0))
    async with machine.daemon() as h:
        process = await h.arrive(spawn().pid, "/job")
        await ask(h, process.pid, ONE)
        h.kill()
    async with machine.daemon(*machine.gpus, StubGpu(1)) as h:
        assert where(h, process) == f"/job/{NAME}"
        assert await h.read(f"slice/job/{NAME}/1/gmem.limit.high") == f"{8 * MIB}\n"


async def until_moved(h: Harness, process: Process, path: str) -> None:
    """Wait until a process is in a slice."""
    with trio.fail_after(10):
        while where(h, process) != path:  # noqa: ASYNC110 - nothing tells of it
            await trio.sleep(0.1)


@virtual
async def test_what_no_gpu_acts_on_is_refused(spawn: Spawn) -> None:
    gpu = StubGpu()
    gpu.unsupported.add("gmem.limit.high")
    async with running(gpu) as h:
        with pytest.raises(OSError, match="not supported") as refused:
            await ask(h, spawn().pid, ONE)
        assert refused.value.errno == errno.EOPNOTSUPP


@virtual
async def test_one_that_is_to_be_in_the_tree_has_every_gpu(spawn: Spawn) -> None:
    async with running(StubGpu(0), StubGpu(1)) as h:
        process = await ask(h, spawn().pid, ONE, everywhere=True)
        assert await h.listdir(f"{process.pid}") == ["0", "1"]
        assert await h.read(f"slice/{NAME}/1/gmem.limit.high") == f"{8 * MIB}\n"


@virtual
async def test_the_next_daemon_knows_the_families(spawn: Spawn) -> None:
    """From the books, even for one whose cgroup has changed meanwhile; and children are still found."""
    machine = Machine(StubGpu())
    one, other = spawn(), spawn()
    async with machine.daemon() as h:
        for pid in (one.pid, other.pid):
            await ask(h, pid, ONE)
            await h.arrive(pid, "/job", gmem=2 * MIB)
        await h.write(f"slice/job/{NAME}/0/gmem.limit.high", "16M")
        h.kill()
    machine.world.cgroups[other.pid] = Slice("/elsewhere")
    async with machine.daemon() as h:
        assert where(h, identify(one.pid)) == f"/job/{NAME}"
        assert where(h, identify(other.pid)) == f"/elsewhere/{NAME}"
        for job in ("job", "elsewhere"):
            assert await h.read(f"slice/{job}/{NAME}/0/gmem.limit.high") == f"{16 * MIB}\n"
        assert h.controller.population.families == 2
        entry = h.controller.population.slice_entry(Slice(f"/job/{NAME}"))
        assert entry is not None
        assert (entry.user, entry.family, entry.kept) == (USER, True, False)
        for process in (one, other):
            process.kill()
            await h.gone(identify_dead(process.pid, h))
        assert h.controller.population.families == 0
        assert h.controller.population.slices() == [ROOT]


@virtual
async def test_the_next_daemon_believes_no_cgroup_that_is_called_so(spawn: Spawn) -> None:
    """A user may give its cgroups any name, and leave them while no daemon looks."""
    machine = Machine(StubGpu())
    child, owned = spawn(), spawn()
    async with machine.daemon() as h:
        await h.arrive(child.pid, f"/job/{Family(5, USER + 1000).name}")
        await h.arrive(owned.pid, f"/job/{Family(6, 0).name}")
        h.kill()
    machine.world.cgroups |= {child.pid: Slice("/job"), owned.pid: Slice("/job")}
    uids = {child.pid: 1000 + USER + 1, owned.pid: 4321}
    with mock.patch.object(procfs, "descent", lambda pid: procfs.Descent(1, uids[pid])):
        async with machine.daemon() as h:
            assert where(h, identify(child.pid)) == "/job"
            assert where(h, identify(owned.pid)) == f"/job/{Family(6, 0).name}", "as of a child of root's with its user"
            entry = h.controller.population.slice_entry(Slice(where(h, identify(owned.pid))))
            assert entry is not None
            assert entry.user == 4321, "it counts for that user, and not for root"


@pytest.mark.logs("its user cannot be looked up")
@virtual
async def test_a_daemon_that_is_short_of_descriptors_drops_no_limit(spawn: Spawn) -> None:
    machine = Machine(StubGpu())
    async with machine.daemon() as h:
        process = await h.arrive(spawn().pid, "/job")
        await ask(h, process.pid, ONE)
        h.kill()
    with mock.patch.object(procfs, "descent", side_effect=OSError(errno.EMFILE, os.strerror(errno.EMFILE))):
        async with machine.daemon() as h:
            assert where(h, process) == f"/job/{NAME}"


def test_what_a_path_says_of_families() -> None:
    many = below(Slice("/job"), [Family(number, 7) for number in range(1, 13)])
    assert [family.id for _, family in parsed(many, Slice("/job"))] == list(range(5, 13))
    assert parsed(below(Slice("/job"), [Family(0, 7)]), Slice("/job")) == []
    mixed = parsed(below(ROOT, [Family(1, 7), Family(2, 8), Family(3, 0), Family(4, 7)]), ROOT)
    assert [(family.id, family.user) for _, family in believed(mixed, 7)] == [(3, 7), (4, 7)]
    assert believed(mixed, 9) == []
