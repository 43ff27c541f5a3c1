"""Sends a signal to the process selected in ``ggroupfs top``, and never to another process that has taken its pid.

A pidfd is opened when the question is asked. When it is answered, the process of that pidfd must be the one in the
tree: it has not ended, and it started at the time that the daemon gives for its process. So a pid that was recycled,
before or after the question, is sent nothing.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import attrs

from backend.process import procfs
from backend.process.identity import has_exited
from ggroupfs.client import content
from ggroupfs.errors import UsageError
from ggroupfs.view.columns import readable
from ggroupfs.view.snapshot import NOT_KNOWN, ProcessUse

QUESTION = "end it? yes (TERM), or a signal: KILL, INT"
"""Question to the user."""
COMMAND_MOST = 40
"""Characters of a command that a question shows."""

YES = frozenset(("y", "yes"))
"""Answers that mean SIGTERM."""


@attrs.frozen
class Victim:
    """A process that is to be sent a signal."""

    use: ProcessUse
    """Process as it was on the screen."""
    pidfd: int
    """Process that had this pid when the question was asked."""

    def __str__(self) -> str:
        user = f" of {self.use.user}" if self.use.user else ""
        command = self.use.command  # with -c arbitrarily long, and the question comes behind it
        if len(command) > COMMAND_MOST:
            command = f"{command[: COMMAND_MOST - 1]}…"
        return readable(f"{self.use.pid} {command}{user}")

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.pidfd)


def seize(use: ProcessUse) -> Victim:
    """Return the process, held by a pidfd, without waiting for anything.

    RuntimeError if there is no such process, or this user may not send it a signal.
    """
    if use.slice == NOT_KNOWN:
        raise RuntimeError(f"{use.pid} is another process's pid here, or none: the tree is of another pid namespace")
    try:
        pidfd = os.pidfd_open(use.pid)
    except ProcessLookupError:
        raise RuntimeError(f"{use.pid} has ended") from None
    except OSError as error:
        raise RuntimeError(f"{use.pid}: no pidfd of it: {error.strerror}") from None
    victim = Victim(use, pidfd)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except OSError as error:
        victim.close()
        raise RuntimeError(f"{victim}: no signal can be sent to it: {error.strerror}") from None
    return victim


def send(victim: Victim, mount: Path, directory: str, answer: str) -> str:
    """Send the signal that the answer names, close the pidfd, and report in words.

    An action, for a thread that may wait.

    UsageError for an invalid answer. RuntimeError if the pid is another process's by now, or no signal may be sent.
    """
    try:
        number = _signal(answer)
        _check(victim, mount, directory)
        signal.pidfd_send_signal(victim.pidfd, number)
    except OSError as error:
        raise RuntimeError(f"{victim}: nothing was sent: {error.strerror}") from None
    finally:
        victim.close()
    return f"{victim}: {number.name} was sent"


def _signal(answer: str) -> signal.Signals:
    if answer.lower() in YES:
        return signal.SIGTERM
    name = answer.upper().removeprefix("SIG")
    try:
        return signal.Signals[f"SIG{name}"]
    except KeyError:
        raise UsageError(f"{answer}: neither yes nor a signal: nothing was sent") from None


def _check(victim: Victim, mount: Path, directory: str) -> None:
    """Raise RuntimeError unless the pidfd is that of the process in the tree. OSError."""
    gone = RuntimeError(f"{victim} has ended: nothing was sent")
    try:
        told = dict(line.split(" ", 1) for line in content(mount / directory / "gcgroup.record").splitlines())
        if (mount / str(victim.use.pid)).stat().st_ino != victim.use.inode:
            raise gone
        started = procfs.stat(victim.use.pid).start
    except (FileNotFoundError, ProcessLookupError):
        raise gone from None
    if has_exited(victim.pidfd):
        raise gone
    if told.get("start") != str(started):
        raise RuntimeError(f"{victim}: that pid is another process's now: nothing was sent")
