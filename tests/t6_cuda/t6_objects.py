"""Level 6: memory made by cuMemCreate and mapped by the program (unit/objects.c) moves."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.t6_cuda.harness import CUDA_INCLUDE, entries
from tests.t6_cuda.units import TWO_GPUS, attempt, calls, run_unit

FAULTY = [
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoDAsync_v2",
]
"""Entry points called by moving such memory, except those that t6_memory has for all memory."""

MOST = int(os.environ.get("GGROUP_CUDA_FAULTS", "12"))
"""Number of faults tried per entry point, spread over all its calls."""


def test_every_call_that_has_a_handle_is_caught() -> None:
    """The program's name for a handle is no handle of the driver's once the memory has moved, or the driver has given
    out the same value again. A call of a newer driver that the library does not know would pass it on."""
    header = re.sub(r"/\*.*?\*/", "", (CUDA_INCLUDE / "cuda.h").read_text(encoding="utf-8"), flags=re.S)
    calls = re.findall(r"CUresult CUDAAPI (\w+)\(([^;]*)\);", header)
    have = {name for name, parameters in calls if re.search("CUmemGenericAllocationHandle|CUarrayMapInfo", parameters)}
    assert {"cuMemMap", "cuMulticastBindMem", "cuMemMapArrayAsync"} <= have
    assert have <= {row.name for row in entries()}


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize(
    "name",
    [
        *("segments", "segments_are_hot", "views", "names", "questions", "export", "export_waits", "export_charged"),
        *("bound", "bound_allocation", "bound_to_what_goes", "bound_to_array", "bound_in_part"),
        *("segments_in_order", "many_in_order"),
        *("reused_handle", "reused_mapping", "reused_view", "reused_array"),
        *("reused_context", "reused_in_context"),
    ],
)
def test_moves(name: str, sanitize: str) -> None:
    run_unit(name, sanitize, program="objects", **(TWO_GPUS if name == "views" else {}))


@pytest.mark.parametrize("way", ["export", "import", "range", "multicast"])
def test_what_others_may_have_is_told(way: str) -> None:
    run_unit(f"shared_by_{way}", program="objects")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_a_call_is_about_a_run_at_most(sanitize: str) -> None:
    run_unit("runs", sanitize, program="objects")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_what_comes_has_the_room_of_what_went(sanitize: str) -> None:
    run_unit("instead", sanitize, program="objects", FAKE_MEMORY=str(8 << 20))


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_memory_made_before_the_first_context_is_charged(sanitize: str) -> None:
    run_unit("early", sanitize, program="objects")


def test_what_an_open_device_reaches_stays() -> None:
    run_unit("outside_open", program="objects")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_devices_that_cannot_be_seen_may_be_open(sanitize: str) -> None:
    run_unit("outside_unseen", sanitize, program="objects")


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_threads(sanitize: str) -> None:
    run_unit("threads", sanitize, program="objects")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize(
    "name",
    [
        *("object", "fixed", "closed_before", "in_flight", "process", "named", "named_together", "closes_all"),
        *("imported", "imported_and_named", "held_no_more"),
        *("named_and_shared", "limit", "opened"),
    ],
)
def test_what_is_exported_is_charged_while_a_descriptor_is_open(name: str, sanitize: str) -> None:
    """Memory that the program has released stays charged while others have it, or may get it (unit/outlives.c)."""
    run_unit(name, sanitize, program="outlives", FAKE_LENT="1")


@pytest.mark.parametrize("entry", FAULTY)
def test_any_call_may_fail(entry: str, tmp_path: Path) -> None:
    """Whichever call fails, with whichever error, no data is lost and the books match the driver."""
    count = calls("object_faults", tmp_path / "calls", program="objects")[entry]
    assert count, f"{entry} is not called: what is tested here?"
    for number in range(1, count + 1, -(-count // MOST)):
        for code in (2, 999):
            done = attempt("object_faults", program="objects", FAKE_FAIL=f"{entry}:{number}:{code}")
            assert done.returncode == 0, f"call {number} of {count} answers {code}: {done.stderr}"
