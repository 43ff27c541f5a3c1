"""A machine with two GPUs: each process is on those that it uses, and each lever acts on its own GPU."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import Worker, rates, wait_for


def test_a_program_is_on_the_gpu_that_it_uses(gpu_mount: Mounted, worker: Callable[..., Worker]) -> None:
    zero, one = worker(gpu=0), worker(gpu=1)
    for program in (zero, one):
        program.started()
    wait_for(lambda: gpu_mount.group(zero.pid, 0).exists() and gpu_mount.group(one.pid, 1).exists(), "both appear")
    assert os.listdir(gpu_mount / zero.pid) == ["0"]
    assert os.listdir(gpu_mount / one.pid) == ["1"]
    (gpu_mount.group(one.pid, 1) / "compute.freeze").write_text("1\n")
    frozen = rates(zero, one, seconds=1)
    (gpu_mount.group(one.pid, 1) / "compute.freeze").write_text("0\n")
    print(f"GPU 0 {frozen[0]:.0f}/s, GPU 1 frozen {frozen[1]:.0f}/s, thawed {rates(one)[0]:.0f}/s")
    assert frozen[1] == 0
    assert frozen[0] > 1000
    for program in (zero, one):
        program.drained()


def test_a_program_on_both_is_stopped_on_one(gpu_mount: Mounted) -> None:
    path = Path(f"/dev/shm/ggroupfs-t7-both-{os.getpid()}")
    path.write_bytes(bytes(16))
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), 16)
    process = subprocess.Popen([sys.executable, os.fspath(Path(__file__).with_name("both.py")), os.fspath(path)])

    def counts() -> tuple[int, int]:
        zero, one = struct.unpack("<QQ", page[:])
        return zero, one

    try:
        wait_for(lambda: min(counts()) > 10, "it works on both", seconds=60)
        wait_for(lambda: sorted(os.listdir(gpu_mount / process.pid)) == ["0", "1"], "it is on both")
        for frozen in (0, 1):
            freeze = gpu_mount.group(process.pid, frozen) / "compute.freeze"
            freeze.write_text("1\n")
            time.sleep(0.05)  # earlier counts may still be on their way to the page
            before = counts()
            time.sleep(0.5)
            after = counts()
            freeze.write_text("0\n")
            print(f"GPU {frozen} frozen: products on 0 and 1: {after[0] - before[0]}, {after[1] - before[1]}")
            assert after[frozen] == before[frozen]
            assert after[1 - frozen] > before[1 - frozen]
            wait_for(
                lambda frozen=frozen, after=after: counts()[frozen] > after[frozen],  # type: ignore[misc]
                "it goes on",
            )
    finally:
        process.kill()
        process.wait()
        path.unlink()
