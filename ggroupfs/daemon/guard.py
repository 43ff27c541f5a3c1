"""Starts a process next to the daemon that acts if the daemon is killed: it aborts the connection of the mount.

It also puts programs that wait for their turn back on the runlist of their GPU: they would stand still otherwise.

SIGKILL does not end a thread that waits in the kernel for an answer of this daemon: the watchdog's question, or a
change of an events file. Nor does it end one that waits for a lock held by a program which itself waits for such an
answer: the message that a name is gone waits for the lock of its directory. Such a thread keeps /dev/fuse open, so the
kernel never learns that no answer will come, and neither side ends.

What is to be put back stands in memory that the guard shares (:mod:`backend.nvidia.waiting`). It loads the module that
knows how to do it only then.

The guard is signalled when the main thread ends, which nothing can delay (PR_SET_PDEATHSIG, prctl(2): the parent is the
thread that made the process). The rest of the daemon then ends, and a manager that is to restart it notices.

A crash with a core dump is not covered: there the main thread itself waits for all others (fs/coredump.c).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

import backend
from ggroupfs.daemon import guarding

log = logging.getLogger(__name__)

START_S = 30.0
"""Seconds that the guard has to start; on an idle machine an interpreter starts in 20 ms."""


@attrs.frozen
class Left:
    """What a killed daemon leaves, for its guard to put back."""

    module: str
    """Module whose main() does so, called with the descriptors of the memory and of the daemon (a pidfd), and the
    journal."""
    memory: int
    """Descriptor of the memory in which it stands."""
    journal: Path | None = None
    """File that the next daemon takes: from then on nothing is put back."""


@contextlib.contextmanager
def beside(abort: int | None, left: Left | None = None) -> Iterator[None]:
    """Run a guard for the duration of the context. `abort` is the open file that aborts a connection, if there is one.

    The main thread enters this before anything on that connection is answered. If no process can be started, the daemon
    runs without a guard; if there can be no pidfd of the daemon, the guard puts nothing back.
    """
    try:
        guard = _start(abort, left)
    except OSError as error:
        log.warning("no guard: %s: `ggroupfs umount --force` ends one that is killed and does not end", error.strerror)
        yield
        return
    try:
        yield
    finally:
        _end(guard)


def path() -> str:
    """Return the folders in which the guard's interpreter finds modules, as PYTHONPATH has them."""
    return os.pathsep.join([os.fspath(Path(backend.__file__).parents[1]), *filter(None, sys.path)])


def _start(abort: int | None, left: Left | None) -> subprocess.Popen[bytes]:
    words, given = ["-" if abort is None else str(abort)], [] if abort is None else [abort]
    with contextlib.ExitStack() as stack:
        if left is not None:
            try:
                daemon = os.pidfd_open(os.getpid())
            except OSError as error:
                if abort is None:
                    raise  # there is nothing else to do for a guard
                log.warning("programs that wait stand still if the daemon is killed: no pidfd: %s", error.strerror)
            else:
                stack.callback(os.close, daemon)
                given += [left.memory, daemon]
                journal = "" if left.journal is None else os.path.abspath(left.journal)
                words += [left.module, str(left.memory), str(daemon), path(), journal]
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guarding.__file__, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=given,  # no other descriptor: the guard outlives the daemon by a moment
            start_new_session=True,  # a terminal stops and kills groups of processes
            cwd="/",
        )
    assert guard.stdout is not None
    with guard.stdout as ready:
        poller = select.poll()
        poller.register(ready, select.POLLIN)
        if poller.poll(START_S * 1000) and ready.read(1):
            return guard
    _end(guard)
    raise OSError(errno.ECHILD, f"the process beside the daemon is not there within {START_S:.0f} s, or has ended")


def _end(guard: subprocess.Popen[bytes]) -> None:
    guard.kill()
    guard.wait()
