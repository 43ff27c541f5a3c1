"""Memory turns of gangs, on a machine with two GPUs: programs of two ranks that sum up by NCCL."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ggroupfs.client import Member
from tests.support.mounted import mounted, mountpoint
from tests.t7_nvidia.gangs import Watch, finish, pair
from tests.t7_nvidia.programs import slice_of

ROOM = 0.7
"""Room, as a fraction of what both programs hold on a GPU."""
WATCHED_S = 20.0
"""Time for which they are watched, seconds."""
STUCK_S = 10.0
"""Longest time of a step, whatever waits for its turn, seconds: NCCL gives up after minutes."""


@pytest.mark.timeout(400)
def test_two_programs_of_two_ranks(tmp_path: Path) -> None:
    """No program hangs, and all sums are right."""
    with (
        mountpoint() as path,
        mounted(path, "turns=on", gpu="nvidia") as mount,
        slice_of(mount, "gangs") as (name, slice_),
        pair(mount, tmp_path / "first", name) as first,
        pair(mount, tmp_path / "second", name) as second,
    ):
        runs = [*first, *second]
        on = [Member(0, gpu, slice_.path.parent / str(gpu)) for gpu in (0, 1)]
        for one in on:
            held = int(one.read("gmem.current"))
            (one.path / "gmem.limit.high").write_text(f"{int(held * ROOM)}\n")
        began = time.monotonic()
        watch = Watch(runs, began)
        while (now := time.monotonic()) < began + WATCHED_S:
            watch.look(now)
            time.sleep(0.01)
        turns = [one.flat("gcgroup.stat").get("memory_turns", 0) for one in on]
        print(f"steps {watch.done}, turns {turns}, longest step {watch.longest:.2f} s")
        assert watch.longest < STUCK_S
        assert all(watch.done)
        for ranks in (first, second):
            finish(ranks)
