"""The guard's own program: acts when the thread that started it ends (:mod:`.guard`).

    guarding.py ABORT [MODULE MEMORY DAEMON PATH JOURNAL]

It writes to the file ABORT, then calls main(MEMORY, DAEMON, JOURNAL) of MODULE. ABORT, MEMORY and DAEMON are
descriptors, ABORT may be ``-``. PATH is where modules are found, JOURNAL the path of a file, or empty. This
file is executed by its path, in an interpreter that loads nothing else before: 4 MB of memory, and no CPU time while it
waits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SIGNAL = signal.SIGRTMIN
"""Signal that the kernel sends when the daemon's main thread ends."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
READY = 1
"""Descriptor of the pipe on which the daemon is told that the guard is ready."""


def main() -> int:
    """Wait for the end of the daemon's main thread. Exit code 1 if that cannot be detected."""
    # Block signals that a manager sends to every process of a service: the daemon ends the guard when it ends itself.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(SIGNAL), 0, 0, 0):
        return 1
    os.write(READY, b"\n")  # EPIPE if the daemon is already gone; having answered nothing, it keeps no program waiting
    os.close(READY)
    signal.sigwait([SIGNAL])
    try:
        if sys.argv[1] != "-":
            os.write(int(sys.argv[1]), b"1\n")
    finally:
        if sys.argv[2:]:
            _call(*sys.argv[2:])
    return 0


def _call(module: str, memory: str, daemon: str, path: str, journal: str) -> None:
    try:
        sys.path += path.split(os.pathsep)
        __import__(module)
        sys.modules[module].main(int(memory), int(daemon), journal)
    finally:
        os._exit(0)  # whatever failed, and whatever thread of it is still held up


if __name__ == "__main__":
    sys.exit(main())
