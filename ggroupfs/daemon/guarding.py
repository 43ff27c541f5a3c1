"""The guard's own program, ``guarding.py FD``: writes to a file as the thread that started it ends (:mod:`.guard`).

It is executed by its path, in an interpreter that has nothing but this: 4 MB of memory, and no time while it waits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SIGNAL = signal.SIGRTMIN
"""Signal of the kernel's that the daemon's main thread is gone."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
READY = 1
"""Descriptor of the pipe on which the daemon hears that the guard is there."""


def main() -> int:
    """Wait for that end; 1 where it cannot be heard of."""
    # What a manager sends to each process of a service, too, waits: the daemon ends after that, and the guard with it.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(SIGNAL), 0, 0, 0):
        return 1
    os.write(READY, b"\n")  # EPIPE where the daemon is gone by now: nothing waits for it, as it served nothing
    os.close(READY)
    signal.sigwait([SIGNAL])
    os.write(int(sys.argv[1]), b"1\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
