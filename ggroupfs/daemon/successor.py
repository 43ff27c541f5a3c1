"""The next daemon in the same process (execve(2)): how a daemon becomes it, and what happens to signals in between.

``ggroupfs upgrade`` first tries the installed version, and then sends SIGNAL.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NoReturn

SIGNAL = signal.SIGUSR2
"""Signal at which a daemon is replaced by the installed version."""


def become_next(socket: Path, ends: Collection[signal.Signals]) -> NoReturn:
    """Execute the installed version in place of this process, with the same arguments and on the same socket.

    The socket stays because programs have its path. The signals that end a daemon are blocked until the next one runs.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    words = list(sys.orig_argv)
    option = f"socket={socket}"
    if not any(option in word.split(",") for word in words):
        words += ["-o", option]
    try:
        os.execv(sys.executable, words)
    except OSError as error:
        left = "what holds is left for the next mount"
        raise RuntimeError(f"mount: upgrade: {sys.executable}: {error.strerror}: {left}") from None


def take_over_signals(ends: Collection[signal.Signals]) -> Iterable[int]:
    """Return the signals that arrived during the replacement, and unblock them.

    They are ignored until a handler is set.
    """
    early = [number for number in signal.sigpending() if number in ends]
    for number in ends:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    return early
