"""Which programs are being acted on, by whom, and how far that went: one small file each, gone when all is well.

The agent holds a lock on the file (flock(2)) as long as it lives, so that there is never more than one for a program,
and whoever finds the file without the lock knows that an agent died, and what it was doing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path

import attrs

from backend.nvidia.checkpoint.records import Request, Step
from backend.process.identity import Process, is_borne

VARIABLE = "GGROUP_CHECKPOINTS"
"""Environment: another directory."""
DIRECTORY = "/run/ggroupfs/checkpoints"
SIZE = 4096
"""Bytes of a file at most."""


@attrs.frozen
class Left:
    """What an agent, alive or dead, was asked for, and what came of it so far."""

    request: Request
    """What."""
    step: Step
    """The last that it began of those that tell where the program is."""
    place: str
    """UUID of the GPU that the program is on when it is locked now."""
    busy: bool
    """Whether the agent lives. If not, the program waits for :func:`~backend.nvidia.checkpoint.client.recover`, or,
    where it was suspended, for `resume`."""


def directory() -> Path:
    """Where the files are."""
    return Path(os.environ.get(VARIABLE) or DIRECTORY)


class Journal:
    """The file of one program, locked."""

    def __init__(self, process: Process, *, wait: bool) -> None:
        """Takes it. BlockingIOError where another agent has it and this one shall not `wait` for its end."""
        directory().mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = directory() / _name(process)
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, how)
            except BlockingIOError:
                os.close(self._fd)
                raise BlockingIOError(errno.EBUSY, "it is being moved or suspended already") from None
            if _same(self._fd, self._path):
                break
            os.close(self._fd)  # it was removed by the agent that had it
        self.before = _read(self._fd, process)
        """What a dead agent has left."""
        self.written = self.before is not None
        """Whether it says anything."""

    def write(self, request: Request, step: Step, place: str) -> None:
        """Notes a step that begins: one write(2), so that it is there whole or not at all."""
        fields = {"request": request.line().decode(), "step": step.value, "place": place}
        self.written = True
        os.pwrite(self._fd, json.dumps(fields).encode().ljust(SIZE), 0)

    def close(self, *, keep: bool) -> None:
        """Lets go of it, and removes it unless somebody is to `keep` in mind how the program was left."""
        if not keep:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


def left() -> Sequence[Left]:
    """Every living program that something is being done to, or was not finished. Files of the dead are removed, but for
    one whose pid another bears by now: who acts on it hears that it has ended, and has its file :func:`removed`. Waits
    for nobody (:mod:`backend.process.looks`)."""
    found = []
    for path in sorted(directory().glob("[0-9]*.[0-9]*")):
        pid, _, start = path.name.partition(".")
        process = Process(int(pid), int(start))
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            busy = not _free(fd)
            entry = _read(fd, process)
            if not busy and not is_borne(process.pid) and _same(fd, path):
                path.unlink(missing_ok=True)
            elif entry is not None:
                found.append(attrs.evolve(entry, busy=busy))
        finally:
            os.close(fd)
    return found


def removed(process: Process) -> None:
    """It has ended: its file goes, if no agent has it."""
    path = directory() / _name(process)
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if _free(fd) and _same(fd, path):
                path.unlink(missing_ok=True)
        finally:
            os.close(fd)


def _name(process: Process) -> str:
    return f"{process.pid}.{process.start}"


def _free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _same(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _read(fd: int, process: Process) -> Left | None:
    try:
        fields = json.loads(os.pread(fd, SIZE, 0))
        request = Request.read(fields["request"].encode())
        if request.process != process:
            return None
        return Left(request, Step(fields["step"]), fields["place"], busy=False)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # empty: it was not begun
