"""Starts programs of colocated.py, and asks them."""

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
"""The part of a GPU's time that requests take, whatever GPU it is, and for how long they come."""


@attrs.define
class Colocated:
    """A program of colocated.py."""

    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, line: str) -> str:
        """What it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()

    def serve(self, rate: float, seconds: float) -> list[float]:
        """Latencies of its requests from now on, so many a second; seconds."""
        return [float(one) for one in json.loads(self.ask(f"go {rate} {seconds}"))]

    @cached_property
    def rate(self) -> float:
        """Requests a second that are LOAD of the GPU: by what one takes when it is asked for first, with nobody beside
        it."""
        return LOAD / statistics.median(self.serve(10, 2))

    def latencies(self, seconds: float = SECONDS) -> list[float]:
        """... at that rate. The first time it has to be alone."""
        return self.serve(self.rate, seconds)

    def count(self) -> int:
        """Products done."""
        return int(self.ask("count"))


@contextmanager
def started(mount: Mounted, *words: str) -> Iterator[Colocated]:
    """A program on GPU 0, in the tree; ended by pid."""
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
