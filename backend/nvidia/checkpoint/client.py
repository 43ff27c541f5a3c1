"""The daemon's side: starts an agent for each thing to do, hears how it goes, and sees to it that it is finished.

An agent is left alone whatever becomes of who asked: one that is given up goes on, unless it has yet to ask whether it
may; it is waited for by a task of its own, and what came of it is logged. One that is killed is followed at once by
another that makes the program run again.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs
import trio

from backend.common import interpreter
from backend.common.errors import errno_of
from backend.cuda.managed import Standby
from backend.nvidia.checkpoint.records import Action, Outcome, Progress, Request, State, Step, read_answer
from backend.process.identity import Process

log = logging.getLogger(__name__)

START_S = 30.0
"""For an agent to start, initialise the driver (2.7 s with eight GPUs), and make a context."""
BYTES_A_SECOND = 500_000_000
"""Checkpoint and restore together, at the slowest: 1.3 GB/s measured on an H200, 0.7 GB/s told of slow hosts."""
RECOVERIES = 3
"""Agents that try to make a program run, one after the other."""
Ready = Callable[[], Awaitable[None]]
"""Returns once a program may be acted on. OSError: it may not, and is left as it is."""
CLEAN = ("CUDA_", "LD_PRELOAD")
"""Begin the names of what agents do not inherit: they see all GPUs, and are no program of ours."""


@attrs.frozen
class Done:
    """What was asked for holds."""

    state: State
    """How the program is: running, or checkpointed where it was suspended."""
    place: str
    """UUID of the GPU that it is on; empty for none, or where that is not known."""
    milliseconds: Mapping[Step, float]
    """How long each step took, those that were done more than once together."""
    stall_ms: float | None
    """Milliseconds from when the lock was asked for until the program was unlocked; None where it was not both."""
    trouble: str = ""
    """What failed on the way, and was made good."""


class CheckpointError(OSError):
    """What was asked for does not hold. The errno is of the step that failed; the words say which, and why."""

    def __init__(self, outcome: Outcome, steps: Sequence[Progress]) -> None:
        super().__init__(outcome.errno, outcome.words)
        self.state = outcome.state
        """How the program is now; None where that is not known, or it has ended."""
        self.place = outcome.place
        """UUID of the GPU that it is on; empty for none, or where that is not known."""
        self.step = outcome.step
        """What failed."""
        self.milliseconds = _milliseconds(steps)
        """As :attr:`Done.milliseconds`."""
        self.stall_ms = _stall(steps)
        """As :attr:`Done.stall_ms`."""
        self.was_away = any(step.step is Step.CHECKPOINT and step.ms is not None and not step.errno for step in steps)
        """Whether it was off its GPUs, and what it has there is not what it had, wherever it is now."""


async def move(
    process: Process,
    source: str,
    target: str,
    room: int,
    lock_s: float,
    standby: Standby | None = None,
    carried: int = 0,
) -> Done:
    """Has a program that runs go from one GPU to another of the same model. `room` is what it needs there, in bytes,
    its context included. What else it may have on `target` changes places with it. One with the library is had to
    stand by, at the last moment, and `carried` are the bytes that it needs to be restored at all then; whoever asked
    lets it go on afterwards, whatever came of it. OSError:

    ENOSPC the target has not as much room; ETIMEDOUT the lock did not come in `lock_s` seconds, or the agent does not
    come back and is left to it; EOPNOTSUPP the driver cannot, or the GPUs differ; EBUSY it is stopped, frozen, or being
    moved or suspended; ENODEV there is no such GPU; EINVAL `room` is none, or it is on `target`; ESRCH it has ended;
    EIO anything else. Unless `state` of the :class:`CheckpointError` says something else the program runs on where it
    was.
    """
    lock_ms, asks = round(lock_s * 1e3), standby is not None
    request = Request(Action.MOVE, process, source, target, room, lock_ms, carried, asks)
    return await _ask(request, None if standby is None else standby.begin, standby)


async def suspend(process: Process, source: str, room: int, lock_s: float, ready: Ready) -> Done:
    """Has a program give up its GPU: its memory goes into the host, and it waits in its next call of CUDA. `room` is
    what it needs when that fails midway. `ready` is called at the last moment: on its return what the program has
    submitted comes to an end, which that of a frozen one does not. OSError as for :func:`move`, or from `ready`."""
    request = Request(Action.SUSPEND, process, source, "", room, round(lock_s * 1e3), asks=True)
    return await _ask(request, ready)


async def resume(process: Process, source: str, room: int, target: str = "") -> Done:
    """Has one that was suspended on `source` run there again, or on `target`. OSError as for :func:`move`; where there
    is no room (ENOSPC) it stays suspended."""
    return await _ask(Request(Action.RESUME, process, source, target, room))


async def recover(process: Process, source: str = "", target: str = "", room: int = 0) -> Done:
    """Has a program run that something was begun with, and nobody acts on any more: unlocked, or restored on `source`
    if it has room, else on `target`. What a dead agent has noted goes before these; without either, a program that is
    checkpointed stays so (EINVAL). Waits for an agent that lives. A program that was suspended is resumed by it."""
    return await _ask(Request(Action.RECOVER, process, source, target, room))


async def state(process: Process) -> State:
    """How the driver has it. OSError where it does not know the process."""
    return (await _ask(Request(Action.STATE, process))).state


@attrs.define(eq=False)
class Job:
    """A request, and what was heard of it."""

    request: Request
    """What was asked for."""
    ready: Ready | None = None
    """What is done before the program is acted on, where the request asks."""
    standby: Standby | None = None
    """How the program is had to stand by."""
    refused: OSError | None = None
    """Why it is not ready."""
    steps: list[Progress] = attrs.field(factory=list)
    """Of all agents that worked on it."""
    first: Outcome | None = None
    """What came of it, but for recoveries."""
    last: Outcome | None = None
    """What came of it in the end."""
    abandoned: bool = False
    """Nobody waits for it any more."""
    finished: trio.Event = attrs.field(factory=trio.Event)
    """Set at the end."""

    def result(self) -> Done:
        """What whoever asked is told. CheckpointError for a failure."""
        assert self.first is not None
        assert self.last is not None
        if self.refused is not None and (self.last.state is State.RUNNING or self.last.step is Step.READY):
            code, words = errno_of(self.refused), self.refused.strerror or str(self.refused)
            raise CheckpointError(attrs.evolve(self.last, errno=code, step=Step.READY, words=words), self.steps)
        first, last, action = self.first, self.last, self.request.action
        goes = action in (Action.MOVE, Action.RESUME)
        there = goes and last.state is State.RUNNING and last.place == self.request.destination
        if first.errno == 0 or there or (action is Action.RECOVER and last.errno == 0):
            assert last.state is not None
            return Done(last.state, last.place, _milliseconds(self.steps), _stall(self.steps), first.words)
        words = first.words if last.errno == 0 or last is first else f"{first.words}; then {last.words}"
        raise CheckpointError(attrs.evolve(first, state=last.state, place=last.place, words=words), self.steps)

    @property
    def at(self) -> str:
        """The step that it is in, or was in last."""
        return self.steps[-1].step.value if self.steps else "start"


async def _ask(request: Request, ready: Ready | None = None, standby: Standby | None = None) -> Done:
    job = Job(request, ready, standby)
    trio.lowlevel.spawn_system_task(_attend, job)
    seconds = START_S + request.lock_ms / 1e3 + request.room / BYTES_A_SECOND
    try:
        with trio.move_on_after(seconds):
            await job.finished.wait()
    finally:
        job.abandoned = not job.finished.is_set()
    if job.abandoned:
        words = f"{job.at}: the driver does not come back; the agent goes on by itself"
        raise CheckpointError(Outcome(None, "", errno.ETIMEDOUT, None, words), job.steps)
    return job.result()


async def _attend(job: Job) -> None:
    """Stays with a request until it is finished, whoever waits for that. A system task: ends with the daemon, and the
    agent then goes on without it."""
    pid = job.request.process.pid
    try:
        job.first = job.last = await _agent(job, job.request)
        for _ in range(RECOVERIES):
            if not _helpless(job.request.action, job.last):
                break
            log.warning("process %d: %s; it is looked after", pid, job.last.words)
            job.last = await _agent(job, attrs.evolve(job.request, action=Action.RECOVER, asks=False))
        if job.last.errno and job.last is not job.first:
            log.error("process %d: %s", pid, job.last.words)
    except Exception as error:
        log.exception("an agent for process %d", pid)
        job.first = job.last = Outcome(None, "", errno.EIO, None, str(error))
    if job.abandoned:
        log.warning(
            "process %d: %s has come back (%s), and the program is %s",
            *(pid, job.request.action.value, job.last.words or "well"),
            "gone, or unknown" if job.last.state is None else job.last.state.name.lower(),
        )
    if job.standby is not None:
        job.standby.over.set()
    job.finished.set()


def _helpless(action: Action, outcome: Outcome) -> bool:
    """Whether a program may have been left so that it waits for somebody."""
    if action is Action.STATE:
        return False
    if outcome.step is None and outcome.state is None:
        return True  # the agent died, or has a bug
    if outcome.errno == 0:
        return False
    back = action in (Action.MOVE, Action.SUSPEND)
    return outcome.state is State.LOCKED or (back and outcome.state is State.CHECKPOINTED)


async def _agent(job: Job, request: Request) -> Outcome:
    """Runs one agent to its end; its outcome, or one in its place."""
    environment = {name: value for name, value in interpreter.environment().items() if not name.startswith(CLEAN)}
    page = [job.standby.page] if job.standby is not None and request.asks else []
    try:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-m", "backend.nvidia.checkpoint", *map(str, page)],
            pass_fds=page,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        return Outcome(None, "", errno_of(error), Step.OPEN, f"no agent can be started: {error.strerror}")
    assert process.stdin is not None
    assert process.stdout is not None
    async with process.stdin, process.stdout:
        with contextlib.suppress(trio.BrokenResourceError):  # it has ended; how is told below
            await process.stdin.send_all(request.line())
        if not request.asks:
            await process.stdin.aclose()
        outcome = await _hear(job, process.stdout, process.stdin)
    status = await process.wait()  # also where it has answered: as long as it gives up its context the driver is slow
    if outcome is not None:
        return outcome
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return Outcome(None, "", errno.EIO, None, f"{job.at}: the agent {how}")


async def _hear(job: Job, answers: trio.abc.ReceiveStream, agent: trio.abc.SendStream) -> Outcome | None:
    """What an agent says, up to the outcome; None for one that ends without."""
    rest = b""
    async for some in answers:
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            try:
                answer = read_answer(line)
            except ValueError as error:  # it is not listened to any more, and followed by another once it has ended
                log.error("process %d: the agent says %r: %s", job.request.process.pid, line[:256], error)
                return None
            if isinstance(answer, Outcome):
                return answer
            job.steps.append(answer)
            if answer.step is Step.READY and answer.ms is None:
                await _be_ready(job, agent)
            if answer.step is Step.UNLOCK and answer.ms is not None and not answer.errno and job.standby:
                job.standby.end()
    return None


async def _be_ready(job: Job, agent: trio.abc.SendStream) -> None:
    """Lets an agent go on, once it may act on the program. It may not where nobody waits for that any more: whoever
    asked has been told that it failed, and goes by that."""
    assert job.ready is not None
    try:
        if not job.abandoned:
            await job.ready()
            await agent.send_all(b"go\n")
    except trio.BrokenResourceError:  # it has ended; how is told by it
        pass
    except OSError as error:
        job.refused = error
    await agent.aclose()


def _milliseconds(steps: Sequence[Progress]) -> Mapping[Step, float]:
    taken: dict[Step, float] = {}
    for step in steps:
        if step.ms is not None:
            taken[step.step] = taken.get(step.step, 0.0) + step.ms
    return taken


def _stall(steps: Sequence[Progress]) -> float | None:
    begun = [step.at for step in steps if step.step is Step.LOCK and step.ms is None]
    ended = [step.at for step in steps if step.step is Step.UNLOCK and step.ms is not None and not step.errno]
    return (ended[-1] - begun[0]) * 1e3 if begun and ended else None
