"""Level 3: bounds of a user's families, what is kept of refused ones, and the cost of a message."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from backend.common.errors import fail
from backend.core import bounds
from backend.core.descent import families_above
from backend.core.families import FAMILIES_MOST, Families, Family
from backend.door.asking import Asking
from backend.door.wire import Message, Op
from backend.process import procfs
from backend.process.identity import Group, Process, Slice, SliceOn
from tests.support.harness import MIB, Harness, Spawn, StubGpu, running, until, virtual
from tests.t3_program.families import ask, where

USER = 1000
DEEP = """
import os, sys
for _ in range(20):
    if os.fork():
        os.wait()
        os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def deep() -> Iterator[int]:
    """Yield the pid of a process with 20 ancestors of its own."""
    words = [sys.executable, "-c", DEEP]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        assert process.stdin is not None
        process.stdin.close()


async def refused(h: Harness, pid: int, *families: Family, everywhere: bool = False) -> int:
    """Return the errno that a process gets for its request; 0 if it is granted."""
    try:
        await ask(h, pid, *families, everywhere=everywhere)
    except OSError as error:
        return error.errno or 0
    return 0


@virtual
async def test_families_of_a_user_are_bounded(spawn: Spawn) -> None:
    with mock.patch.object(bounds, "FAMILIES_OF_USER", 2):
        async with running(StubGpu()) as h:
            processes = [await h.arrive(spawn().pid, "/job") for _ in range(4)]
            refused = []
            for number, process in enumerate(processes, 1):
                try:
                    await ask(h, process.pid, Family(number, 1000, {"high": MIB}))
                except OSError as error:
                    refused.append(error.errno)
            assert refused == [errno.EAGAIN, errno.EAGAIN]
            await ask(h, processes[2].pid, Family(9, 1001, {"high": MIB}))
            assert where(h, processes[2]) == f"/job/{Family(9, 1001).name}", "others have their own"
            assert where(h, processes[3]) == "/job"


@virtual
async def test_root_s_families_are_bounded_too(spawn: Spawn) -> None:
    """Root in a container is uid 0, too, and may be any tenant. Slices that root makes do not count."""
    with mock.patch.object(bounds, "FAMILIES_OF_USER", 2):
        async with running(StubGpu()) as h:
            answers = [await refused(h, spawn().pid, Family(n, 0), everywhere=True) for n in range(1, 5)]
            assert answers == [0, 0, errno.EAGAIN, errno.EAGAIN]
            for number in range(5):
                h.controller.population.make(Slice(f"/{number}"))


@virtual
async def test_families_of_all_users_are_bounded(spawn: Spawn) -> None:
    with mock.patch.object(bounds, "FAMILIES_OF_ALL", 3):
        async with running(StubGpu()) as h:
            children = [spawn() for _ in range(4)]
            answers = [await refused(h, child.pid, Family(1, USER + n)) for n, child in enumerate(children)]
            assert answers == [0, 0, 0, errno.EAGAIN]
            children[0].kill()
            await until(lambda: len(h.controller._membership._promises) == 2, "its exit is seen")
            assert await refused(h, children[3].pid, Family(1, USER + 3)) == 0


@virtual
async def test_what_was_granted_is_there_when_its_process_comes(spawn: Spawn) -> None:
    """A place is reserved for it; only one for several processes of a family, or for a family that is in the tree."""
    with mock.patch.object(bounds, "FAMILIES_OF_USER", 3):
        async with running(StubGpu()) as h:
            before = h.leftovers()
            children = [spawn() for _ in range(5)]
            families = [Family(n, USER, {"high": MIB}) for n in (1, 1, 2, 3, 4)]
            granted = []
            for child, family in zip(children[:3], families[:3], strict=True):
                h.world.cgroups[child.pid] = Slice("/job")
                assert await refused(h, child.pid, family) == 0
                granted.append((child, family))
            assert await refused(h, children[3].pid, families[3], families[4]) == errno.EAGAIN, "both, or none"
            for child, family in granted:
                assert where(h, await h.arrive(child.pid, "/job")) == f"/job/{family.name}"
            assert await refused(h, children[3].pid, families[3]) == 0
            assert await refused(h, children[4].pid, families[4]) == errno.EAGAIN
            for child in children:
                child.kill()
            await until(lambda: h.leftovers() == before, "all of that goes with them")


@virtual
async def test_processes_that_asked_and_do_not_come_are_bounded(spawn: Spawn) -> None:
    """Each costs the daemon a descriptor, even if all are in one family."""
    with mock.patch.object(bounds, "FAMILIES_OF_USER", 2):
        async with running(StubGpu()) as h:
            one = Family(1, USER)
            answers = [await refused(h, spawn().pid, one) for _ in range(3)]
            assert answers == [0, 0, errno.EAGAIN]
            assert h.leftovers()["pidfds"] == 2, "the one that was refused is not watched"


@virtual
async def test_nothing_of_one_that_is_refused_is_kept(spawn: Spawn) -> None:
    with mock.patch.object(bounds, "FAMILIES_OF_USER", 1):
        async with running(StubGpu()) as h:
            await ask(h, spawn().pid, Family(1, USER), everywhere=True)
            before = h.leftovers()
            for number in range(2, 6):
                assert await refused(h, spawn().pid, Family(number, USER)) == errno.EAGAIN
            assert h.leftovers() == before


