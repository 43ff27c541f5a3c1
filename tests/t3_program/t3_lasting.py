"""A bug in a lasting task, or in its work for one program, is logged, and ends neither other work nor the mount."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import pytest
import trio

from backend.common import lasting
from backend.core.membership import CGROUP_SWEEP_S
from backend.door import tenants
from backend.ledgers.journal import state
from backend.ledgers.journal.file import Journal
from backend.ledgers.journal.ledger import SOON_S, JournaledLedger
from tests.support.harness import Harness, StubGpu, running, settle, until, virtual

Spawn = Callable[..., subprocess.Popen[bytes]]

BUG = RecursionError("a bug")


async def exits(h: Harness, spawn: Spawn) -> None:
    """One process's exit cannot be followed; that of the next can."""
    one, two = spawn(), spawn()
    await h.arrive(one.pid)
    process = await h.arrive(two.pid)
    expel = h.controller.population.expel
    with mock.patch.object(h.controller.population, "expel", side_effect=BUG) as broken:
        one.kill()
        await until(lambda: broken.called, "its exit is seen")
    with mock.patch.object(h.controller.population, "expel", expel):
        two.kill()
        await h.gone(process)
    h.controller.population.expel(h.controller.population.by_pid(one.pid).process)  # type: ignore[union-attr]


async def offers(h: Harness, spawn: Spawn) -> None:
    """The GPU fails once to report room."""
    gpu: Any = h.controller.gpus[0]
    with mock.patch.object(gpu, "offer", side_effect=BUG):
        h.controller._notices.freed(0)
        await trio.sleep(1)
    h.controller._notices.freed(0)
    await trio.sleep(1)
    assert len(gpu.offers) == 1


async def sweep(h: Harness, spawn: Spawn) -> None:
    """The look at all processes fails, not the look at one."""
    residents = h.controller.population.residents
    with mock.patch.object(h.controller.population, "residents", side_effect=BUG):
        await trio.sleep(2 * CGROUP_SWEEP_S)
    assert h.controller.population.residents == residents
    await trio.sleep(lasting.AGAIN_S + CGROUP_SWEEP_S)
    with mock.patch.object(h.controller.population, "residents", return_value=()) as looks:
        await trio.sleep(2 * CGROUP_SWEEP_S)
        assert looks.called


async def moves(h: Harness, spawn: Spawn) -> None:
    """Finding out where a moved process is fails once."""
    process = await h.arrive(spawn().pid)
    migrator: Any = h.controller._migrator
    with (
        mock.patch.object(migrator, "_moves", mock.Mock(left=mock.Mock(side_effect=[[process], [], []]))),
        mock.patch.object(migrator, "_conclude", side_effect=BUG),
    ):
        migrator._look.set()
        await trio.sleep(1)


@pytest.mark.logs("exited, and is not all gone|room is not told|the watch for moves failed|where pid .* is not known")
@pytest.mark.parametrize("what", [exits, offers, sweep, moves])
@virtual
async def test_a_bug_ends_no_mount(spawn: Spawn, what: Callable[[Harness, Spawn], Awaitable[None]]) -> None:
    async with running(StubGpu()) as h:
        await what(h, spawn)
        await settle()
        assert "ledger soft" in await h.read("ggroup.backend")


@pytest.mark.logs("the ledger failed")
@virtual
async def test_books_that_cannot_be_written_down_once(tmp_path: Any, spawn: Spawn) -> None:
    """Figures that are written later: what cannot be written to the journal now comes with the next change."""
    gpu = StubGpu()
    journal = Journal(tmp_path / "journal", boot="boot")
    async with running(gpu, ledger=JournaledLedger(journal, {0: gpu.info.uuid})) as h:
        who = await h.arrive(spawn().pid, gmem=4096)
        with mock.patch.object(journal, "commit", side_effect=state.Nonsense("no")):
            h.ledger.uncharge(_group(who), 4096)
            await trio.sleep(2 * SOON_S)
        await trio.sleep(2 * lasting.AGAIN_S)
        assert "0" in await h.read(f"{who.pid}/0/gmem.current")
    journal.close()


def _group(process: Any) -> Any:
    from backend.process.identity import Member

    return Member(process, 0)


@pytest.mark.logs("connection dropped", "cannot be served")
@virtual
async def test_a_session_that_ends_badly_ends_alone(tmp_path: Any) -> None:
    """Opening, running or closing it may raise anything."""
    session = mock.Mock(process=mock.Mock(pid=7), run=mock.AsyncMock(), close=mock.Mock(side_effect=BUG))
    for open_session in (mock.Mock(return_value=session), mock.Mock(side_effect=BUG)):
        ours, theirs = trio.socket.socketpair()
        with theirs:
            await tenants._serve_one(ours, open_session, tenants.Door())
        assert open_session.called


@pytest.mark.logs("it failed, and goes on in 1 s", "it failed, and goes on in 2 s", "it failed, and goes on in 4 s")
@virtual
async def test_what_fails_again_and_again_is_begun_ever_more_rarely() -> None:
    begun: list[float] = []

    async def run() -> None:
        begun.append(trio.current_time())
        if len(begun) < 4:
            raise OSError(errno.EIO, "again")

    start = trio.current_time()
    await lasting.lasting("it", run)
    assert [round(at - start) for at in begun] == [0, 1, 3, 7]
