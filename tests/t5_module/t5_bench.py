"""What a charge costs, as a multiple of getpid() on the same machine (bench.c)."""

from __future__ import annotations

from tests.t5_module.harness import run_program

RATIO_MOST = 5.0
"""A charge and an uncharge, of what getpid() costs. Two ioctls that are refused at once come to 3.7 of them on an
emulated processor."""


def test_charge_and_uncharge() -> None:
    found = run_program("bench")
    print(found)
    assert found["tenant"] <= RATIO_MOST, found
