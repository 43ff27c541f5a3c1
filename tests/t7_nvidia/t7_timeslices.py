"""Native timeslices of TSGs on a real driver: a program is not blamed for what the CUDA library sets, and that value is
its native one (tests/t2_parts/t2_timeslices.py)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ggroupfs.client import flat
from tests.support.mounted import mounted
from tests.t7_nvidia.colocations import started
from tests.t7_nvidia.conftest import Worker
from tests.t7_nvidia.inside import insides

CUDA_US = 2048
SETTLED_S = 2.0
"""Seconds after the last of them has come."""


@pytest.mark.timeout(120)
def test_programs_that_begin_on_a_busy_gpu(tmp_path: Path, worker: Callable[..., Worker]) -> None:
    """On a busy GPU the CUDA library sets a TSG's timeslice seconds after it was found, when the scheduler has already
    set another. A daemon that ends restores the library's value for all of them."""
    with insides() as inside, ExitStack() as stack:
        others = [worker(us) for us in (500, 20_000, 20_000)]
        with mounted(tmp_path, gpu="nvidia") as mount:  # a program that is blamed is in its log, and fails this test
            begun = [stack.enter_context(started(mount, "requests")).pid for _ in range(4)]
            time.sleep(SETTLED_S)
            pids = [*begun, *(one.pid for one in others)]
            given = {pid: inside(pid).timeslices() for pid in pids}
            undone = [flat((mount.group(pid) / "compute.events").read_text())["undone"] for pid in pids]
        left = {pid: inside(pid).timeslices() for pid in pids}
    print(f"timeslices {[*given.values()]} us, and {[*left.values()]} when the daemon has ended")
    assert all(given[pid] != [CUDA_US] for pid in begun), "the scheduler is at it"
    assert undone == [0] * len(pids)
    assert all(us == [CUDA_US] for us in left.values())
