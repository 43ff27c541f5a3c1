"""Memory that another GPU of the program uses as well, on a machine with two: it moves, and what is read is right."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from ggroupfs.client import Member
from tests.support.mounted import mounted, mountpoint
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.gangs import Watch, finish, pair
from tests.t7_nvidia.programs import GIB, Program, current, held, program, run_in, write
from tests.t7_nvidia.trained import Rewritten, rewrite

MIB_BOTH = 8192
"""MiB of the program, half of them on each GPU."""
MAPPED = 2
"""GiB of a GPU's memory that is left on it: less than the program has there."""
STEPS = 3
"""In which all is read over NVLink or PCIe, wherever it is."""
PART = (0.55, 0.65)
"""Of what a program has, that a limit is: 60 %, but another one each time."""
ENDURANCE_S = float(os.environ.get("GGROUP_PEERS_S", "300"))
"""Seconds for which limits are rewritten."""
STUCK_S = 20.0
"""Longest time of a step, seconds: NCCL gives up after minutes."""
PEERS = (sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "peers.py"), "PAGE", str(MIB_BOTH))
"""A program of two GPUs that read each other's memory, as tensor-parallel ones do."""


def went_on(run: Program, before: int) -> bool:
    return run.passes > before + STEPS


def is_back(one: Member, was: int) -> bool:
    return current(one) >= was - GIB


def test_what_peers_use_moves() -> None:
    """Of one GPU and of both, out and back in, while both read all of it."""
    with (
        mountpoint() as path,
        mounted(path, gpu="nvidia") as mount,
        program(*run_in(mount), *PEERS) as run,
    ):
        wait_for(lambda: run.passes > STEPS or run.process.poll() is not None, "it works", seconds=60)
        on = [Member(run.pid, gpu, mount.group(run.pid, gpu)) for gpu in (0, 1)]
        was = [held(one, 3) for one in on]
        for which in ((0,), (0, 1)):
            for gpu in which:
                write(on[gpu], "gmem.limit.high", f"{MAPPED}G")
            for gpu in which:
                assert current(on[gpu]) <= MAPPED * GIB, "the write waits until it has gone"
            before = run.passes
            wait_for(partial(went_on, run, before), "it goes on", seconds=60)
            for gpu in which:
                write(on[gpu], "gmem.limit.high", "max")
            for gpu in which:
                wait_for(partial(is_back, on[gpu], was[gpu]), f"it is back on {gpu}", seconds=20)
            print(f"{which}: {run.passes - before} steps meanwhile")
        run.finish()


@pytest.mark.timeout(ENDURANCE_S + 400)
def test_both_kinds_under_moving_limits(tmp_path: Path) -> None:
    """One program of two GPUs that read each other's memory, and one of two ranks with NCCL, beside each other: limits
    of 60 % on each GPU of each are rewritten every 200 ms. None hangs, and all sums are right."""
    with (
        mountpoint() as path,
        mounted(path, gpu="nvidia") as mount,
        program(*run_in(mount), *PEERS) as peers,
        pair(mount, tmp_path / "meet") as ranks,
    ):
        wait_for(lambda: peers.passes > STEPS or peers.process.poll() is not None, "it works", seconds=60)
        on = [(peers, 0), (peers, 1), (ranks[0], 0), (ranks[1], 1)]
        groups = [(run, Member(run.pid, gpu, mount.group(run.pid, gpu))) for run, gpu in on]
        for _, group in groups:
            held(group, 3)
        began = time.monotonic()
        watch = Watch([peers, *ranks], began)

        def is_over(_: Rewritten) -> bool:
            return time.monotonic() >= began + ENDURANCE_S

        with ThreadPoolExecutor(len(groups)) as pool:
            each = [pool.submit(rewrite, run, group, seed, is_over, PART) for seed, (run, group) in enumerate(groups)]
            while not all(one.done() for one in each):
                watch.look(time.monotonic())
                time.sleep(0.05)
        results = [one.result() for one in each]
        for (run, gpu), result in zip(on, results, strict=True):
            print(f"{'peers' if run is peers else 'rank'} on GPU {gpu}: {result}")
        print(f"{ENDURANCE_S:.0f} s, steps {watch.done}, longest step {watch.longest:.2f} s")
        assert watch.longest < STUCK_S
        assert all(watch.done)
        for result in results:
            assert result.written >= ENDURANCE_S / 4, "a write takes no second"
            assert result.moved > result.footprint
        peers.finish()
        finish(ranks)
