"""Level 3: how many families a user has, what is kept of those that were refused, and what a message costs."""

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
from backend.core.descent import families_above
from backend.core.families import FAMILIES_MOST, Families, Family
from backend.door.asking import Asking
from backend.door.wire import Message, Op
from backend.process import procfs
from backend.process.identity import Process, Slice
from tests.support.harness import Spawn, StubGpu, running, virtual
from tests.t3_program.families import ask

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
    """The pid of a process with 20 parents of its own."""
    words = [sys.executable, "-c", DEEP]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        assert process.stdin is not None
        process.stdin.close()


@virtual
async def test_a_family_is_not_made_ahead(spawn: Spawn) -> None:
    """It would not go with its last process."""
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


# What a message costs


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


def test_what_is_said_of_a_parent() -> None:
    """Of the effective user; the first line is the program's own, and has its newlines escaped."""
    raw = b"Name:\tx\\nPPid:\t77\nUmask:\t0022\nPPid:\t5\nTracerPid:\t0\nUid:\t1\t2\t3\t4\nGid:\t0\t0\t0\t0\n"
    assert procfs.parse_descent(raw) == procfs.Descent(5, 2)
    assert procfs.descent(os.getpid()) == procfs.Descent(os.getppid(), os.geteuid())


@virtual
async def test_a_connection_has_eight_tries() -> None:
    """A refused one costs as much, and others come before it is refused."""
    calls: list[Families] = []

    async def refuse(process: Process, families: Families, *, everywhere: bool) -> None:
        calls.append(families)
        raise fail(errno.EAGAIN)

    asking, answers = Asking(Process(1, 1), USER), []
    for number in range(1, 11):
        try:
            await asking.take(Message(Op.FAMILY, args=(number, 0)), SimpleNamespace(ask=refuse))  # type: ignore[arg-type]
        except OSError as error:
            answers.append(error.errno)
    assert answers == [errno.EAGAIN] * FAMILIES_MOST + [errno.E2BIG] * 2
    assert len(calls) == FAMILIES_MOST
