"""Control of programs of colocated.py: starting them, and sending them commands."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import attrs
import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT, wait_for

LOAD, SECONDS = 0.35, 20.0
"""Fraction of a GPU's time that the requests take, on any GPU, and seconds for which they come."""


@attrs.define
class Colocated:
    """A running program of colocated.py."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, line: str) -> str:
        """Send a command; return the answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()

    def serve(self, rate: float, seconds: float) -> list[float]:
        """Return the latencies of requests from now on, at so many a second, in seconds."""
        return [float(one) for one in json.loads(self.ask(f"go {rate} {seconds}"))]

    @cached_property
    def rate(self) -> float:
        """Requests a second that are LOAD of the GPU, from the duration of a request at the first call, when the
        program must be alone on the GPU."""
        return LOAD / statistics.median(self.serve(10, 2))

    def latencies(self, seconds: float = SECONDS) -> list[float]:
        """Return the latencies at that rate. At the first call the program must be alone."""
        return self.serve(self.rate, seconds)

    def count(self) -> int:
        """Return the number of products done."""
        return int(self.ask("count"))


@contextmanager
def started(mount: Mounted, *words: str) -> Iterator[Colocated]:
    """Start a program on GPU 0, and wait until it is in the tree; it is ended by pid."""
    pytest.importorskip("torch")
    paths = [os.fspath(ROOT), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("colocated.py"), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths))},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_for((mount.group(process.pid) / "compute.priority").exists, "it is in the tree")
        yield Colocated(process)
    finally:
        process.kill()
        process.communicate()


def p99(latencies: Sequence[float]) -> float:
    return sorted(latencies)[int(0.99 * len(latencies))]
