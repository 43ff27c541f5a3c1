"""Memory limits on unmodified CUDA programs: what moves, how fast, and what the program notices."""

from __future__ import annotations

import struct
import time

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.programs import GIB, MIB, member, nvml_used, program, run_in, speed, write


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "counts")


def test_counts_are_exact(gpu_mount: Mounted, counts: str) -> None:
    """Plain, cooperative, graph and multi-stream launches: the counts are what the program made, and all finished."""
    with program(*run_in(gpu_mount), counts) as run:
        assert run.process.stdout is not None
        launched, found = map(int, run.process.stdout.readline().split())
        assert launched == found
        group = Member(run.process.pid, 0, gpu_mount.group(run.process.pid))
        wait_for(lambda: group.flat("gcgroup.stat").get("finished", 0) >= launched, "all are finished", seconds=1)
        stat = group.flat("gcgroup.stat")
        print(f"launched {launched}: {stat}")
        assert (stat["submitted"], stat["finished"], stat["pending"]) == (launched, launched, 0)


def test_eight_gib_cut_to_four(gpu_mount: Mounted, elastic: str) -> None:
    with program(elastic, "PAGE", "8192", "1", "managed") as uvm:
        wait_for(lambda: uvm.passes > 2, "it works", seconds=60)
        uvm_out, uvm_in = uvm.u64(48) / 1e9, uvm.u64(56) / 1e9
        uvm.finish()
    with program(*run_in(gpu_mount), elastic, "PAGE", "8192") as run:
        group = member(gpu_mount, run)
        resident = run.u64(8) / 1e9
        before = nvml_used(run.process.pid)
        assert before >= 8 * GIB
        time.sleep(3)  # pinned host memory is made ahead, at about 3 GB/s
        slowest = 0.0
        for attempt in range(3):
            start = time.monotonic()
            write(group, "gmem.limit.high", "4G")
            written = time.monotonic() - start
            left = (lambda: nvml_used(run.process.pid) <= 4 * GIB + 64 * MIB, "NVML agrees")
            took = written + wait_for(*left, seconds=5)
            slowest = max(slowest, took)
            count = run.passes
            wait_for(lambda count=count: run.passes > count + 2, "it goes on", seconds=60)  # type: ignore[misc]
            slow = run.u64(8) / 1e9
            start = time.monotonic()
            write(group, "gmem.limit.high", "max")
            wait_for(lambda: nvml_used(run.process.pid) >= before - 64 * MIB, "all is back", seconds=10)
            back = time.monotonic() - start
            print(
                f"cut {attempt}: {before >> 20} MiB; written in {written * 1e3:.0f} ms, NVML in {took * 1e3:.0f}, "
                f"back in {back * 1e3:.0f}; passes at {resident:.0f} GB/s resident, {slow:.0f} cut"
            )
        run.finish()
        log = run.log.read_text()
    print(log)
    out = speed(log, r"moved (\d+) MiB in (\d+) us")
    back = speed(log, r"moved (\d+) MiB back in (\d+) us")
    print(f"out {out:.1f} GB/s, back {back:.1f} GB/s; UVM out {uvm_out:.1f}, in {uvm_in:.1f} GB/s")
    assert slowest < 0.5
    assert out >= 30
    assert back >= 40


def test_no_swap_is_out_of_memory(gpu_mount: Mounted, elastic: str) -> None:
    """With gmem.swap.max 0 an allocation beyond the limit is refused, and no other."""
    with program(*run_in(gpu_mount, "gmem.limit.high=4G", "gmem.swap.max=0"), elastic, "PAGE", "8192") as run:
        assert run.process.wait(60) == 1
        assert struct.unpack_from("<I", run.page, 28)[0] == 2  # cudaErrorMemoryAllocation


def test_the_program_sees_its_limit(gpu_mount: Mounted, elastic: str) -> None:
    with program(*run_in(gpu_mount, "gmem.limit.high=4G"), elastic, "PAGE", "1024") as run:
        member(gpu_mount, run)
        assert run.u64(32) == 4 * GIB
        assert 0 < run.u64(40) <= 3 * GIB
        run.finish()
