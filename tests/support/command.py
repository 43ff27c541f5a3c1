"""The command, run to its end as a user runs it: what it prints, and its one line of complaint."""

from __future__ import annotations

import os
import subprocess
import sys

MIB = 1 << 20

ENDS_S = 300
"""Seconds in which a command has ended that does not hang, however busy the machine is."""


def ggroupfs(*words: object, user: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "ggroupfs", *map(str, words)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=ENDS_S,
        user=user,
        env=os.environ | environment,
        check=False,
    )


def ok(*words: object) -> str:
    """Runs the command, which succeeds and has nothing to complain of; what it printed."""
    result = ggroupfs(*words)
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


def complaint(*words: object, code: int, user: int | None = None) -> str:
    """Runs the command, which fails with one line on standard error and nothing else; the line."""
    result = ggroupfs(*words, user=user)
    assert result.returncode == code, result
    assert result.stdout == ""
    assert result.stderr.startswith("ggroupfs: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("ggroupfs: ").rstrip("\n")
