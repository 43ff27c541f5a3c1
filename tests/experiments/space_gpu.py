#!/usr/bin/env python3
"""What is to be shown of space within a slice on a GPU: small programs together, what is outside, and parts of the SMs.

    python3 tests/experiments/space_gpu.py --plan [CELL...]    the cells and the seconds that they take, without a GPU
    python3 tests/experiments/space_gpu.py [CELL...]           measure them, as root; OUT: a folder for the results
    python3 tests/experiments/space_gpu.py --merge [FILE...]   the results in these files, or in OUT
    python3 tests/experiments/space_gpu.py --self-test [CELL...]    as root, without a GPU: the cells by programs that
                                                               pretend, on a software GPU; MPS is not there, and fails

CELL: names of cells, or what they begin with. Each is written down as it comes; one that fails is told of, and the next
one is measured. LIMIT_S (500): seconds for all of them; a session that has no room in it is left out. What the driver
and its levers do is in spatial.py.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([os.fspath(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

from tests.experiments.spaced import cells, results  # noqa: E402
from tests.experiments.timed.cells import chosen, plan  # noqa: E402
from tests.experiments.timed.results import Found, merged  # noqa: E402

OUT = Path(os.environ.get("OUT") or "/tmp/space-gpu")
ALL_S = 500.0
"""Seconds of all cells, at most."""


def measure(words: Sequence[str], out: Path, pretend: bool = False) -> None:
    """Measure cells, one session after the other, and tell of all."""
    from tests.experiments.spaced.machine import Machine, Pretending
    from tests.experiments.spaced.measure import Measure

    began = time.monotonic()
    mine, found = chosen(words, cells.CELLS), Found(out, "space", results.line)
    print(plan(mine, cells.STARTS).splitlines()[-1], flush=True)
    with tempfile.TemporaryDirectory(prefix="ggroup-space-") as name:
        machine = (Pretending if pretend else Machine)(Path(name))
        machine.build()
        limit_s = float(os.environ.get("LIMIT_S", ALL_S))
        Measure(found, machine, limit_s - (time.monotonic() - began)).run(mine)
    print(f"{time.monotonic() - began:.0f} s", flush=True)
    merge([], out)


def merge(words: Sequence[str], out: Path) -> None:
    """Tell of the results in files together."""
    print(results.told(merged([Path(word) for word in words] or sorted(out.rglob("space-*.json")))))


def self_test(words: Sequence[str]) -> None:
    """Measure cells on a software GPU, whose spaces and parts of SMs are what they are to be on any."""
    with tempfile.TemporaryDirectory() as name:
        measure(words, Path(name), pretend=True)


if __name__ == "__main__":
    option, *rest = sys.argv[1:] or [""]
    if option == "--plan":
        print(plan(chosen(rest, cells.CELLS), cells.STARTS))
    elif option == "--merge":
        merge(rest, OUT)
    elif option == "--self-test":
        self_test(rest)
    else:
        measure(sys.argv[1:], OUT)
