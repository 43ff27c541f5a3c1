"""Busy periods: what a program that goes before others publishes, and how it holds the programs behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from backend.process.identity import identify
from tests.t6_cuda.harness import SECONDS, daemon, run
from tests.t6_cuda.pairs import pair

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
    "began_before",
    "since",
    "graphs",
]

KERNEL_US = 20_000
"""Time of a kernel where run-ahead is bounded to the running kernel and four more, in microseconds."""


@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("case", CASES)
def test_burst(case: str, sanitize: str) -> None:
    """Each case is a function of burst_all.c."""
    run("burst_all", case, sanitize=sanitize)


@pytest.mark.parametrize("sanitize", SANITIZERS)
def test_run_ahead_of_one_that_goes_behind_is_bounded(tmp_path: Path, sanitize: str) -> None:
    """The bound goes by the time of recent kernels, and ends are noticed in time, so that the GPU does not run dry."""
    with daemon(tmp_path) as server:
        extra = {"GGROUP_SOCKET": str(server.path), "FAKE_KERNEL_US": str(KERNEL_US)}
        words = run("burst_all", "ahead", sanitize=sanitize, **extra).split()
    assert 2 <= int(words[1]) <= 8, words
    assert int(words[3]) <= 8, words


# Two programs and the daemon


@pytest.mark.parametrize("sanitize", ["", "thread"])
def test_a_program_that_is_busy_holds_another(tmp_path: Path, sanitize: str) -> None:
    """The busy program holds the other one, by pages that the daemon handed to both, for all but a hundredth of the
    time, until the daemon revokes that or the busy program dies."""

    async def main() -> None:
        with trio.fail_after(4 * SECONDS):
            async with pair(tmp_path, sanitize) as two:
                counts = [await two.launched(two.second) for _ in range(5)]
                little = max(counts) // 5
                assert little
                managed, second = two.daemon.gpu.managed, identify(two.second.process.pid)
                assert managed.held_launches(second) is None
                two.rank(two.second)
                await two.until(two.second, lambda count: count <= little, "it is held")
                before = managed.held_launches(second)
                total = sum([await two.launched(two.second) for _ in range(20)])
                assert total, "and does not starve"
                assert (managed.held_launches(second) or 0) > (before or 0) > 0
                assert (managed.busy_periods(identify(two.first.process.pid)) or 0) > 0
                assert managed.busy_periods(second) is None, "none goes behind it"
                assert managed.held_launches(identify(two.first.process.pid)) is None, "none goes before it"
                two.rank()
                await two.until(two.second, lambda count: count > little, "it is let go")
                two.rank(two.second)
                await two.until(two.second, lambda count: count <= little, "it is held again")
                assert "others go behind" in two.first.stderr()
                assert "goes behind others: 0x1" in two.second.stderr()
                two.first.process.kill()
                await two.until(two.second, lambda count: count > little, "the other has died")

    trio.run(main)
