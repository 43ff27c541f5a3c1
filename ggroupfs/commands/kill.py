"""A signal to a process that was chosen on the screen of ``ggroupfs top``: to that very process or to none.

A pidfd is opened when the question is asked. When it is answered, the process of that pidfd has to be the one that the
tree speaks of: it has not ended, and started when the daemon says that its process did. So a pid that was recycled,
before the question or after it, is sent nothing.
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
"""What is asked."""
YES = frozenset(("y", "yes"))
"""Answers that mean SIGTERM."""


@attrs.frozen
class Victim:
    """A process that is to be sent a signal."""

    use: ProcessUse
    """What was on the screen."""
    pidfd: int
    """The process that had its pid when the question was asked."""

    def __str__(self) -> str:
        user = f" of {self.use.user}" if self.use.user else ""
        return readable(f"{self.use.pid} {self.use.command}{user}")

    def close(self) -> None:
        """Closes the pidfd."""
        os.close(self.pidfd)


def seize(use: ProcessUse) -> Victim:
    """Return the process, held by a pidfd. Waits for nothing. RuntimeError where there is none, or where this user may
    not send it a signal.
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
    """Send the signal that was answered, and say so: an action, in a thread that may wait. UsageError for an answer
    that is none, RuntimeError where it is not that process any more, or may not be sent one. The pidfd is closed.
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
    """RuntimeError, unless the pidfd is of the process that the tree speaks of. OSError."""
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
