"""Starts a process next to the daemon that aborts the connection of the mount if the daemon is killed.

SIGKILL does not end a thread that waits in the kernel for an answer of this daemon: the watchdog's question, or a
change of an events file. Nor does it end one that waits for a lock held by a program which itself waits for such an
answer: the message that a name is gone waits for the lock of its directory. Such a thread keeps /dev/fuse open, so the
kernel never learns that no answer will come, and neither side ends.

The guard is signalled when the main thread ends, which nothing can delay (PR_SET_PDEATHSIG, prctl(2): the parent is the
thread that made the process). The rest of the daemon then ends, and a manager that is to restart it notices.

A crash with a core dump is not covered: there the main thread itself waits for all others (fs/coredump.c).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import select
import subprocess
import sys
from collections.abc import Iterator

from ggroupfs.daemon import guarding

log = logging.getLogger(__name__)

START_S = 30.0
"""Seconds that the guard has to start; on an idle machine an interpreter starts in 20 ms."""


@contextlib.contextmanager
def beside(abort: int) -> Iterator[None]:
    """Run a guard for the duration of the context. `abort` is the open file that aborts a connection.

    The main thread enters this before anything on that connection is answered. If no process can be started, the daemon
    runs without a guard.
    """
    try:
        guard = _start(abort)
    except OSError as error:
        log.warning("no guard: %s: `ggroupfs umount --force` ends one that is killed and does not end", error.strerror)
        yield
        return
    try:
        yield
    finally:
        _end(guard)


def _start(abort: int) -> subprocess.Popen[bytes]:
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", guarding.__file__, str(abort)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[abort],  # no other descriptor: the guard outlives the daemon by a moment
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
