"""Level 6: chunks move under the kernels, copies and allocations of several threads (unit/unit.c)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.t6_cuda.harness import MIB, ROOT, BookingDaemon, eventually, running
from tests.t6_cuda.units import attempt, calls, run_unit


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_exact_under_random_limits(sanitize: str) -> None:
    """Three threads allocate, launch, check and free while the limit changes as fast as it can be met."""
    assert "reclaims" in run_unit("stress", sanitize, UNIT_SECONDS="4")


@pytest.mark.parametrize("sanitize", ["", "thread"])
@pytest.mark.parametrize(
    "name",
    [
        *("persistent", "queue", "contexts", "pin", "reached", "heat", "heat_in_one", "heat_copied"),
        *("inside", "long", "ahead_of_it", "destroyed", "exchange_whole"),
        *("stuck", "stuck_goes", "stuck_stays", "exchange", "exchange_by_itself", "exchange_more"),
        *("both_ways", "both_ways_stuck", "freed_as_it_goes", "order", "order_in_one", "order_of_short_turns"),
    ],
)
def test_unit(name: str, sanitize: str) -> None:
    run_unit(name, sanitize)


BARE = ("bare", "bare_asked", "bare_elsewhere", "bare_faults", "bare_stuck")


@pytest.mark.parametrize(
    ("name", "sanitize"),
    [
        *((name, "") for name in BARE),
        *((name, "address,undefined") for name in BARE if name != "bare"),
        *((name, "thread") for name in ("bare", "bare_stuck")),
    ],
)
def test_what_goes_between_turns_is_mapped_nowhere(name: str, sanitize: str) -> None:
    """It is once the gate opens, or something looks at it; what has come back by then costs no call about the host."""
    run_unit(name, sanitize, FAKE_DEVICES="2")


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_chunks_of_the_host_are_made_ahead(sanitize: str) -> None:
    run_unit("ahead", sanitize, GGROUP_CUDA_POOL="32")


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_what_is_made_ahead_of_the_host_is_what_is_granted(sanitize: str) -> None:
    run_unit("granted", sanitize, GGROUP_CUDA_POOL="1024")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize("name", ["clean", "clean_changes", "clean_turns", "clean_stuck", "marks_end"])
def test_what_has_not_changed_is_not_copied(name: str, sanitize: str) -> None:
    run_unit(name, sanitize)


FAULTY = [
    *("cuModuleLoadData", "cuModuleGetFunction", "cuMemHostAlloc", "cuLaunchKernel", "cuStreamCreate", "cuEventCreate"),
    *("cuEventRecord", "cuEventQuery", "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"),
    *("cuMemcpyDtoDAsync_v2", "cuMemAddressReserve", "cuMemAddressFree"),
]
"""Entry points called by moving with marks."""

MOST = int(os.environ.get("GGROUP_CUDA_FAULTS", "12"))
"""Number of faults tried per entry point, spread over all its calls."""


@pytest.mark.parametrize("entry", FAULTY)
def test_any_call_may_fail(entry: str, tmp_path: Path) -> None:
    """Whichever call fails, with whichever error, no data is lost and the books match the driver."""
    count = calls("clean_faults", tmp_path / "calls")[entry]
    assert count, f"{entry} is not called: what is tested here?"
    for number in range(1, count + 1, -(-count // MOST)):
        for code in (2, 999):
            done = attempt("clean_faults", FAKE_FAIL=f"{entry}:{number}:{code}")
            assert done.returncode == 0, f"call {number} of {count} answers {code}: {done.stderr}"


@pytest.mark.parametrize("gpu", ["sm_75", "sm_90", "sm_100"])
def test_the_kernel_is_one_for_any_gpu(gpu: str, tmp_path: Path) -> None:
    """Assemble with the ptxas of the toolkit that has CUDA's headers, if there is one."""
    assembler = shutil.which("ptxas")
    if assembler is None:
        pytest.skip("no ptxas here")
    text = (ROOT / "backend/cuda/library/move/hash_ptx.h").read_text(encoding="utf-8")
    lines = re.findall(r'^\t"(.*)\\n";?$', text, re.MULTILINE)
    kernel = tmp_path / "hash.ptx"
    kernel.write_text("\n".join(line.replace('\\"', '"') for line in lines), encoding="utf-8")
    subprocess.run([assembler, f"-arch={gpu}", kernel, "-o", tmp_path / "hash.cubin"], check=True)


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_a_program_that_knows_nothing(tmp_path: Path, sanitize: str) -> None:
    """All parts together: the library loaded into a program, and a daemon at its socket."""
    path = tmp_path / "socket"
    daemon = BookingDaemon(path)
    try:
        extra = {"GGROUP_SOCKET": str(path), "GGROUP_CUDA_POOL": "0"}
        with running("mem_moves", tmp_path=tmp_path, sanitize=sanitize, extra=extra) as program:
            assert program.hears("gpu") == 22
            assert (daemon.resident, daemon.swapped) == (22 * MIB, 0)
            assert daemon.reclaim(12 * MIB) >= 12 * MIB
            assert daemon.resident + daemon.swapped == 22 * MIB
            program.go()
            assert program.hears("gpu") == daemon.resident // MIB
            daemon.room = True
            eventually(lambda: not daemon.swapped, lambda: f"{daemon.swapped} bytes stay away")
            # The grant is on its way; the program waits until its own copies are right.
            program.go()
            assert program.hears("gpu") <= 22 + 20
            program.go()
            assert program.hears("total") == 64
            program.go()
            program.ends()
        assert daemon.swapped == 0
    finally:
        daemon.close()
