"""The agent that moves programs, and the daemon's side of it, on a double of libcuda that fails, hangs and dies."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing

from backend.common import interpreter
from backend.cuda.migrations import Standby
from backend.cuda.page import GPUS, LINE, STANDS, CounterPage
from backend.nvidia import checkpoint
from backend.nvidia.checkpoint import CheckpointError, Done, State, Step
from backend.process.identity import Process, identify
from tests.t6_cuda.processes import CAPACITY, CONTEXT, GIB, Machine, name

T = TypeVar("T")

BYTES = 5 * GIB
ROOM = BYTES + GIB // 2
ZERO, ONE, OTHER = name(0), name(1), name(2)
LOCK_S = 2.0
DIED = r"the agent was killed by signal 9; it is looked after"

CALLS = (
    *(("cuInit", 1), ("cuDeviceGetCount", 1), ("cuDeviceGet", 2), ("cuDeviceGetUuid_v2", 3), ("cuDeviceGetName", 2)),
    *(("cuDevicePrimaryCtxRetain", 1), ("cuCheckpointProcessGetState", 1), ("cuMemGetAllocationGranularity", 1)),
    *(("cuCtxSetCurrent", 1), ("cuMemCreate", 1), ("cuCheckpointProcessLock", 1), ("cuCheckpointProcessCheckpoint", 1)),
    *(("cuMemCreate", 2), ("cuMemRelease", 1), ("cuCheckpointProcessRestore", 1)),
    *(("cuCheckpointProcessUnlock", 1), ("cuMemRelease", 2)),
)
"""The main calls of a move, each with its number."""

STEPS = {
    **dict.fromkeys(("cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2", "cuDeviceGetName"), Step.OPEN),
    "cuDevicePrimaryCtxRetain": Step.OPEN,
    "cuCheckpointProcessGetState": Step.STATE,
    **dict.fromkeys(("cuMemGetAllocationGranularity", "cuCtxSetCurrent", "cuMemCreate"), Step.RESERVE),
    "cuMemRelease": Step.RELEASE,
    "cuCheckpointProcessLock": Step.LOCK,
    "cuCheckpointProcessCheckpoint": Step.CHECKPOINT,
    "cuCheckpointProcessRestore": Step.RESTORE,
}
"""Step to which the failure of a call belongs."""

MADE_GOOD = {("cuMemCreate", 2), ("cuCheckpointProcessUnlock", 1), ("cuMemRelease", 2)}
"""Calls that a move does without, or repeats."""

CODES = {
    801: errno.EOPNOTSUPP,
    401: errno.EBUSY,
    600: errno.ETIMEDOUT,
    2: errno.ENOMEM,
    1: errno.EIO,
    3: errno.EIO,
    100: errno.EIO,
    999: errno.EIO,
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spawn: Callable[..., subprocess.Popen[bytes]]) -> Machine:
    """A machine with a program on its first GPU."""
    made = Machine(tmp_path)
    made.program(identify(spawn().pid), BYTES)
    faulty(monkeypatch, made, "")
    return made


def faulty(monkeypatch: pytest.MonkeyPatch, machine: Machine, *faults: str) -> None:
    """Set the faults of agents that are started from now on."""
    for variable, value in machine.environment(",".join(faults)).items():
        monkeypatch.setenv(variable, value)


def process_of(machine: Machine) -> Process:
    """Return the program's identity."""
    return identify(machine.table.programs[0].pid)


def go(act: Callable[[], Awaitable[T]]) -> T:
    """Run in real time, since agents are real processes."""
    return trio.run(act)


def move(machine: Machine, room: int = ROOM, target: str = ONE) -> Done | CheckpointError:
    """Move the program from the first GPU to another; return the result or the error."""

    async def act() -> Done | CheckpointError:
        try:
            return await checkpoint.move(process_of(machine), ZERO, target, room, LOCK_S)
        except CheckpointError as error:
            return error

    return go(act)


def whole(machine: Machine, place: str) -> None:
    """Check that the program runs there with all of its memory, and that nothing else is held or noted."""
    assert (machine.state, machine.place) == (State.RUNNING, place)
    assert machine.table.programs[0].bytes == BYTES
    assert machine.held() == []
    assert checkpoint.left() == []
    assert not list((machine.directory / "checkpoints").iterdir())


# Success


