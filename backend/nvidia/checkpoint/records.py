"""The messages between the daemon and an agent, one line of JSON each, and the driver calls that an agent needs."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from backend.common.errors import ERRNOS
from backend.process.identity import Process


class State(enum.Enum):
    """The states of a program (CUprocessState of cuda.h): how far it is from running."""

    RUNNING = 0
    """The program runs."""
    LOCKED = 1
    """The program has all its memory and objects, and its calls of CUDA wait."""
    CHECKPOINTED = 2
    """The program's GPU memory is in its host memory, and it has nothing on any GPU; its calls of CUDA wait."""
    FAILED = 3
    """The driver gave the program up: it cannot be brought back."""


class Action(enum.Enum):
    """The actions that can be requested."""

    MOVE = "move"
    """Move a program from `source` to `target`."""
    SUSPEND = "suspend"
    """Take a program off the GPU `source`, into its host memory."""
    RESUME = "resume"
    """Bring a program back onto `target`, after it was suspended on `source`."""
    RECOVER = "recover"
    """Make a program run, wherever a dead agent has left it."""
    STATE = "state"
    """Report the state of a program."""


class Step(enum.Enum):
    """The steps of an action, in their order."""

    OPEN = "open"
    """Initialise the driver, look at the GPUs, and make a context for the reservations."""
    STATE = "state"
    """Ask the driver for the program's state."""
    RESERVE = "reserve"
    """Reserve room on the GPU where the program goes."""
    READY = "ready"
    """Wait for the caller, which makes the program stand by, or lets a frozen one run."""
    LOCK = "lock"
    """Stop the program at its next call of CUDA, and wait for its submitted work."""
    CHECKPOINT = "checkpoint"
    """Move the program's GPU memory into its host memory."""
    KEEP = "keep"
    """Reserve what the program has freed where it was, so that the way back stays open."""
    RELEASE = "release"
    """Give the reservation up, for the program to take."""
    RESTORE = "restore"
    """Restore the program's memory where it has to be."""
    RETURN = "return"
    """Restore the program's memory where it was, after a failure."""
    UNLOCK = "unlock"
    """Let the program go on."""


@attrs.frozen
class Request:
    """A request to an agent."""

    action: Action
    """The action."""
    process: Process
    """The process of the program."""
    source: str = ""
    """UUID of the GPU that the program is on, or was on last; empty where it is not known."""
    target: str = ""
    """UUID of the GPU that the program has to be on; empty for `source`."""
    room: int = 0
    """Bytes that the program needs on a GPU, its context included."""
    lock_ms: int = 0
    """Time limit of the lock, milliseconds."""
    carried: int = 0
    """Part of `room`, in bytes, that the driver needs to restore the program; 0 for all of it."""
    asks: bool = False
    """Whether the agent asks before it acts on the program, so that the caller can make it stand by, or run. In a
    move, the agent checks after the lock that the program still stands by.
    """

    @property
    def destination(self) -> str:
        """UUID of the GPU where the program has to be."""
        return self.target or self.source

    @property
    def least(self) -> int:
        """Bytes without which the program must not be restored."""
        return self.carried or self.room

    def line(self) -> bytes:
        """Return the request as one line of JSON."""
        return _line(attrs.asdict(self) | {"action": self.action.value})

    @staticmethod
    def read(line: bytes) -> Request:
        """Return the request in a line of JSON. Raises ValueError where there is none."""
        fields = _fields(line)
        try:
            fields["action"] = Action(fields["action"])
            fields["process"] = Process(**fields["process"])
            return Request(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no request: {error}") from None


@attrs.frozen
class Progress:
    """The begin or end of a step."""

    step: Step
    """The step."""
    at: float
    """Time in seconds of CLOCK_MONOTONIC, which all processes of a machine share."""
    ms: float | None = None
    """Duration in milliseconds; None at the begin."""
    errno: int = 0
    """Errno of a failed step; 0 for success."""
    words: str = ""
    """Reason of the failure, in the driver's own words where it was the driver."""

    def line(self) -> bytes:
        """Return the progress as one line of JSON."""
        return _line({"progress": attrs.asdict(self) | {"step": self.step.value}})


@attrs.frozen
class Outcome:
    """The end of a request."""

    state: State | None
    """State that the program was left in; None where it is not known, or the program is gone."""
    place: str
    """UUID of the GPU that the program is on; empty for none, or where that is not known."""
    errno: int = 0
    """0 for success, else the errno of the step that failed."""
    step: Step | None = None
    """The step that failed."""
    words: str = ""
    """Reason of the failure, in the driver's own words where it was the driver."""

    def line(self) -> bytes:
        """Return the outcome as one line of JSON."""
        state = None if self.state is None else self.state.name
        step = None if self.step is None else self.step.value
        return _line({"outcome": attrs.asdict(self) | {"state": state, "step": step}})


def read_answer(line: bytes) -> Progress | Outcome:
    """Return the message in a line from an agent. Raises ValueError where there is none."""
    fields = _fields(line)
    answer: Progress | Outcome
    try:
        if (said := fields.get("progress")) is not None:
            answer = Progress(**(said | {"step": Step(said["step"])}))
        else:
            said = fields["outcome"]
            state = None if said["state"] is None else State[said["state"]]
            step = None if said["step"] is None else Step(said["step"])
            answer = Outcome(**(said | {"state": state, "step": step}))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"no answer: {error}") from None
    if type(answer.errno) is not int or (answer.errno and answer.errno not in ERRNOS):
        raise ValueError(f"no answer: {answer.errno!r} is no errno")
    return answer


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _fields(line: bytes) -> dict[str, Any]:
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError("no object")
    return fields


class Driver(Protocol):
    """The driver calls that the machine needs. Every call blocks, and raises OSError with the driver's own words."""

    def open(self) -> None:
        """Initialise the driver; called before all others."""

    def gpus(self) -> Sequence[str]:
        """Return the UUIDs of all GPUs."""

    def model(self, gpu: str) -> str:
        """Return the model of a GPU: programs move only between GPUs of one model."""

    def prepare(self, gpu: str) -> None:
        """Prepare reservations on any GPU, and do on this one whatever takes time."""

    def reserve(self, gpu: str, nbytes: int) -> int:
        """Reserve GPU memory; return what releases it. Raises OSError(ENOSPC) where there is not enough."""

    def release(self, reservation: int) -> None:
        """Release a reservation."""

    def state(self, pid: int) -> State:
        """Return the state of a program. Waits for what is under way in it."""

    def lock(self, pid: int, ms: int) -> None:
        """Lock a running program. Raises OSError(ETIMEDOUT) after `ms` milliseconds; the program then runs on."""

    def checkpoint(self, pid: int) -> None:
        """Take a locked program off its GPUs."""

    def restore(self, pid: int, places: Sequence[tuple[str, str]]) -> None:
        """Restore a checkpointed program, which stays locked. `places` gives the new GPU of each old one; empty
        for where it was. Without enough room there the program is lost for good.
        """

    def unlock(self, pid: int) -> None:
        """Let a locked program run."""
