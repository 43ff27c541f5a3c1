"""Programs of a hostile user that make all calls at the same time, beside an honest user's program (hostile.c)."""

from __future__ import annotations

import os

import pytest

from tests.t5_module.harness import run_program

SECONDS = float(os.environ.get("GGROUP_HOSTILE_S", "20"))
SEED = os.environ.get("GGROUP_HOSTILE_SEED", "")

PAIRS = 91
"""Number of pairs of two tenants' calls, pairs of equal calls included."""
PAIRS_WITH_ROOT = 169
"""Number of pairs of a tenant's and a root's call."""
MET_LEAST = 0.5
"""Fraction of pairs that meet in a short run, which is prolonged up to five times for it; in a long one all do."""
SLOWER_MOST = 5.0
"""Factor of the neighbour's typical worst call in a step over that beside programs that only spin."""
FLOOR_US = 20_000.0
"""Microseconds that are always allowed: another program's time slice on an emulated processor."""


@pytest.mark.timeout(5 * SECONDS + 300)
def test_nobody_can_hurt_a_neighbour() -> None:
    found = run_program("hostile", f"{SECONDS:g}", *([SEED] if SEED else []), seconds=5 * SECONDS + 270)
    print(found)
    assert not any(found["wrong"].values()), found["wrong"]
    assert found["let_through"] == 0
    assert found["neighbour_asked"] > 0
    assert (found["neighbour_percent"], found["neighbour_errno"]) == (100, 0)
    idle = {"killed", "execed", "forked", "unshared", "refused", "looked", "quiet", "served"}
    assert not {name for name in idle if not found[name]}, "this never happened"
    assert found["pairs"] + found["pairs_with_root"] >= int(MET_LEAST * (PAIRS + PAIRS_WITH_ROOT))
    if SECONDS >= 300:
        assert (found["pairs"], found["pairs_with_root"]) == (PAIRS, PAIRS_WITH_ROOT), found["never"]
    worst = found["typical_worst_us"]
    assert worst["attacked"] <= max(SLOWER_MOST * worst["spinning"], FLOOR_US)