def test_a_move(machine: Machine) -> None:
    done = move(machine)
    assert isinstance(done, Done)
    assert (done.state, done.place, done.trouble) == (State.RUNNING, ONE, "")
    assert list(done.milliseconds) == [
        *(Step.OPEN, Step.STATE, Step.RESERVE, Step.LOCK, Step.CHECKPOINT, Step.KEEP, Step.RELEASE),
        *(Step.RESTORE, Step.UNLOCK),
    ]
    assert done.stall_ms is not None
    inside = (Step.LOCK, Step.CHECKPOINT, Step.KEEP, Step.RESTORE, Step.UNLOCK)
    assert sum(done.milliseconds[step] for step in inside) <= done.stall_ms < 30e3
    assert machine.calls() == ["GetState", "Lock", "Checkpoint", "Restore", "Unlock"]
    whole(machine, ONE)


def stand(machine: Machine, begin: Callable[[int], Awaitable[None]], room: int = ROOM) -> Done | CheckpointError:
    """Move the program to the second GPU once it stands by, which `begin`, given the page, has to bring about."""
    page, ended, over = CounterPage(), list[None](), trio.Event()

    async def act() -> Done | CheckpointError:
        standby = Standby(page.descriptor, partial(begin, page.descriptor), partial(ended.append, None), over)
        try:
            return await checkpoint.move(process_of(machine), ZERO, ONE, room, LOCK_S, standby, room)
        except CheckpointError as error:
            return error

    try:
        done = go(act)
    finally:
        page.close()
    assert len(ended) == machine.calls().count("Unlock"), "it goes on once it is unlocked"
    assert over.is_set()
    return done


def says(page: int, word: int) -> None:
    """Write the word of the page, as the library does."""
    os.pwrite(page, STANDS.pack(word), GPUS * LINE.size)


def test_a_program_is_had_to_stand_by_at_the_last_moment(machine: Machine) -> None:
    seen: list[object] = []

    async def begin(page: int) -> None:
        seen.extend((machine.state, machine.calls(), bool(machine.held())))
        says(page, 1)

    done = stand(machine, begin)
    assert isinstance(done, Done)
    assert seen == [State.RUNNING, ["GetState"], True], "all that takes time is done before"
    steps = list(done.milliseconds)
    assert steps.index(Step.LOCK) == steps.index(Step.READY) + 1
    assert machine.calls() == ["GetState", "Lock", "Checkpoint", "Restore", "Unlock"]
    whole(machine, ONE)


def test_one_that_does_not_stand_by_is_not_locked(machine: Machine) -> None:
    async def begin(page: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "it shares memory")

    error = stand(machine, begin)
    assert isinstance(error, CheckpointError)
    assert (error.errno, error.state, error.strerror) == (errno.EOPNOTSUPP, State.RUNNING, "it shares memory")
    assert machine.calls() == ["GetState"]
    whole(machine, ZERO)


def test_one_that_does_not_stand_by_any_more_is_let_go(machine: Machine) -> None:
    """Its page says so after it was locked."""

    async def begin(page: int) -> None:
        says(page, 0)

    error = stand(machine, begin)
    assert isinstance(error, CheckpointError)
    assert (error.errno, error.state, error.step) == (errno.EBUSY, State.RUNNING, Step.READY)
    assert machine.calls()[:2] == ["GetState", "Lock"]
    assert machine.calls()[-1] == "Unlock"
    whole(machine, ZERO)


def test_what_has_one_that_is_frozen_run_is_done_at_the_last_moment(machine: Machine) -> None:
    seen: list[object] = []

    async def ready() -> None:
        seen.extend((machine.state, machine.calls()))

    async def refuse() -> None:
        raise OSError(errno.ETIMEDOUT, "it cannot be thawed")

    async def act() -> None:
        process = process_of(machine)
        with pytest.raises(CheckpointError, match="it cannot be thawed") as refused:
            await checkpoint.suspend(process, ZERO, ROOM, LOCK_S, refuse)
        assert (refused.value.errno, refused.value.step) == (errno.ETIMEDOUT, Step.READY)
        assert machine.calls() == []
        done = await checkpoint.suspend(process, ZERO, ROOM, LOCK_S, ready)
        assert list(done.milliseconds) == [Step.OPEN, Step.READY, Step.STATE, Step.LOCK, Step.CHECKPOINT]
        assert seen == [State.RUNNING, []]
        await checkpoint.resume(process, ZERO, ROOM)

    go(act)
    whole(machine, ZERO)


