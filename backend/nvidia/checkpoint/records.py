"""What is asked of the agent and what it says, a line of JSON each, and what a :class:`Driver` is to it."""

from __future__ import annotations

import enum
import json
from collections.abc import Sequence
from typing import Any, Protocol

import attrs

from backend.common.errors import ERRNOS
from backend.process.identity import Process


class State(enum.Enum):
    """CUprocessState of cuda.h: how far a program is from running."""

    RUNNING = 0
    """It runs."""
    LOCKED = 1
    """It has all that it had, and its calls of CUDA wait."""
    CHECKPOINTED = 2
    """Its GPU memory is in its host memory, and it has nothing of any GPU; its calls of CUDA wait."""
    FAILED = 3
    """The driver gave it up: nothing brings it back."""


class Action(enum.Enum):
    """What can be asked for."""

    MOVE = "move"
    """From `source` to `target`."""
    SUSPEND = "suspend"
    """Off the GPU `source`, into its host memory."""
    RESUME = "resume"
    """Back, onto `target`, from where it was suspended, `source`."""
    RECOVER = "recover"
    """Make it run, wherever an agent that died has left it."""
    STATE = "state"
    """Say how it is."""


class Step(enum.Enum):
    """The parts of an action, in the order in which they come."""

    OPEN = "open"
    """The driver is initialised, the GPUs are looked at, a context for the reservations is made."""
    STATE = "state"
    """The driver says in which state the program is."""
    RESERVE = "reserve"
    """Room on the GPU where it goes is taken."""
    READY = "ready"
    """Whoever asked has the program stand by, or has one that was frozen run."""
    LOCK = "lock"
    """The program is stopped at its next call of CUDA, and what it has submitted is waited for."""
    CHECKPOINT = "checkpoint"
    """Its GPU memory goes into its host memory."""
    KEEP = "keep"
    """What it has freed where it was is taken, so that nobody closes the way back."""
    RELEASE = "release"
    """The room is given up, for it to take."""
    RESTORE = "restore"
    """It gets its memory where it is to be."""
    RETURN = "return"
    """It gets its memory back where it was: a way out."""
    UNLOCK = "unlock"
    """It runs on."""


@attrs.frozen
class Request:
    """One thing to do."""

    action: Action
    """What."""
    process: Process
    """To whom."""
    source: str = ""
    """UUID of the GPU that the program is on, or was on last; empty where it is not known."""
    target: str = ""
    """UUID of the GPU that it is to be on; empty for `source`."""
    room: int = 0
    """Bytes that it needs on a GPU, its context included."""
    lock_ms: int = 0
    """Milliseconds that the lock may take."""
    carried: int = 0
    """Of `room`, the bytes that it needs for the driver to restore it; 0: all of them."""
    asks: bool = False
    """Whether the agent asks before it acts on the program, so that somebody can have it stand by, or run. When it has
    locked one that is to be moved, it looks whether that still stands by."""

    @property
    def destination(self) -> str:
        """Where the program is to be."""
        return self.target or self.source

    @property
    def least(self) -> int:
        """Bytes without which nothing is to be restored."""
        return self.carried or self.room

    def line(self) -> bytes:
        """One line of JSON."""
        return _line(attrs.asdict(self) | {"action": self.action.value})

    @staticmethod
    def read(line: bytes) -> Request:
        """From such a line. ValueError for what is none."""
        fields = _fields(line)
        try:
            fields["action"] = Action(fields["action"])
            fields["process"] = Process(**fields["process"])
            return Request(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"no request: {error}") from None


@attrs.frozen
class Progress:
    """A step began, or ended."""

    step: Step
    """Which."""
    at: float
    """Seconds of CLOCK_MONOTONIC, which all processes of a machine share."""
    ms: float | None = None
    """How long it took; None where it begins."""
    errno: int = 0
    """How it failed, if it did."""
    words: str = ""
    """... in words, the driver's own where it was the driver."""

    def line(self) -> bytes:
        """One line of JSON."""
        return _line({"progress": attrs.asdict(self) | {"step": self.step.value}})


@attrs.frozen
class Outcome:
    """How it ended."""

    state: State | None
    """The state that the program was left in; None where it is not known, or the program is gone."""
    place: str
    """UUID of the GPU that it is on; empty for none, or where that is not known."""
    errno: int = 0
    """0 where what was asked for was done, else of the step that failed."""
    step: Step | None = None
    """Which that was."""
    words: str = ""
    """Why, the driver's own words where it was the driver."""

    def line(self) -> bytes:
        """One line of JSON."""
        state = None if self.state is None else self.state.name
        step = None if self.step is None else self.step.value
        return _line({"outcome": attrs.asdict(self) | {"state": state, "step": step}})


def read_answer(line: bytes) -> Progress | Outcome:
    """What a line of the agent's says. ValueError for what is none."""
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
    """What the machine needs of the driver. Every call blocks; OSError, with the driver's own words."""

    def open(self) -> None:
        """Comes before all others."""

    def gpus(self) -> Sequence[str]:
        """The UUIDs of all GPUs."""

    def model(self, gpu: str) -> str:
        """What kind of GPU that is: programs move between equal ones."""

    def prepare(self, gpu: str) -> None:
        """Does what reservations need, on any GPU, and what takes time: something on this one."""

    def reserve(self, gpu: str, nbytes: int) -> int:
        """Takes so much of a GPU's memory; what to release it by. OSError(ENOSPC) where it is not there."""

    def release(self, reservation: int) -> None:
        """Gives it back."""

    def state(self, pid: int) -> State:
        """How a program is. Waits for what is under way in it."""

    def lock(self, pid: int, ms: int) -> None:
        """Locks one that runs. OSError(ETIMEDOUT) after `ms` milliseconds; then it runs on."""

    def checkpoint(self, pid: int) -> None:
        """Takes one that is locked off its GPUs."""

    def restore(self, pid: int, places: Sequence[tuple[str, str]]) -> None:
        """Brings one that is checkpointed back, locked: from each GPU to another one, or where it was for no places.
        Without enough room there it is lost for good."""

    def unlock(self, pid: int) -> None:
        """Lets one that is locked run."""
