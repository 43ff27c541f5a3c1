"""The next daemon in the same process (execve(2)): how one becomes it, and what it finds of the signals meanwhile.

``ggroupfs upgrade`` tries what is installed first, and then sends SIGNAL.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NoReturn

SIGNAL = signal.SIGUSR2
"""The signal at which a daemon becomes what is installed now."""


def become_next(socket: Path, ends: Collection[signal.Signals]) -> NoReturn:
    """Executes what is installed now, with the same words, in place of this process, and on the same socket: programs
    have its path. The signals that end a daemon wait for the next one."""
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
    """Those that came while the one before became this one. They are ignored until a handler is set."""
    early = [number for number in signal.sigpending() if number in ends]
    for number in ends:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    return early
