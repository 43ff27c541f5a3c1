"""Checks before a program moves to another NVIDIA GPU, and programs left in mid-move; without a driver."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence

import attrs
import pytest
import trio
from trio.testing import MockClock

from backend.core.records import GpuInfo
from backend.cuda.migrations import Standby
from backend.nvidia import checkpoint
from backend.nvidia.checkpoint.records import Action, Outcome, Request, State, Step
from backend.nvidia.mover import AGAIN_S, BEGUN_S, LOCK_S, Mover
from backend.process.identity import Process

GIB = 1 << 30
PROCESS = Process(4242, 1)


def gpu(index: int, name: str = "NVIDIA H200") -> GpuInfo:
    return GpuInfo(index, f"GPU-{index}", name, "none", 100 * GIB, 2048)


@attrs.define
class Agents:
    """Requests that agents get, and their outcomes."""

    asked: list[tuple[object, ...]] = attrs.field(factory=list)
    outcomes: list[Outcome] = attrs.field(factory=list)
    entries: list[checkpoint.Left] = attrs.field(factory=list)

    async def move(self, *words: object) -> checkpoint.Done:
        self.asked.append(("move", *words))
        return self._answer()

    async def recover(self, process: Process) -> checkpoint.Done:
        self.asked.append(("recover", process))
        done = self._answer()
        self.entries = [one for one in self.entries if one.request.process != process]
        return done

    def left(self) -> Sequence[checkpoint.Left]:
        return tuple(self.entries)

    def _answer(self) -> checkpoint.Done:
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome(State.RUNNING, "GPU-1")
        if outcome.errno:
            raise checkpoint.CheckpointError(outcome, ())
        return checkpoint.Done(State.RUNNING, "GPU-1", {Step.LOCK: 1.0, Step.RESTORE: 20.0}, 30.0)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Agents:
    found = Agents()
    for name in ("move", "recover", "left"):
        monkeypatch.setattr(checkpoint, name, getattr(found, name))
    return found


def run(main: Callable[[], object]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))  # type: ignore[arg-type]


def test_a_move(agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    """As much room is reserved as it holds; the log says how long it stood still."""
    caplog.set_level(logging.INFO)
    run(lambda: Mover(0, lambda _: 8 * GIB).move(PROCESS, gpu(0), gpu(1), 8 * GIB))
    assert agents.asked == [("move", PROCESS, "GPU-0", "GPU-1", 8 * GIB, LOCK_S, None, 8 * GIB)]
    assert "30 ms" in caplog.text


def test_what_the_library_has_placed_does_not_go_through_the_host(agents: Agents) -> None:
    """It needs room on the target, and only the rest needs room in the host."""

    async def begin() -> None:
        raise AssertionError("whoever acts asks for it")

    standby = Standby(7, begin, lambda: None, trio.Event())
    run(lambda: Mover(0, lambda _: GIB).move(PROCESS, gpu(0), gpu(1), 8 * GIB, GIB, standby))
    assert agents.asked == [("move", PROCESS, "GPU-0", "GPU-1", 8 * GIB, LOCK_S, standby, GIB)]
    with pytest.raises(OSError, match="no room"):
        run(lambda: Mover(0, lambda _: GIB - 1).move(PROCESS, gpu(0), gpu(1), 8 * GIB, GIB, standby))


@pytest.mark.parametrize(
    ("target", "host", "code"), [(gpu(1, "NVIDIA L4"), 8 * GIB, errno.EXDEV), (gpu(1), 8 * GIB - 1, errno.ENOMEM)]
)
def test_what_is_refused_before_anything_is_locked(agents: Agents, target: GpuInfo, host: int, code: int) -> None:
    with pytest.raises(OSError, match=r"not the same|no room") as refused:
        run(lambda: Mover(0, lambda _: host).move(PROCESS, gpu(0), target, 8 * GIB))
    assert refused.value.errno == code
    assert agents.asked == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ETIMEDOUT, errno.EOPNOTSUPP, errno.EBUSY, errno.EIO])
def test_a_failure_that_left_it_running(agents: Agents, code: int) -> None:
    """The error is that of the step, and no program needs care afterwards."""

    async def main() -> None:
        mover = Mover(0, lambda _: GIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            await trio.sleep(1)
            agents.outcomes = [Outcome(State.RUNNING, "GPU-0", code, Step.LOCK, "lock: it failed")]
            with pytest.raises(OSError, match="it failed") as refused:
                await mover.move(PROCESS, gpu(0), gpu(1), GIB)
            assert refused.value.errno == code
            await trio.sleep(60)
            assert [name for name, *_ in agents.asked] == ["move"]
            nursery.cancel_scope.cancel()

    run(main)


def test_one_that_has_ended_is_gone(agents: Agents) -> None:
    agents.outcomes = [Outcome(None, "", errno.ESRCH, Step.LOCK, "the program has ended")]
    with pytest.raises(ProcessLookupError):
        run(lambda: Mover(0, lambda _: GIB).move(PROCESS, gpu(0), gpu(1), GIB))


@pytest.mark.logs("was to go from GPU 0 to 1", "is in the middle of a move", "runs again")
def test_one_that_waits_in_the_host_is_tried_until_it_runs(agents: Agents, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once."""

    async def main() -> None:
        mover = Mover(0, lambda _: GIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            await trio.sleep(1)
            nowhere = Outcome(State.CHECKPOINTED, "", errno.ENOSPC, Step.RETURN, "no room")
            agents.outcomes = [nowhere] * 4
            request = Request(Action.MOVE, PROCESS, "GPU-0", "GPU-1", GIB, 5000)
            agents.entries = [checkpoint.Left(request, Step.RESTORE, "GPU-1", busy=False)]
            with pytest.raises(OSError, match="no room"):
                await mover.move(PROCESS, gpu(0), gpu(1), GIB)
            await trio.sleep(10 * AGAIN_S)
            assert agents.entries == []
            assert [name for name, *_ in agents.asked] == ["move"] + ["recover"] * 4
            assert [record.levelno for record in caplog.records].count(logging.WARNING) == 2  # that it waits, and runs
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.logs("was in the middle of a move, and runs again", "was to go from GPU 0 to 1")
def test_whom_a_daemon_before_has_left(agents: Agents) -> None:
    """This includes a suspended program, but not one with an agent at work. A later suspension is on purpose."""
    busy, suspended = Process(1, 1), Process(2, 1)
    agents.entries = [
        checkpoint.Left(Request(Action.MOVE, PROCESS, "GPU-0", "GPU-1", GIB), Step.LOCK, "GPU-0", busy=False),
        checkpoint.Left(Request(Action.MOVE, busy, "GPU-0", "GPU-1", GIB), Step.LOCK, "GPU-0", busy=True),
        checkpoint.Left(Request(Action.SUSPEND, suspended, "GPU-0", "", GIB), Step.LOCK, "GPU-0", busy=False),
    ]

    async def main() -> None:
        mover = Mover(0, lambda _: GIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            await trio.sleep(60)
            assert agents.asked == [("recover", PROCESS), ("recover", suspended)]
            agents.entries = [attrs.evolve(agents.entries[0], request=Request(Action.SUSPEND, suspended), busy=False)]
            agents.outcomes = [Outcome(State.CHECKPOINTED, "", errno.ENOSPC, Step.RETURN, "no room")]
            with pytest.raises(OSError, match="no room"):
                await mover.move(PROCESS, gpu(0), gpu(1), GIB)
            await trio.sleep(60)
            assert [name for name, *_ in agents.asked] == ["recover", "recover", "move"]
            nursery.cancel_scope.cancel()

    run(main)


@pytest.mark.logs("is in the middle of a move: .*no room", "was in the middle of a move, and runs again")
def test_whom_a_daemon_before_had_suspended_runs_once_that_can_be(agents: Agents) -> None:
    """There may be no room at first, or an agent may still be at work. Watchers are told once."""
    told: list[tuple[Process, str]] = []
    busy = Process(1, 1)
    agents.entries = [
        checkpoint.Left(Request(Action.SUSPEND, busy, "GPU-1", "", GIB), Step.CHECKPOINT, "GPU-1", busy=True),
        checkpoint.Left(Request(Action.SUSPEND, PROCESS, "GPU-0", "", GIB), Step.CHECKPOINT, "GPU-0", busy=False),
        checkpoint.Left(Request(Action.MOVE, Process(3, 1), "GPU-0", "GPU-1"), Step.LOCK, "GPU-0", busy=False),
    ]
    agents.outcomes = [Outcome(State.CHECKPOINTED, "", errno.ENOSPC, Step.RETURN, "no room")]

    async def main() -> None:
        mover = Mover(0, lambda _: GIB)
        mover.watchers.append(lambda process, uuid: told.append((process, uuid)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            await trio.sleep(AGAIN_S / 2)
            assert told == []
            agents.entries = [attrs.evolve(one, busy=False) for one in agents.entries]
            await trio.sleep(AGAIN_S)
            assert told == [(busy, "GPU-1"), (PROCESS, "GPU-0")]
            assert agents.entries == []
            agents.entries = [checkpoint.Left(Request(Action.SUSPEND, PROCESS), Step.LOCK, "GPU-0", busy=False)]
            mover._look.set()
            await trio.sleep(10 * AGAIN_S)
            assert len(told) == 2, "who is suspended later is so on purpose"
            nursery.cancel_scope.cancel()

    run(main)


def test_who_may_be_moved_still(agents: Agents) -> None:
    """An agent that the earlier daemon has just started has no file yet; later, every agent has one."""

    async def main() -> None:
        mover = Mover(0, lambda _: GIB)
        assert mover.is_at(PROCESS)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.run)
            await trio.sleep(BEGUN_S - 0.1)
            assert mover.is_at(PROCESS)
            await trio.sleep(0.2)
            assert not mover.is_at(PROCESS)
            request = Request(Action.MOVE, PROCESS, "GPU-0", "GPU-1", GIB)
            agents.entries = [checkpoint.Left(request, Step.LOCK, "GPU-0", busy=True)]
            assert mover.is_at(PROCESS)
            assert not mover.is_at(Process(4242, 2))
            nursery.cancel_scope.cancel()

    run(main)
