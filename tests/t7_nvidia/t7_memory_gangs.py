"""Memory turns of gangs, on a machine with two GPUs: programs of two ranks that sum up by NCCL."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted, mounted, mountpoint
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.programs import Program, program, run_in, slice_of

MIB_EACH = 4096
"""Memory of each rank besides that of NCCL, MiB."""
ROOM = 0.7
"""Room, as a fraction of what both programs hold on a GPU."""
WATCHED_S = 20.0
"""Time for which they are watched, seconds."""
STUCK_S = 10.0
"""Longest time of a step, whatever waits for its turn, seconds: NCCL gives up after minutes."""


@contextlib.contextmanager
def pair(mount: Mounted, within: str, meet: Path) -> Iterator[list[Program]]:
    """Run a program of two ranks, with one process and GPU each."""
    with contextlib.ExitStack() as stack:
        words = [*run_in(mount, within=within), sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "ranks.py")]
        runs = [
            stack.enter_context(program(*words, "PAGE", str(MIB_EACH), str(rank), os.fspath(meet))) for rank in (0, 1)
        ]
        wait_for(lambda: min(run.passes for run in runs) > 2, "both ranks work", seconds=120)
        yield runs


@pytest.mark.timeout(400)
def test_two_programs_of_two_ranks(tmp_path: Path) -> None:
    """No program hangs, and all sums are right."""
    with (
        mountpoint() as path,
        mounted(path, "turns=on", gpu="nvidia") as mount,
        slice_of(mount, "gangs") as (name, slice_),
        pair(mount, name, tmp_path / "first") as first,
        pair(mount, name, tmp_path / "second") as second,
    ):
        runs = [*first, *second]
        on = [Member(0, gpu, slice_.path.parent / str(gpu)) for gpu in (0, 1)]
        for one in on:
            held = int(one.read("gmem.current"))
            (one.path / "gmem.limit.high").write_text(f"{int(held * ROOM)}\n")
        began, steps, longest = time.monotonic(), [run.passes for run in runs], 0.0
        last, since = list(steps), [began] * len(runs)
        while (now := time.monotonic()) < began + WATCHED_S:
            for number, run in enumerate(runs):
                if run.passes != last[number]:
                    last[number], since[number] = run.passes, now
                longest = max(longest, now - since[number])
            time.sleep(0.01)
        turns = [one.flat("gcgroup.stat").get("memory_turns", 0) for one in on]
        done = [now - was for now, was in zip(last, steps, strict=True)]
        print(f"steps {done}, turns {turns}, longest step {longest:.2f} s")
        assert longest < STUCK_S
        assert all(done)
        for ranks in (first, second):
            ranks[0].set(24, 1)
            for run in ranks:
                assert run.process.wait(60) == 0
                assert run.u64(16) == 0
