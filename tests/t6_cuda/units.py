"""The unit tests of the library's memory code, in unit/: its own files with a double of daemon.c, in one program."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from subprocess import PIPE

from tests.t6_cuda.harness import CUDA_INCLUDE, HERE, OPTIONS, build

STEP_S = 0.2
"""Seconds that a step of a generator may take in addition (UNIT_STEPS)."""

TWO_GPUS = {"FAKE_DEVICES": "2", "FAKE_OFFSETS": "1"}
"""Environment of a double with a second GPU that can get access, and whose cuMemMap takes offsets."""

STACKS_S = 30.0
"""Seconds that a program that took too long gets to show the stacks of its threads."""

SECONDS = 240.0
"""Seconds that a test may take: some are built with a sanitizer, and the processors may be busy."""


@functools.cache
def build_unit(sanitize: str = "") -> Path:
    """Build the program; return the directory of that build."""
    at = build(sanitize)
    words = ["make", "-s", "-j2", "-C", str(HERE / "unit"), f"SANITIZE={sanitize}", f"CUDA_INCLUDE={CUDA_INCLUDE}"]
    made = subprocess.run(words, text=True, capture_output=True)
    assert made.returncode == 0, made.stdout + made.stderr
    return at


def attempt(name: str, sanitize: str = "", program: str = "unit", **extra: str) -> subprocess.CompletedProcess[str]:
    """Run one test of unit.c, or of another program there; return the outcome."""
    at = build_unit(sanitize)
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("GGROUP_", "FAKE_", "CUDA_", "UNIT_"))
    }
    environment = {**kept, "LD_LIBRARY_PATH": str(at / "fake"), "GGROUP_CUDA_POOL": "0", **OPTIONS, **extra}
    words = [str(at / "unit" / program), name]
    most = SECONDS + STEP_S * int(extra.get("UNIT_STEPS", 0))
    with subprocess.Popen(words, env=environment, text=True, stdout=PIPE, stderr=PIPE) as running:
        try:
            out, error = running.communicate(timeout=most)
        except subprocess.TimeoutExpired:
            # The generator shows the stack of each thread (unit/fuzz/watch.c); other programs just end.
            running.send_signal(signal.SIGQUIT)
            try:
                out, error = running.communicate(timeout=STACKS_S)
            except subprocess.TimeoutExpired:
                running.kill()
                out, error = running.communicate()
            error += f"\n{name}: not at its end after {most:.0f} s"
    return subprocess.CompletedProcess(words, running.returncode, out, error)


def run_unit(name: str, sanitize: str = "", program: str = "unit", **extra: str) -> str:
    """Run a test, which must succeed; return its output."""
    done = attempt(name, sanitize, program, **extra)
    assert done.returncode == 0, f"{name}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def calls(name: str, log: Path, program: str = "unit") -> Counter[str]:
    """Return how often a test calls each entry point of the driver."""
    run_unit(name, program=program, FAKE_LOG=str(log))
    return Counter(line.split()[0] for line in log.read_text(encoding="utf-8").splitlines())
