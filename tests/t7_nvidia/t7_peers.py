"""Memory that another GPU of the program uses as well, on a machine with two: it moves, and what is read is right."""

from __future__ import annotations

import os
import sys
from functools import partial

from ggroupfs.client import Member
from tests.support.mounted import mounted, mountpoint
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.programs import GIB, Program, current, held, program, run_in, write

MIB_BOTH = 8192
"""MiB of the program, half of them on each GPU."""
MAPPED = 2
"""GiB of a GPU's memory that is left on it: less than the program has there."""
STEPS = 3
"""In which all is read over NVLink or PCIe, wherever it is."""


def went_on(run: Program, before: int) -> bool:
    return run.passes > before + STEPS


def is_back(one: Member, was: int) -> bool:
    return current(one) >= was - GIB


def test_what_peers_use_moves() -> None:
    """Of one GPU and of both, out and back in, while both read all of it."""
    words = [sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "peers.py"), "PAGE", str(MIB_BOTH)]
    with (
        mountpoint() as path,
        mounted(path, gpu="nvidia") as mount,
        program(*run_in(mount), *words) as run,
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
