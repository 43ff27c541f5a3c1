"""A process beside the daemon that aborts the connection of the mount where the daemon is killed.

SIGKILL does not end a thread that waits in the kernel for an answer of ours: the watchdog's question, or a change of an
events file. Nor one that waits for a lock of a program that does: a message that a name is gone waits for that of its
directory. Such a thread has /dev/fuse open, so the kernel never hears that no answer is to come, and neither ends. The
guard is told as the main thread ends, which nothing keeps (PR_SET_PDEATHSIG, prctl(2): the parent is the thread that
made the process). What is left of the daemon ends then, and a manager that is to restart it sees that.

A crash whose core is dumped is not covered: the main thread itself waits then for all others (fs/coredump.c).
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
"""Seconds that the guard has to be there: an interpreter starts in 20 ms where the machine has nothing else to do."""


@contextlib.contextmanager
def beside(abort: int) -> Iterator[None]:
    """Have a guard meanwhile, which has the file open that aborts a connection. To be entered by the main thread,
    before anything is answered on that connection. Where there is no room for a process it is done without."""
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
        pass_fds=[abort],  # and no other of ours: it outlives us by a moment
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
