"""The levers of a process, with values to set, for tests that are about every lever."""

from __future__ import annotations

import pytest

from tests.support.harness import MIB, StubGpu

LEVERS = (
    ("compute.timeslice", "set_timeslice", "4", "2\n"),
    ("compute.freeze", "detach", "1", "0\n"),
    ("gmem.limit.high", "reclaim", "4M", "max\n"),
)
"""(file, lever that a write to it moves, value, content before)."""

each_lever = pytest.mark.parametrize(("name", "lever", "value", "before"), LEVERS, ids=[name for name, *_ in LEVERS])
ASKED = {
    "gmem.limit.high": f"{48 * MIB}\n",
    "gmem.limit.low": f"{2 * MIB}\n",
    "gmem.swap.max": f"{32 * MIB}\n",
    "compute.timeslice": "4\n",
    "compute.freeze": "1\n",
    "compute.priority": "3\n",
    "compute.weight": "250\n",
    "compute.max": "30000 50000\n",
    "gmem.limit.max": f"{56 * MIB}\n",
    "gmem.oom.group": "1\n",
    "compute.wait.max": "300\n",
}
"""Settings of a process, each with a value other than the default."""


def stubs() -> tuple[StubGpu, StubGpu]:
    return StubGpu(0), StubGpu(1)
