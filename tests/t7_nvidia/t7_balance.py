"""`ggroupfs balance` on two GPUs: a critical program beside three batch programs has its latency back within 10 s."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

from tests.support.mounted import Mounted
from tests.support.policy_program import PolicyProgram
from tests.t7_nvidia.colocations import p99, started
from tests.t7_nvidia.programs import where

BALANCED_S = 10.0

CONFIG = """
socket = "{socket}"
room = "4G"

[[group]]
name = "critical"
pid = {pid}
upper = "{upper:.1f}ms"
statistic = "p99"
"""


@pytest.mark.timeout(300)
def test_an_overloaded_gpu_and_an_idle_one(gpu_mount: Mounted, tmp_path: Path) -> None:
    """The bound is one and a half times its p99 alone. Some of the batch programs move, and it stays."""
    socket, file = tmp_path / "balance.sock", tmp_path / "balance.toml"
    with contextlib.ExitStack() as stack:
        critical = stack.enter_context(started(gpu_mount, "requests", os.fspath(socket)))
        alone = p99(critical.latencies(10))
        upper = 1.5 * alone
        batch = [stack.enter_context(started(gpu_mount, "products")) for _ in range(3)]
        shared = p99(critical.latencies(5))
        file.write_text(CONFIG.format(socket=socket, pid=critical.pid, upper=upper * 1e3))
        counts = [one.count() for one in batch]
        began = time.monotonic()
        with PolicyProgram(gpu_mount.path, "balance", file) as policy:
            critical.latencies(max(0.0, began + BALANCED_S - time.monotonic()))
            late = p99(critical.latencies(15))
            policy.end()
        places = [where(one.pid) for one in batch]
        moved = [one for one in policy.events if one["event"] == "moved"]
        print(
            f"p99 alone {alone * 1e3:.2f} ms, beside three {shared * 1e3:.2f}, after {BALANCED_S:.0f} s "
            f"{late * 1e3:.2f}; bound {upper * 1e3:.2f}; they are on {places}; {moved}"
        )
        assert shared > upper, "there is something to do"
        assert late <= upper
        assert where(critical.pid) == [0]
        assert [1] in places
        assert all(one.count() > count for one, count in zip(batch, counts, strict=True))
