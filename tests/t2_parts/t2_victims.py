"""Processes that may be killed for the memory of a GPU, what may do that, and those that are spared: real ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from backend.process import procfs
from tests.support.mounted import eventually

Spawn = Callable[..., subprocess.Popen[bytes]]

ROOT = Path(__file__).parents[2]
OTHER = 65534
"""A user that is not root."""
AS_OTHER = ("setpriv", "--reuid", str(OTHER), "--regid", str(OTHER), "--clear-groups")
"""Words before a command that have that user run it."""

KILL = """
import sys, trio
from backend.process.exits import ExitWatch
from backend.process.identity import identify

async def main():
    watch, process = ExitWatch(lambda process: None), identify(int(sys.argv[1]))
    await watch.watch(process)
    watch.signal(process, 9)

trio.run(main)
"""
"""Program that kills a process as the daemon does."""


# What may do that


def test_the_capabilities_of_the_service_let_it_kill_a_process_of_another_user(spawn: Spawn) -> None:
    """What a daemon may do as the packaged unit starts it, and not only as root that has all of them."""
    (line,) = (
        line
        for line in (ROOT / "systemd" / "ggroupfs.service").read_text(encoding="utf-8").splitlines()
        if line.startswith("CapabilityBoundingSet=")
    )
    granted = [f"+{word.removeprefix('CAP_').lower()}" for word in line.partition("=")[2].split()]
    victim = spawn(*AS_OTHER, "sleep", "600")
    eventually(lambda: procfs.command(victim.pid) == "sleep", "it runs as the other user")
    words = ["setpriv", "--bounding-set", ",".join(["-all", *granted]), sys.executable, "-c", KILL, str(victim.pid)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert victim.wait(60) == -9
