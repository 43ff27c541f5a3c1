"""Everything that can be asked, by any user, in any way (fuzz.c). The kernel's log says whether that was right."""

from __future__ import annotations

import os

import pytest

from tests.t5_module.harness import run_program

SECONDS = float(os.environ.get("GGROUP_FUZZ_S", "15"))
SEED = os.environ.get("GGROUP_FUZZ_SEED", "")

RARE = {"UNREGISTER", "FORGET", "MOVE", "SWAP_IN", "DETACH_TSG"}
"""Calls that rarely succeed in a short time."""


@pytest.mark.timeout(SECONDS + 180)
def test_nothing_breaks() -> None:
    found = run_program("fuzz", f"{SECONDS:g}", *([SEED] if SEED else []), seconds=SECONDS + 150)
    print(found)
    assert (found["left"], found["checked"]) == (0, 0)
    assert found["answers"] > 0
    assert found["kills"] > 0
    never = {name for name, count in found["ok"].items() if not count}
    assert never <= RARE, f"these were never let through: {never}"