@virtual
async def test_the_ninth_is_refused(spawn: Spawn) -> None:
    """Whether or not it is in the tree; the families that it was in before stay."""
    async with running(StubGpu()) as h:
        eight = [Family(number, USER) for number in range(1, FAMILIES_MOST + 1)]
        for process in (await h.arrive(spawn().pid, "/job"), Process(0, 0)):
            pid = process.pid or spawn().pid
            for family in eight:
                await ask(h, pid, family)
            assert await refused(h, pid, Family(99, USER, {"high": MIB})) == errno.E2BIG
            assert await refused(h, pid, *eight) == 0
            there = await h.arrive(pid, "/job")
            assert where(h, there) == "/".join(("/job", *(family.name for family in eight)))


@pytest.mark.logs("too many or too deep")
@virtual
async def test_one_that_is_in_no_place_is_told_so(spawn: Spawn) -> None:
    """For example where the cgroup of its process is too deep to have a slice of its own."""
    async with running(StubGpu()) as h:
        process = await h.arrive(spawn().pid, "/d" * 130)
        assert await refused(h, process.pid, Family(1, USER)) == errno.EAGAIN
        assert where(h, process) == "/d" * 128


@pytest.mark.logs("too many or too deep")
@virtual
async def test_what_the_books_have_no_room_for_is_refused(spawn: Spawn) -> None:
    """The kernel's books may have no room, which is not known beforehand."""
    async with running(StubGpu()) as h:
        add, process = h.ledger.add, await h.arrive(spawn().pid, "/job")

        def refuse(group: Group, parent: SliceOn) -> None:
            if isinstance(group, SliceOn) and "family" in group.slice.path:
                raise fail(errno.ENOSPC)
            add(group, parent)

        with mock.patch.object(h.ledger, "add", refuse):
            for pid in (process.pid, spawn().pid):
                assert await refused(h, pid, Family(1, USER), everywhere=True) == errno.EAGAIN
        assert where(h, process) == "/job"
        assert h.leftovers()["families promised"] == h.leftovers()["places of families"] == 0


@virtual
async def test_a_family_is_not_made_ahead(spawn: Spawn) -> None:
    """It would not be removed with its last process."""
    async with running(StubGpu()) as h:
        family = Family(7, USER)
        await ask(h, (await h.arrive(spawn().pid, "/job")).pid, family)
        before = h.leftovers()
        for path in (f"/job/{family.name}", f"/job/{family.name}/below"):
            assert await h.refused("ggroup.slices", f"10s {path}") == errno.EINVAL
            with pytest.raises(OSError, match="Invalid argument"):
                h.controller.population.hold(Slice(path))
        entry = h.controller.population.slice_entry(Slice(f"/job/{family.name}"))
        assert entry is not None
        assert not entry.unit
        assert h.leftovers() == before


# The cost of a message


def test_parents_are_read_up_to_the_first_that_is_known(deep: int) -> None:
    one, reads = Family(1, USER + 5), []
    parent, real = procfs.descent(deep).parent, procfs.descent

    def descent(pid: int) -> procfs.Descent:
        reads.append(pid)
        return procfs.Descent(real(pid).parent, USER + 5)

    known: dict[int, Families] = {parent: (one,)}
    with mock.patch.object(procfs, "descent", descent):
        assert families_above(deep, lambda pid: known.get(pid, ())) == (one,)
    assert reads == [deep, deep]


@virtual
async def test_parents_are_read_at_the_first_message_alone(deep: int) -> None:
    async with running(StubGpu()) as h:
        above, outer = procfs.descent(deep).parent, Family(9, 0)
        await ask(h, above, outer)
        with mock.patch.object(procfs, "descent", wraps=procfs.descent) as reads:
            for number in range(1, 5):
                await ask(h, deep, Family(number, 0))
        assert reads.call_count == 2
        names = "/".join(family.name for family in (outer, *(Family(number, 0) for number in range(1, 5))))
        assert where(h, await h.arrive(deep)) == f"/{names}"


def test_what_is_said_of_a_parent() -> None:
    """Of the effective user. The first line is under the program's control, and its newlines are escaped."""
    raw = b"Name:\tx\\nPPid:\t77\nUmask:\t0022\nPPid:\t5\nTracerPid:\t0\nUid:\t1\t2\t3\t4\nGid:\t0\t0\t0\t0\n"
    assert procfs.parse_descent(raw) == procfs.Descent(5, 2)
    assert procfs.descent(os.getpid()) == procfs.Descent(os.getppid(), os.geteuid())


@virtual
async def test_a_connection_has_eight_tries() -> None:
    """A refused request costs as much, and other requests are served before it is refused."""
    calls: list[Families] = []

    async def refuse(process: Process, families: Families, *, everywhere: bool) -> None:
        calls.append(families)
        raise fail(errno.EAGAIN)

    asking, answers = Asking(Process(1, 1), USER), []
    for number in range(1, 11):
        try:
            await asking.take(Message(Op.FAMILY, args=(number, 0)), SimpleNamespace(ask=refuse))
        except OSError as error:
            answers.append(error.errno)
    assert answers == [errno.EAGAIN] * FAMILIES_MOST + [errno.E2BIG] * 2
    assert len(calls) == FAMILIES_MOST
