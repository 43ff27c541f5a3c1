"""The gate: nothing goes through while it is closed, and nothing can hold it closed, or open, that should not."""

from __future__ import annotations

import pytest

from .harness import run

CASES = ["launches", "order", "timeout", "nested", "capture", "death", "cancelled", "fork"]


@pytest.mark.parametrize("sanitize", ["", "thread", "address,undefined"])
@pytest.mark.parametrize("case", CASES)
def test_gate(case: str, sanitize: str) -> None:
    """Each case is a function of gate_all.c."""
    run("gate_all", case, sanitize=sanitize)


def test_the_gate_is_cheap() -> None:
    """Entering and leaving costs nanoseconds, a launch 2 us or more. The bound is loose, so slow machines pass."""
    assert int(run("gate_all", "cost")) < 200_000  # ps
