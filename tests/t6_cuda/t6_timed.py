"""Level 6: turns of memory on a double with the times of an H200: the daemon, its scheduler, programs with the library.

What is asserted is in bytes, or a ratio of one run: all clocks are slowed down, so that a busy machine matters little.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from backend.common import tracing
from tests.bench import timeline
from tests.support import timed
from tests.support.harness import answers
from tests.support.timed import GIB, DilatedClock, Rig, rigged

MIB, LAYERS = 8704, 8
"""MiB of each program, and into how many allocations these are divided."""
COUNT, PERCENT = 4, 150
SETTLE_S, WINDOW_S = 4.0, 2.5
"""Seconds of the slow clock: until turns go on evenly, and of what is looked at, at least one of each program."""


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all in the host."""
    monkeypatch.setattr("backend.core.hostroom.available", lambda root: 100 * GIB)
    monkeypatch.setattr("backend.core.hostroom.left", lambda slice_, root: 1 << 62)


async def _measure(rig: Rig, directory: Path) -> tuple[float, float, list[int]]:
    """The part of their speed that programs keep, the part of what they read that came over the bus, and the passes of
    each."""
    for number in range(COUNT):
        rig.start(directory, MIB, LAYERS, *(["graph"] if number % 2 else []))
    await rig.work()
    alone = await rig.rates(0.5)
    held = int(await rig.h.read(f"{rig.files}gmem.current"))
    await rig.h.write(f"{rig.files}compute.wait.max", "2000")
    # A machine that is busy with other things may take longer for that than a write has.
    while await answers(rig.h.write(f"{rig.files}gmem.limit.high", held * 100 // PERCENT)):
        pass
    await trio.sleep(SETTLE_S)
    before, (of_gpu, of_host) = [one.passes for one in rig.programs], rig.read
    rates = await rig.rates(WINDOW_S)
    passes = [one.passes - start for one, start in zip(rig.programs, before, strict=True)]
    over_bus = (rig.read[1] - of_host) / (sum(rig.read) - of_gpu - of_host)
    return sum(rates) / sum(alone), over_bus, passes


def test_decode_loops_that_need_half_as_much_again_keep_their_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads all of its memory in each step, by launches or by a graph. What they need of it comes behind the turns
    of others; the trace of the daemon tells where the time goes."""
    trace = tracing.Trace(str(tmp_path / "trace"))
    for module in ("backend.cuda.moves", "backend.scheduler.memory.switch", "backend.scheduler.memory.pieces"):
        monkeypatch.setattr(f"{module}.TRACE", trace)
    monkeypatch.setattr("backend.scheduler.memory.telling.TRACE", trace)

    async def main() -> None:
        async with rigged(tmp_path) as rig:
            kept, over_bus, passes = await _measure(rig, tmp_path)
            trace.close()
        table = timeline.table((tmp_path / "trace").read_text().splitlines())
        said = f"kept {kept:.2f}, read over the bus {over_bus:.4f}, passes {passes}\n{table}"
        assert over_bus <= 0.02, said
        assert kept >= 0.3, said  # 0.9 at a load of 8 on two CPUs, 0.49 at 22: what is launched late is not done
        assert min(passes) >= max(passes) / 4, said

    trio.run(main, clock=DilatedClock())
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert {"turn", "gap", "end", "begin"} <= {line["what"] for line in lines}
    assert timed.DILATION >= 4
