"""Busy periods: what a program that goes before others says, and what that does to those that go behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.t6_cuda.harness import daemon, run

SANITIZERS = ["", "thread", "address,undefined"]

CASES = [
    "held",
    "expires",
    "several",
    "starves_not",
    "sealed",
    "captures",
    "turns",
    "fork",
    "hammer",
    "leads",
    "graphs",
]

KERNEL_US = 20_000
"""Microseconds that a kernel takes where run-ahead is bounded, to what runs and four of them."""


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("case", CASES)
def test_burst(case: str, sanitize: str) -> None:
    """Each case is a function of burst_all.c."""
    run("burst_all", case, sanitize=sanitize)


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_run_ahead_of_one_that_goes_behind_is_bounded(tmp_path: Path, sanitize: str) -> None:
    """By what kernels took lately; and it is heard in time of what has finished, so that the GPU does not run dry."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(KERNEL_US)}
        words = run("burst_all", "ahead", sanitize=sanitize, **extra).split()
    assert 2 <= int(words[1]) <= 8, words
    assert int(words[3]) <= 8, words