@pytest.mark.logs(DIED)
@pytest.mark.parametrize("call", ["GetState", "Lock", "Checkpoint"])
def test_an_agent_that_dies_after_the_question_asks_no_second_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The program still runs, so its recovery has nothing to wait for."""
    asked: list[None] = []

    async def ready() -> None:
        asked.append(None)

    async def act() -> None:
        with pytest.raises(CheckpointError) as failed:
            await checkpoint.suspend(process_of(machine), ZERO, ROOM, LOCK_S, ready)
        assert failed.value.state is State.RUNNING

    faulty(monkeypatch, machine, f"cuCheckpointProcess{call}:1:after")
    go(act)
    assert len(asked) == 1
    whole(machine, ZERO)


async def at_once() -> None:
    """Wait for nothing, for a program that runs anyway."""


def test_there_and_back_and_off_and_on(machine: Machine) -> None:
    async def act() -> None:
        process = process_of(machine)
        assert await checkpoint.state(process) is State.RUNNING
        for source, target in ((ZERO, ONE), (ONE, ZERO)):
            assert (await checkpoint.move(process, source, target, ROOM, LOCK_S)).place == target
        done = await checkpoint.suspend(process, ZERO, ROOM, LOCK_S, at_once)
        assert (done.state, done.place, done.stall_ms) == (State.CHECKPOINTED, "", None)
        assert await checkpoint.state(process) is State.CHECKPOINTED
        [noted] = checkpoint.left()
        assert (noted.request.action, noted.request.process, noted.busy) == (checkpoint.Action.SUSPEND, process, False)
        machine.table.gpus[0].neighbours = CAPACITY - CONTEXT - BYTES
        with pytest.raises(CheckpointError) as refused:
            await checkpoint.resume(process, ZERO, ROOM)
        assert (refused.value.errno, refused.value.state) == (errno.ENOSPC, State.CHECKPOINTED)
        assert "cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)" in str(refused.value)
        done = await checkpoint.resume(process, ZERO, ROOM, ONE)
        assert (done.state, done.place) == (State.RUNNING, ONE)
        assert (await checkpoint.recover(process)).state is State.RUNNING

    go(act)
    whole(machine, ONE)


# Failures


@pytest.mark.parametrize(
    ("call", "n", "code"),
    [(call, n, code) for call, n in CALLS for code in CODES if "Checkpoint" in call or code in (2, 999)],
)
def test_an_error_of_any_call(machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str, n: int, code: int) -> None:
    faulty(monkeypatch, machine, f"{call}:{n}:{code}")
    result = move(machine)
    if (call, n) in MADE_GOOD:
        assert isinstance(result, Done), result
        whole(machine, ONE)
        return
    assert isinstance(result, CheckpointError)
    no_room = code == 2 and call in ("cuMemCreate", "cuDevicePrimaryCtxRetain")
    assert result.errno == (errno.ENOSPC if no_room else CODES[code])
    assert result.step is STEPS[call]
    assert f"{call}: " in str(result)
    assert f"({code})" in str(result)
    if result.state is not None:
        assert (result.state, result.place) == (State.RUNNING, ZERO)
    whole(machine, ZERO)


@pytest.mark.logs(DIED)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("call", "n"), CALLS)
def test_the_agent_is_killed_at_any_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str, n: int, when: str
) -> None:
    faulty(monkeypatch, machine, f"{call}:{n}:{when}")
    result = move(machine)
    restored = (call, when) == ("cuCheckpointProcessRestore", "after") or CALLS.index((call, n)) > CALLS.index(
        ("cuCheckpointProcessRestore", 1)
    )
    assert result.place == (ONE if restored else "" if STEPS.get(call) in (Step.OPEN, Step.STATE) else ZERO)
    assert result.state is State.RUNNING
    if restored:
        assert isinstance(result, Done)
        assert "killed by signal 9" in result.trouble
    else:
        assert isinstance(result, CheckpointError)
        assert result.errno == errno.EIO
        assert "killed by signal 9" in str(result)
    whole(machine, ONE if restored else ZERO)


@pytest.mark.logs("looked after", "looked after")
def test_one_who_recovers_may_be_killed_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, machine, "cuCheckpointProcessCheckpoint:1:after", "cuCheckpointProcessRestore:1:after")
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.errno, result.state, result.place) == (errno.EIO, State.RUNNING, ZERO)
    whole(machine, ZERO)


DAEMON = """
import sys, trio
from backend.process.identity import Process
from backend.nvidia import checkpoint
pid, start, source, target, room = sys.argv[1:]
trio.run(checkpoint.move, Process(int(pid), int(start)), source, target, int(room), 2.0)
"""


@pytest.mark.parametrize(("call", "n"), CALLS)
def test_the_daemon_is_killed_at_any_call(machine: Machine, monkeypatch: pytest.MonkeyPatch, call: str, n: int) -> None:
    """The agent goes on to the end, whatever signals come with the kill."""
    faulty(monkeypatch, machine, f"{call}:{n}:hang")
    process = process_of(machine)
    words = [sys.executable, "-c", DAEMON, str(process.pid), str(process.start), ZERO, ONE, str(ROOM)]
    with subprocess.Popen(words, env=interpreter.environment()) as daemon:
        gate = os.open(machine.directory / "hang", os.O_WRONLY)  # opens once the agent is in that call
        threads = Path(f"/proc/{daemon.pid}/task").iterdir()  # one of them has started the agent
        [agent] = [pid for thread in threads for pid in (thread / "children").read_text().split()]
        pidfd = os.pidfd_open(int(agent))
        daemon.kill()
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGQUIT):
        signal.pidfd_send_signal(pidfd, number)
    [noted] = checkpoint.left() or [None]
    assert noted is None or noted.busy
    os.close(gate)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(60_000), "the agent does not end"
    os.close(pidfd)
    whole(machine, ONE)


def test_no_room_and_nobody_notices(machine: Machine) -> None:
    machine.table.gpus[1].neighbours = CAPACITY - CONTEXT - ROOM + 1
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.errno, result.step, result.place) == (errno.ENOSPC, Step.RESERVE, ZERO)
    assert machine.calls() == ["GetState"]
    whole(machine, ZERO)


def test_the_lock_does_not_come(machine: Machine) -> None:
    machine.table.programs[0].busy = 1
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.errno, result.step, result.place) == (errno.ETIMEDOUT, Step.LOCK, ZERO)
    assert "CUDA_ERROR_NOT_READY (600)" in str(result)
    whole(machine, ZERO)


def test_who_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    result = move(machine, target=OTHER)
    assert isinstance(result, CheckpointError)
    assert (result.errno, machine.calls()) == (errno.EOPNOTSUPP, [])
    assert "NVIDIA Fake, NVIDIA Other" in str(result)
    real = process_of(machine)
    monkeypatch.setattr(f"{__name__}.process_of", lambda machine: Process(real.pid, real.start - 1))
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.errno, machine.calls()) == (errno.ESRCH, []), "the pid is another's now"
    monkeypatch.setattr(f"{__name__}.process_of", lambda machine: real)
    os.kill(real.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, real.pid, os.WSTOPPED | os.WNOWAIT)
    result = move(machine)
    os.kill(real.pid, signal.SIGCONT)
    assert isinstance(result, CheckpointError)
    assert (result.errno, machine.calls()) == (errno.EBUSY, [])
    assert "stopped" in str(result)
    monkeypatch.setenv("GGROUP_LIBCUDA", "/nowhere/libcuda.so.1")
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.errno, result.step) == (errno.ENODEV, Step.OPEN)
    whole(machine, ZERO)


def test_an_old_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A driver without the entry points is reported as that."""
    (tmp_path / "old.c").write_text("int cuInit(unsigned f) { return 0; }\n")
    old = tmp_path / "libold.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(old), str(tmp_path / "old.c")], check=True)
    monkeypatch.setenv("GGROUP_LIBCUDA", str(old))
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert result.errno == errno.EOPNOTSUPP
    assert "too old" in str(result)


