"""What a charge costs, as a multiple of getpid() on the same machine (bench.c)."""

from __future__ import annotations

from pathlib import Path

from tests.t5_module.harness import run_program

RATIO_MOST = 5.0
"""A charge and an uncharge, of what getpid() costs, on a real processor."""

OVER_FLOOR_MOST = 2.5
"""... of what two ioctls cost that do nothing, on an emulated one. There it costs next to nothing to enter the kernel,
and each instruction in it the same: two ioctls that are refused at once come to 4 to 6 times a getpid()."""


def test_charge_and_uncharge() -> None:
    found = run_program("bench")
    print(found)
    if "QEMU TCG" in Path("/proc/cpuinfo").read_text():
        assert found["over_floor"] <= OVER_FLOOR_MOST, found
    else:
        assert found["tenant"] <= RATIO_MOST, found
