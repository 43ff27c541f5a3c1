"""Level 7: NVML and nvidia-smi, started in a limited slice, say the limit; the daemon, and what is outside, the GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.programs import GIB, MIB, held, member, program, run_in, slice_of, write

LIMIT = 8 * GIB
ASKS = """
import json, pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
first = pynvml.nvmlDeviceGetMemoryInfo(device)
second = pynvml.nvmlDeviceGetMemoryInfo(device, version=pynvml.nvmlMemory_v2)
listed = [one.usedGpuMemory or 0 for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
found = [first.total, first.free, first.used, second.total, second.free, second.used, second.reserved]
print(json.dumps([*found, sum(listed)]))
"""
"""A program that is none of CUDA, and what NVML says to it."""
SMI = ("nvidia-smi", "--id=0", "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits")


@pytest.fixture(autouse=True)
def _with_nvidia_smi() -> None:
    assert shutil.which("nvidia-smi"), "no nvidia-smi on this host"


def asked(*before: str, **variables: str) -> list[int]:
    words = [*before, sys.executable, "-c", ASKS]
    ran = subprocess.run(words, env={**os.environ, **variables}, text=True, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    found: list[int] = json.loads(ran.stdout)
    return found


def smi(*before: str) -> tuple[int, int, int]:
    """What nvidia-smi says is there, used and free, MiB."""
    ran = subprocess.run([*before, *SMI], text=True, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    total, used, free = (int(word) for word in ran.stdout.split(","))
    return total, used, free


def test_a_limited_slice_sees_its_limit(gpu_mount: Mounted, elastic: str) -> None:
    """Its total, its use, and no process above it; a program beside it the card, and so does one that asks to."""
    whole = asked()
    with slice_of(gpu_mount, "view") as (name, group):
        run = run_in(gpu_mount, within=name)
        with program(*run, elastic, "PAGE", "2048") as found:
            member(gpu_mount, found)
            write(group, "gmem.limit.max", LIMIT)
            now = held(group)
            total, free, used, total2, free2, used2, reserved, listed = asked(*run)
            assert (total, total2) == (LIMIT, LIMIT)
            assert (free, total) == (free2, free + used)
            assert total2 == free2 + used2 + reserved
            assert abs(used2 - now) <= 64 * MIB, (used2, now)
            assert abs(free - (LIMIT - now)) <= 64 * MIB, (free, now)
            assert listed <= LIMIT
            said = smi(*run)
            assert said[0] == LIMIT // MIB, f"nvidia-smi says {said}"
            assert abs(said[1] - now // MIB) <= 64
            assert asked(*run, GGROUP_NVML="0")[0] == whole[0]
            assert asked()[0] == whole[0]
            found.finish()


def test_without_a_limit_it_says_the_gpu(gpu_mount: Mounted) -> None:
    whole = asked()
    assert asked(*run_in(gpu_mount))[0] == whole[0]
    assert smi(*run_in(gpu_mount))[0] == smi()[0]


def test_a_family_sees_what_it_asked_for(gpu_mount: Mounted) -> None:
    """As in a container whose image sets it."""
    found = asked(*run_in(gpu_mount), GGROUP_GMEM_MAX=str(LIMIT))
    assert found[0] == LIMIT