def test_a_neighbour_takes_what_the_source_has_left(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot take the memory to which the program returns."""
    faulty(monkeypatch, machine, "cuMemCreate:2:grab0", "cuCheckpointProcessRestore:1:999")
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.errno, result.step, result.state) == (errno.EIO, Step.RESTORE, State.RUNNING)
    whole(machine, ZERO)


def test_a_neighbour_is_faster_on_the_target(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining race, between the release of the reservation and the restore, is reported as what it is."""
    faulty(monkeypatch, machine, "cuMemRelease:1:grab1")
    result = move(machine)
    assert isinstance(result, CheckpointError)
    assert (result.step, result.state, machine.state) == (Step.RESTORE, State.FAILED, State.FAILED)


# Waits


async def hung(machine: Machine) -> int:
    """Return the gate of the agent that hangs now."""
    return await trio.to_thread.run_sync(os.open, machine.directory / "hang", os.O_WRONLY)


async def told(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until the outcome of an abandoned agent is in the log."""
    while "has come back" not in caplog.text:
        await trio.lowlevel.checkpoint()


@pytest.mark.logs("move has come back .well., and the program is running")
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_an_agent_that_hangs_is_left_to_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    faulty(monkeypatch, machine, "cuCheckpointProcessRestore:1:hang")
    clock = trio.testing.MockClock(rate=0)
    seen: list[object] = []

    async def ask(scope: trio.CancelScope) -> None:
        with scope:
            try:
                await checkpoint.move(process_of(machine), ZERO, ONE, ROOM, LOCK_S)
            except CheckpointError as error:
                seen.append(error)

    async def act() -> None:
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, scope)
            gate = await hung(machine)
            [noted] = checkpoint.left()
            assert (noted.busy, noted.step, noted.place) == (True, Step.RESTORE, ONE)
            if how == "cancelled":
                scope.cancel()
            else:
                clock.jump(3600)
        if how == "deadline":
            [error] = seen
            assert isinstance(error, CheckpointError)
            assert (error.errno, error.state) == (errno.ETIMEDOUT, None)
            assert "restore: the driver does not come back" in str(error)
        else:
            assert not seen
        # It is still at work: no other agent may be, and the recovery waits for its end.
        with pytest.raises(CheckpointError) as refused:
            await checkpoint.move(process_of(machine), ZERO, ONE, ROOM, LOCK_S)
        assert refused.value.errno == errno.EBUSY
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint.recover, process_of(machine))
            os.close(gate)
        assert (machine.state, machine.place) == (State.RUNNING, ONE)
        await told(caplog)

    trio.run(act, clock=clock)
    whole(machine, ONE)


@pytest.mark.logs("suspend has come back .ready: it is not wanted any more.")
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_an_agent_that_asks_too_late_may_not(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The caller has frozen the program again, so it must not run because of an abandoned agent."""
    faulty(monkeypatch, machine, "cuInit:1:hang")
    clock = trio.testing.MockClock(rate=0)
    asked: list[None] = []

    async def ready() -> None:
        asked.append(None)

    async def suspend() -> None:
        with contextlib.suppress(CheckpointError):
            await checkpoint.suspend(process_of(machine), ZERO, ROOM, LOCK_S, ready)

    async def act() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(suspend)
            gate = await hung(machine)
            if how == "cancelled":
                nursery.cancel_scope.cancel()
            else:
                clock.jump(3600)
        os.close(gate)
        await told(caplog)

    trio.run(act, clock=clock)
    assert not asked
    assert machine.calls() == []
    whole(machine, ZERO)


@pytest.mark.logs("looked after", "move has come back .well., and the program is running")
def test_somebody_kills_an_agent_that_nobody_waits_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is recovered all the same."""
    faulty(monkeypatch, machine, "cuCheckpointProcessCheckpoint:1:hang")

    async def act() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint.move, process_of(machine), ZERO, ONE, ROOM, LOCK_S)
            gate = await hung(machine)
            nursery.cancel_scope.cancel()
        [(agent, _), *_] = machine.held()
        os.kill(agent, signal.SIGKILL)
        os.close(gate)
        await told(caplog)

    go(act)
    whole(machine, ZERO)


def test_the_agent_by_hand(machine: Machine) -> None:
    """Its input and output; half a request is invalid."""
    words = [sys.executable, "-m", "backend.nvidia.checkpoint"]
    half = subprocess.run(words, input=b'{"action": "move"', capture_output=True, env=interpreter.environment())
    assert half.returncode == 2
    assert b"no whole request" in half.stderr
    process = process_of(machine)
    asked = {"action": "state", "process": {"pid": process.pid, "start": process.start}}
    ran = subprocess.run(words, input=json.dumps(asked).encode() + b"\n", capture_output=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["progress"]["step"] for line in lines[:-1]] == ["open", "open", "state", "state"]
    assert lines[-1]["outcome"]["state"] == "RUNNING"
    assert machine.calls() == ["GetState"]
