"""Many threads charge while others change the tree under them: the books stay exact (stress.c)."""

from __future__ import annotations

import os

from tests.t5_module.harness import run_program

SECONDS = os.environ.get("GGROUP_STRESS_S", "5")


def test_the_books_are_exact() -> None:
    found = run_program("stress", SECONDS, seconds=float(SECONDS) + 60)
    print(found)
    assert found["wrong"] == 0
    idle = [name for name, count in found.items() if name not in ("wrong", "seed") and not count]
    assert not idle, f"this never happened: {idle}"
