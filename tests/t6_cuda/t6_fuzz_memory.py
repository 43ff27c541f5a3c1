"""Level 6: every entry point that makes, maps, shares or frees memory, by a generator (unit/fuzz), while memory moves.

The calls that must be made come from entries.def: the generator fails if a row about memory was not called. SEED
selects the calls, FUZZ their number: 50000 for an evening.
"""

from __future__ import annotations

import os

import pytest

from tests.t6_cuda.units import TWO_GPUS, attempt, run_unit

STEPS = int(os.environ.get("FUZZ", "2000"))
"""Steps of a generator, each of a call or a few. This many reach every entry point."""

FAULTY_STEPS = STEPS * 2
"""Steps where each driver call within each entry point fails once, which takes more."""

SANITIZED_STEPS = STEPS * 3 // 20
"""Steps with a sanitizer, which is several times slower; the entry points reached are not checked then."""

SEED = os.environ.get("SEED", "1")
"""Seed of the steps."""

DRIVER = {**TWO_GPUS, "FAKE_LENT": "1", "FAKE_MEMORY": str(4 << 30)}
"""A GPU with room for all that a generator makes: only the limit bounds it."""


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
    """Whatever is mapped, contents are right and the books agree with the driver."""
    generate(sanitize, SANITIZED_STEPS if sanitize else STEPS, faults=False)


@pytest.mark.parametrize("sanitize", ["", "address,undefined", "thread"])
def test_any_call_within_them_may_fail(sanitize: str) -> None:
    """A call that fails so has changed nothing, and succeeds when it is repeated."""
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
