"""Level 6: allocation (unit/unit.c) on the double of the driver, each call of which fails once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.t6_cuda.units import attempt, calls, run_unit

MIB = 1 << 20

ENVIRONMENT = {
    "exhaustion": {"FAKE_MEMORY": str(64 * MIB)},
    "peers": {"FAKE_DEVICES": "2"},
    "copier": {"FAKE_DEVICES": "2"},
}

FAULTY = [
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceGetDefaultMemPool",
    "cuDeviceGetMemPool",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamGetId",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
]
"""Calls made by allocating, freeing and moving. cuEventQuery is repeated until something happens: a few times."""

MOST = int(os.environ.get("GGROUP_CUDA_FAULTS", "12"))
"""Faults of one entry point that are tried, spread over all its calls."""


@pytest.mark.parametrize("sanitize", ["", "address,undefined"])
@pytest.mark.parametrize(
    "name",
    [
        "basic",
        "limit",
        "no_swap",
        "exhaustion",
        "async",
        "foreign",
        "reused",
        "attributes",
        "capture",
        "peers",
        "copier",
    ],
)
def test_unit(name: str, sanitize: str) -> None:
    run_unit(name, sanitize, **ENVIRONMENT.get(name, {}))


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize("name", ["moves", "counts", "destroyed", "current", "not_ours", "given"])
def test_pools_of_the_program(name: str, sanitize: str) -> None:
    """Memory from them moves unless another process, or another GPU, can have it (unit/sources.c)."""
    run_unit(name, sanitize, program="sources", FAKE_DEVICES="2")


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
@pytest.mark.parametrize(
    "name", ["peers", "pools", "readers", "elsewhere", "captures", "copies", "frees", "books", "contexts"]
)
def test_one_failure_is_no_more_than_that(name: str, sanitize: str) -> None:
    """One failing driver call makes nothing count as done, free or off the books that is not (unit/once.c)."""
    run_unit(name, sanitize, program="once", FAKE_DEVICES="2")


@pytest.mark.parametrize("entry", FAULTY)
def test_any_call_may_fail(entry: str, tmp_path: Path) -> None:
    """No data is lost, and the books agree with the driver, whichever call fails, with whichever error."""
    count = calls("faults", tmp_path / "calls")[entry]
    assert count, f"{entry} is not called: what is tested here?"
    for number in range(1, count + 1, -(-count // MOST)):
        for code in (2, 999):
            done = attempt("faults", FAKE_FAIL=f"{entry}:{number}:{code}")
            assert done.returncode == 0, f"call {number} of {count} answers {code}: {done.stderr}"


def test_every_call_is_known(tmp_path: Path) -> None:
    """A new call of the library must be in FAULTY, or be one that cannot fail on its own."""
    before_and_test = {
        "cuInit",
        "cuDevicePrimaryCtxRetain",
        "cuCtxSetCurrent",
        "cuDeviceGetAttribute",
        "cuDeviceGetUuid_v2",
        "cuCtxGetCurrent",
        "cuCtxGetDevice",
        "cuMemcpyHtoD_v2",
        "cuMemcpyDtoH_v2",
        "cuStreamCreateWithPriority",
    }
    assert set(calls("faults", tmp_path / "calls")) <= {*FAULTY, *before_and_test}
