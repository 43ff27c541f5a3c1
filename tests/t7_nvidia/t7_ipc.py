"""Memory that programs share by legacy CUDA IPC, on a real driver."""

from __future__ import annotations

import errno
import os
import sys

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT
from tests.t7_nvidia.programs import MIB, program, run_in, write

SHARED = 256 * MIB


@pytest.mark.timeout(180)
def test_a_tensor_of_two_processes(gpu_mount: Mounted) -> None:
    """Each sees the other's changes; shared memory stays on the GPU, and is reported as shared."""
    words = [sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "share.py")]
    with program(*run_in(gpu_mount), *words) as run:
        assert run.process.stdout is not None
        assert run.process.stdin is not None
        assert run.process.stdout.readline() == "shared\n"
        group = Member(run.pid, 0, gpu_mount.group(run.pid))
        stat = group.flat("gmem.stat")
        print(stat)
        assert stat["unmovable"] >= SHARED
        with pytest.raises(OSError, match=os.strerror(errno.EBUSY)):
            write(group, "gmem.limit.high", int(group.read("gmem.current")) - SHARED)
        run.process.stdin.write("\n")
        run.process.stdin.flush()
        assert run.process.stdout.readline() == "done\n"
        assert run.process.wait(60) == 0
