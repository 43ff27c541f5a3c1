"""Level 6: chunks that move under kernels, copies and allocations of several threads (unit/unit.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.t6_cuda.harness import MIB, BookingDaemon, eventually, running
from tests.t6_cuda.units import run_unit


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_exact_under_random_limits(sanitize: str) -> None:
    """Three threads allocate, launch, check and free, while the limit changes as fast as it can be met."""
    assert "reclaims" in run_unit("stress", sanitize, UNIT_SECONDS="4")


@pytest.mark.parametrize("sanitize", ["", "thread"])
@pytest.mark.parametrize(
    "name",
    [
        *("persistent", "queue", "contexts", "pin", "reached", "heat", "heat_in_one", "heat_copied"),
        *("inside", "long", "ahead_of_it", "destroyed", "exchange_whole"),
        *("stuck", "stuck_goes", "stuck_stays", "exchange", "exchange_by_itself", "exchange_more"),
    ],
)
def test_unit(name: str, sanitize: str) -> None:
    run_unit(name, sanitize)


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_chunks_of_the_host_are_made_ahead(sanitize: str) -> None:
    run_unit("ahead", sanitize, GGROUP_CUDA_POOL="32")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_a_program_that_knows_nothing(tmp_path: Path, sanitize: str) -> None:
    """All of it together: the library loaded into a program, and a daemon at its socket."""
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
            # What is granted is on its way: the program waits for its own copies to be right.
            program.go()
            assert program.hears("gpu") <= 22 + 20
            program.go()
            assert program.hears("total") == 64
            program.go()
            program.ends()
        assert daemon.swapped == 0
    finally:
        daemon.close()
