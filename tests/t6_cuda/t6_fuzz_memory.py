"""Level 6: every entry point that makes, maps, shares or frees memory, by a generator (unit/fuzz), while memory moves.

What has to be called comes from entries.def: the generator ends with an error where a row about memory was not. SEED
says which calls it makes, FUZZ how many: 50000 for an evening.
"""

from __future__ import annotations

import os

import pytest

from tests.t6_cuda.units import TWO_GPUS, attempt, run_unit

STEPS = int(os.environ.get("FUZZ", "2000"))
"""Steps of a generator, of a call or a few each. So many reach every entry point."""

FAULTY_STEPS = STEPS * 2
"""The same, with each call of the driver within each of them failing once: that takes more."""

SANITIZED_STEPS = STEPS * 3 // 20
"""With a sanitizer, which takes several times as long; what was reached is not asked then."""

SEED = os.environ.get("SEED", "1")
"""Which steps they are."""

DRIVER = {**TWO_GPUS, "FAKE_LENT": "1", "FAKE_MEMORY": str(4 << 30)}
"""A GPU that has room for all that a generator makes: what it may not have its limit says."""


def generate(sanitize: str, steps: int, faults: bool) -> None:
    said = run_unit(
        "fuzz",
        sanitize,
        program="objects",
        UNIT_STEPS=str(steps),
        UNIT_SEED=SEED,
        UNIT_FAULTS=str(int(faults)),
        **DRIVER,
    )
    assert f"step {steps}:" in said


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_random_calls(sanitize: str) -> None:
    """Whatever is mapped, contents are right and the books are what the driver has."""
    generate(sanitize, SANITIZED_STEPS if sanitize else STEPS, faults=False)


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_any_call_within_them_may_fail(sanitize: str) -> None:
    """What fails so has changed nothing, and succeeds when it is called again."""
    generate(sanitize, SANITIZED_STEPS if sanitize else FAULTY_STEPS, faults=True)


def test_an_entry_point_that_is_left_out_is_told() -> None:
    done = attempt("fuzz", program="objects", UNIT_STEPS="2000", UNIT_WITHOUT="cuMemPoolTrimTo", **DRIVER)
    assert done.returncode == 1
    assert "cuMemPoolTrimTo: 0 right" in done.stderr


def test_a_step_that_does_not_end_is_told_with_stacks() -> None:
    done = attempt("fuzz", program="objects", UNIT_STEPS="100", UNIT_STEP_S="1", UNIT_HANGS="1", **DRIVER)
    assert done.returncode < 0
    assert "in step 50" in done.stderr
    assert done.stderr.count("thread ") > 2
