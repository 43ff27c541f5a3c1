"""The command, run to its end as a user runs it: its output, and its one line of complaint."""

from __future__ import annotations

import os
import subprocess
import sys

MIB = 1 << 20

ENDS_S = 300
"""Seconds after which a command counts as hung, however busy the machine is."""


def ggroupfs(*words: object, user: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
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
    """Run the command, which must succeed without a complaint; return its output."""
    result = ggroupfs(*words)
    assert (result.returncode, result.stderr) == (0, ""), result
    return result.stdout


def complaint(*words: object, code: int, user: int | None = None) -> str:
    """Run the command, which must fail with exactly one line on standard error; return the line."""
    result = ggroupfs(*words, user=user)
    assert result.returncode == code, result
    assert result.stdout == ""
    assert result.stderr.startswith("ggroupfs: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("ggroupfs: ").rstrip("\n")
