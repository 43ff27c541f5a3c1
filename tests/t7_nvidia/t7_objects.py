"""Level 7: memory that a program makes by cuMemCreate and maps itself stays below a limit, with its contents."""

from __future__ import annotations

import time

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.programs import GIB, MIB, Program, held, member, nvml_used, program, run_in, write

SEGMENTS = 200
"""Number of segments of 20 MiB: 4000 MiB."""
SERVED = 4
"""GiB that a server has, in pieces of 1 GiB."""
SLEEP, SLEEPS = 32, 36
"""Offsets in the page of sleeps.cu."""
STEP, DONE = 32, 36
"""Offsets in the page of exports.cu."""
LET_GO, CLOSED = 1, 2
"""Steps of exports.cu."""
SETTLES_S = 3.0
"""Seconds after which the driver's figures have been seen."""


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "objects")


@pytest.fixture(scope="session")
def sleeps(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "sleeps")


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "exports")


def facts(run: Program) -> tuple[list[str], list[str]]:
    """Return what the driver said of a mapping at the start and at the end of a program that has ended."""
    assert run.process.stdout is not None
    lines = run.process.stdout.read().splitlines()
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]


def test_mappings_are_what_the_driver_says(gpu_mount: Mounted, objects: str) -> None:
    """The driver's answers about a mapping, and what is allowed with it, are the same without the library, with it, and
    after a move: answers of the library's own are compared with the driver's."""
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
            wait_for(
                lambda limit=limit: nvml_used(run.process.pid) <= limit + 64 * MIB,  # type: ignore[misc]
                "NVML agrees",
                seconds=20,
            )
            count = run.passes
            wait_for(lambda count=count: run.passes > count + 12, "it goes on", seconds=120)  # type: ignore[misc]
            assert nvml_used(run.process.pid) <= limit + 64 * MIB
            assert group.flat("gmem.stat")["unmovable"] < 256 * MIB
        write(group, "gmem.limit.high", "max")
        wait_for(lambda: nvml_used(run.process.pid) >= whole - 64 * MIB, "all is back", seconds=20)
        run.finish()
        before, after = facts(run)
        assert before == after


def test_a_server_wakes_below_half_of_its_size(gpu_mount: Mounted, sleeps: str) -> None:
    """It makes the released memory again under the same addresses, of which half fits: the rest goes to the host, and
    its data is right."""
    with program(*run_in(gpu_mount), sleeps, "PAGE", str(SERVED)) as run:
        group = member(gpu_mount, run)
        whole = held(group)
        for _ in range(2):
            run.set(SLEEP, 1)
            wait_for(lambda: run.u32(SLEEPS) == 1, "it sleeps", seconds=60)
            wait_for(lambda: nvml_used(run.pid) <= whole - (SERVED * GIB - 64 * MIB), "its memory is free")
            limit = held(group) + SERVED // 2 * GIB
            write(group, "gmem.limit.high", limit)
            run.set(SLEEP, 0)
            wait_for(lambda: run.u32(SLEEPS) == 0, "it wakes", seconds=60)
            count = run.passes
            wait_for(lambda count=count: run.passes > count + 4, "it serves", seconds=60)  # type: ignore[misc]
            assert nvml_used(run.pid) <= limit + 64 * MIB
            assert run.u64(16) == 0
            write(group, "gmem.limit.high", "max")
            wait_for(lambda: nvml_used(run.pid) >= whole - 64 * MIB, "all is back", seconds=20)
        run.finish()


@pytest.mark.parametrize("way", ["handle", "fixed", "named"])
def test_what_descriptors_hold_is_charged_until_they_are_closed(gpu_mount: Mounted, exports: str, way: str) -> None:
    """The memory is on the GPU, whatever the driver counts for the process: a descriptor may be another process's by
    now."""
    with program(*run_in(gpu_mount), exports, "PAGE", way) as run:
        group = member(gpu_mount, run)
        whole = held(group)
        assert group.flat("gmem.stat")["unmovable"] >= GIB
        run.set(STEP, LET_GO)
        wait_for(lambda: run.u32(DONE) == LET_GO, "it has let go of all of it")
        time.sleep(SETTLES_S)
        print(f"{way}: of {whole >> 20} MiB NVML counts {nvml_used(run.pid) >> 20} MiB for it")
        assert abs(held(group) - whole) <= 16 * MIB
        assert group.flat("gmem.stat")["unmovable"] >= GIB
        run.set(STEP, CLOSED)
        wait_for(lambda: held(group) <= whole - (GIB - 64 * MIB), "it is uncharged", seconds=10)
        assert group.flat("gmem.stat")["unmovable"] < 64 * MIB
        run.finish()
