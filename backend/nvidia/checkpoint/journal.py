"""The journal of checkpoints: a small file for each program that is acted on, removed when all is well.

The agent holds a lock on the file (flock(2)) as long as it lives, so there is never more than one agent for a
program. A file without a lock shows that an agent died, and what it was doing.
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
"""Environment variable that names another directory."""
DIRECTORY = "/run/ggroupfs/checkpoints"
SIZE = 4096
"""Maximum size of a file, bytes."""


@attrs.frozen
class Left:
    """A request that was begun, by an agent that is alive or dead, and how far it got."""

    request: Request
    """The request."""
    step: Step
    """The last step that was begun, of the steps that tell where the program is."""
    place: str
    """UUID of the GPU that the program is on if it is locked now."""
    busy: bool
    """Whether the agent lives. If not, the program waits for :func:`~backend.nvidia.checkpoint.client.recover`,
    or, if it was suspended, for `resume`.
    """


def directory() -> Path:
    """Return the directory of the files."""
    return Path(os.environ.get(VARIABLE) or DIRECTORY)


class Journal:
    """The file of one program, locked."""

    def __init__(self, process: Process, *, wait: bool) -> None:
        """Open and lock the file. Raises BlockingIOError where another agent has it, unless this one is to
        `wait` for its end.
        """
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
        """The entry of a dead agent; None if there is none."""
        self.written = self.before is not None
        """Whether the file has an entry."""

    def write(self, request: Request, step: Step, place: str) -> None:
        """Record a step that begins. It is one write(2), so the entry is there whole or not at all."""
        fields = {"request": request.line().decode(), "step": step.value, "place": place}
        self.written = True
        os.pwrite(self._fd, json.dumps(fields).encode().ljust(SIZE), 0)

    def close(self, *, keep: bool) -> None:
        """Close the file, and remove it unless its entry has to be kept for another agent."""
        if not keep:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)


def left() -> Sequence[Left]:
    """Return the entry of every living program whose request is under way or was not finished.

    Files of dead programs are removed, except where another process has the pid by now: an agent that acts on that
    program learns that it has ended, and then its file is :func:`removed`. Does not wait for any program
    (:mod:`backend.process.looks`).
    """
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
    """Remove the file of a process that has ended, if no agent has it."""
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
