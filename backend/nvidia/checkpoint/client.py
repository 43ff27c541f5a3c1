"""The daemon's side of checkpoints: start an agent for each request, follow its steps, and make sure that it
finishes.

An agent goes on whatever becomes of its caller: one that was abandoned goes on too, unless it has yet to ask whether
it may. A task of its own waits for it and logs the outcome. An agent that is killed is followed at once by another
one, which makes the program run again.
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
from backend.cuda.migrations import Standby
from backend.nvidia.checkpoint.records import Action, Outcome, Progress, Request, State, Step, read_answer
from backend.process.identity import Process

log = logging.getLogger(__name__)

START_S = 30.0
"""Seconds for an agent to start, initialise the driver (2.7 s with eight GPUs), and make a context."""
BYTES_A_SECOND = 500_000_000
"""Slowest rate of checkpoint and restore together: 1.3 GB/s measured on an H200, 0.7 GB/s reported of slow hosts."""
RECOVERIES = 3
"""Agents that try to make a program run, one after the other."""
Ready = Callable[[], Awaitable[None]]
"""Returns once a program may be acted on. Raises OSError if it may not; then it is left as it is."""
CLEAN = ("CUDA_", "LD_PRELOAD")
"""Prefixes of the variables that agents do not inherit: an agent sees all GPUs, and does not load our library."""


@attrs.frozen
class Done:
    """The result of a request that succeeded."""

    state: State
    """State of the program: running, or checkpointed where it was suspended."""
    place: str
    """UUID of the GPU that it is on; empty for none, or where that is not known."""
    milliseconds: Mapping[Step, float]
    """Duration of each step, repeated steps added up."""
    stall_ms: float | None
    """Milliseconds from the request for the lock to the unlock of the program; None unless both happened."""
    trouble: str = ""
    """What failed on the way and was repaired; empty for nothing."""


class CheckpointError(OSError):
    """A request that failed. The errno is that of the failed step; the message names the step and the reason."""

    def __init__(self, outcome: Outcome, steps: Sequence[Progress]) -> None:
        super().__init__(outcome.errno, outcome.words)
        self.state = outcome.state
        """State of the program now; None where that is not known, or it has ended."""
        self.place = outcome.place
        """UUID of the GPU that it is on; empty for none, or where that is not known."""
        self.step = outcome.step
        """The step that failed."""
        self.milliseconds = _milliseconds(steps)
        """As :attr:`Done.milliseconds`."""
        self.stall_ms = _stall(steps)
        """As :attr:`Done.stall_ms`."""
        self.was_away = any(step.step is Step.CHECKPOINT and step.ms is not None and not step.errno for step in steps)
        """Whether the program was off its GPUs, so that its GPU objects are new wherever it is now."""


async def move(
    process: Process,
    source: str,
    target: str,
    room: int,
    lock_s: float,
    standby: Standby | None = None,
    carried: int = 0,
) -> Done:
    """Move a running program from one GPU to another of the same model; whatever it has on `target` changes places.

    `room` is what it needs there, in bytes, its context included. A program with the library is made to stand by at
    the last moment (`standby`); `carried` are the bytes that the driver then needs to restore it, and the caller lets
    it go on afterwards, whatever the result. Raises OSError, usually as :class:`CheckpointError`:

    ENOSPC: the target has less room than that. ETIMEDOUT: the lock did not come within `lock_s` seconds, or the agent
    does not return and is left to itself. EOPNOTSUPP: the driver cannot do it, or the GPUs differ. EBUSY: the program
    is stopped, frozen, or being moved or suspended. ENODEV: there is no such GPU. EINVAL: `room` is 0, or the program
    is on `target`. ESRCH: the program has ended. EIO: anything else. Unless `state` of the error says otherwise, the
    program runs on where it was.
    """
    lock_ms, asks = round(lock_s * 1e3), standby is not None
    request = Request(Action.MOVE, process, source, target, room, lock_ms, carried, asks)
    return await _ask(request, None if standby is None else standby.begin, standby)


async def suspend(process: Process, source: str, room: int, lock_s: float, ready: Ready) -> Done:
    """Suspend a program: its memory goes from its GPU into the host, and it waits in its next call of CUDA.

    `room` is what it needs, in bytes, to go back if this fails midway. `ready` is called at the last moment; after
    its return the program's submitted work has to come to an end, which it does not while the program is frozen.
    Raises OSError as :func:`move`, or from `ready`.
    """
    request = Request(Action.SUSPEND, process, source, "", room, round(lock_s * 1e3), asks=True)
    return await _ask(request, ready)


async def resume(process: Process, source: str, room: int, target: str = "") -> Done:
    """Resume a program that was suspended on `source`, there or on `target`. Raises OSError as :func:`move`;
    without room (ENOSPC) it stays suspended.
    """
    return await _ask(Request(Action.RESUME, process, source, target, room))


async def recover(process: Process, source: str = "", target: str = "", room: int = 0) -> Done:
    """Make a program run that an action was begun on and that no agent acts on any more.

    It is unlocked, or restored on `source` if there is room, else on `target`. The notes of a dead agent take
    precedence over these; without either, a checkpointed program stays so (EINVAL). Waits for an agent that is still
    alive. A suspended program is resumed. Raises OSError as :func:`move`.
    """
    return await _ask(Request(Action.RECOVER, process, source, target, room))


async def state(process: Process) -> State:
    """Return the state of a program according to the driver. Raises OSError where the driver does not
    know the process.
    """
    return (await _ask(Request(Action.STATE, process))).state


@attrs.define(eq=False)
class Job:
    """A request, with all that was heard about it."""

    request: Request
    """The request."""
    ready: Ready | None = None
    """Called before the program is acted on, if the request asks first."""
    standby: Standby | None = None
    """The means by which the program is made to stand by."""
    refused: OSError | None = None
    """The reason why the program is not ready."""
    steps: list[Progress] = attrs.field(factory=list)
    """Steps of all agents that worked on the request."""
    first: Outcome | None = None
    """Outcome of the first agent, before any recovery."""
    last: Outcome | None = None
    """Outcome of the last agent."""
    abandoned: bool = False
    """Whether the caller no longer waits."""
    finished: trio.Event = attrs.field(factory=trio.Event)
    """Set once the request is finished."""

    def result(self) -> Done:
        """Return the result for the caller. Raises CheckpointError for a failure."""
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
        """The current or last step."""
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
    """Attend to a request until it is finished, whether or not a caller waits. This is a system task: it ends with
    the daemon, and the agent then goes on without it.
    """
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
    """Return whether a program may have been left waiting for help."""
    if action is Action.STATE:
        return False
    if outcome.step is None and outcome.state is None:
        return True  # the agent died, or has a bug
    if outcome.errno == 0:
        return False
    back = action in (Action.MOVE, Action.SUSPEND)
    return outcome.state is State.LOCKED or (back and outcome.state is State.CHECKPOINTED)


async def _agent(job: Job, request: Request) -> Outcome:
    """Run one agent to its end; return its outcome, or a substitute if it gave none."""
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
    status = await process.wait()  # even after its outcome: while it gives up its context the driver is slow
    if outcome is not None:
        return outcome
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return Outcome(None, "", errno.EIO, None, f"{job.at}: the agent {how}")


async def _hear(job: Job, answers: trio.abc.ReceiveStream, agent: trio.abc.SendStream) -> Outcome | None:
    """Record the steps that an agent reports, and return its outcome; None if it ends without one."""
    rest = b""
    async for some in answers:
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            try:
                answer = read_answer(line)
            except ValueError as error:  # this agent is ignored from now on, and replaced once it has ended
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
    """Let an agent go on once it may act on the program. It may not if the caller no longer waits: the caller was
    told that the request failed, and acts on that.
    """
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
