"""A process beside the daemon that aborts the connection of the mount as the daemon ends, however that ends.

SIGKILL does not end a thread that waits in the kernel for a lock: a message that an entry is gone waits for that of a
directory, which a program has that waits for an answer of ours. That thread has /dev/fuse open, so the kernel never
hears that no answer is to come, and neither ends. The guard is told as the main thread ends, which nothing keeps
(PR_SET_PDEATHSIG, prctl(2): the parent is the thread that made the process). What is left of the daemon ends then, and
a manager that restarts it sees that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

SIGNAL = signal.SIGRTMIN
"""Tells the guard that the daemon's main thread is gone: none that a manager, or a terminal, sends to all of a group."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PROGRAM = f"""
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_IGN)
if os.getppid() == int(sys.argv[2]):
    signal.sigwait([{int(SIGNAL)}])
os.write(int(sys.argv[1]), b"1\\n")
"""
"""What it runs: an interpreter without our packages, 8 MB. A connection that has ended takes no harm."""

_libc = ctypes.CDLL(None)


def _prepare() -> None:
    """In the guard, before it executes: the signal waits until it is asked for, which exec leaves as it is."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
    _libc.prctl(PR_SET_PDEATHSIG, int(SIGNAL), 0, 0, 0)


def start(abort: int) -> subprocess.Popen[bytes]:
    """Start the guard of a connection, whose file to abort it with is open as `abort`. It is called by the main thread,
    and the guard ends with that. OSError."""
    words = [sys.executable, "-I", "-S", "-c", PROGRAM, str(abort), str(os.getpid())]
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[abort],
        preexec_fn=_prepare,
        cwd="/",
    )


def end(guard: subprocess.Popen[bytes]) -> None:
    """Have the guard of a connection that was ended do nothing more."""
    guard.kill()
    guard.wait()
