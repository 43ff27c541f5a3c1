"""Level 7: memory that a program makes by cuMemCreate and maps itself stays below a limit, and is right."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import GIB, MIB, Program, held, member, nvml_used, program, run_in, write

SEGMENTS = 200
"""Segments of 20 MiB: 4000 MiB."""


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of objects.cu, built: it calls the driver itself."""
    path = os.fspath(tmp_path_factory.mktemp("cuda") / "objects")
    source = Path(__file__).with_name("objects.cu")
    subprocess.run(["nvcc", "-O2", "-o", path, source, "-lcuda"], check=True)
    return path


def facts(run: Program) -> tuple[list[str], list[str]]:
    """Return what the driver said of a mapping at the beginning, and at the end, of one that has ended."""
    assert run.process.stdout is not None
    lines = run.process.stdout.read().splitlines()
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]


def test_mappings_are_what_the_driver_says(gpu_mount: Mounted, objects: str) -> None:
    """What a program is told of a mapping, and may do with it, is the same without the library, with it, and once it
    has moved: the answers that are the library's own are held against the driver's."""
    with program(objects, "PAGE", "2") as plain:
        wait_for(lambda: plain.passes > 2, "it works", seconds=60)
        plain.finish()
        expected, again = facts(plain)
    print("\n".join(expected))
    assert again == expected
    with program(*run_in(gpu_mount), objects, "PAGE", "2") as run:
        group = member(gpu_mount, run)
        held(group)
        write(group, "gmem.reclaim", 40 * MIB)
        assert group.flat("gmem.stat")["swapout_bytes"] >= 40 * MIB
        run.finish()
        assert facts(run) == (expected, expected)


def test_segments_stay_below_their_limit(gpu_mount: Mounted, objects: str) -> None:
    with program(*run_in(gpu_mount), objects, "PAGE", str(SEGMENTS)) as run:
        group = member(gpu_mount, run)
        whole = held(group)
        assert whole >= SEGMENTS * 20 * MIB
        for limit in (2 * GIB, GIB, 3 * GIB):
            write(group, "gmem.limit.high", limit)
            wait_for(lambda limit=limit: nvml_used(run.process.pid) <= limit + 64 * MIB, "NVML agrees", seconds=20)  # type: ignore[misc]
            count = run.passes
            wait_for(lambda count=count: run.passes > count + 12, "it goes on", seconds=120)  # type: ignore[misc]
            assert nvml_used(run.process.pid) <= limit + 64 * MIB
            assert group.flat("gmem.stat")["unmovable"] < 256 * MIB
        write(group, "gmem.limit.high", "max")
        wait_for(lambda: nvml_used(run.process.pid) >= whole - 64 * MIB, "all is back", seconds=20)
        run.finish()
        before, after = facts(run)
        assert before == after
