"""The handover from a daemon to its replacement: the words it is started with, and signals at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from ggroupfs.daemon import successor
from ggroupfs.daemon.mount import ENDS

SOCKET = Path("/run/ggroupfs/0:40.sock")

IN_BETWEEN = """
import os, signal
from ggroupfs.daemon import successor
ends = (signal.SIGTERM, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
for number in {came}: os.kill(os.getpid(), number)
print([int(number) for number in successor.take_over_signals(ends)])
os.kill(os.getpid(), signal.SIGTERM)  # ignored, since no handler is set yet
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.parametrize("came", [[], [15], [2, 15]])
def test_a_signal_in_between_is_not_lost(came: Sequence[int]) -> None:
    words = [sys.executable, "-c", IN_BETWEEN.format(came=came)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines() == [f"{came}", "set()"]


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["python", "-m", "ggroupfs", "mount", "-f", "/m"], ["-o", f"socket={SOCKET}"]),
        (["python", "-m", "ggroupfs", "mount", "-f", "/m", "-o", f"poll,socket={SOCKET}"], []),
        (["python", "-m", "ggroupfs", "mount", "-f", "/m", "-o", f"socket={SOCKET}"], []),
    ],
)
def test_it_is_started_with_the_same_words_on_the_same_socket(words: list[str], added: list[str]) -> None:
    """For any number of handovers; the signals that end it wait meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with mock.patch.object(sys, "orig_argv", words), mock.patch.object(os, "execv") as execute:
        try:
            successor.become_next(SOCKET, ENDS)
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | set(ENDS)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    execute.assert_called_once_with(sys.executable, [*words, *added])
