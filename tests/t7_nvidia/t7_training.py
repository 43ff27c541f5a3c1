"""PyTorch under memory limits: the same to the bit, at no cost where there is no limit, and for long."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest

from ggroupfs.client import Member
from tests.mounted import Mounted
from tests.t7_nvidia.conftest import ROOT
from tests.t7_nvidia.programs import Program, current, member, program, run_in, write

STEPS = 200
RUNS, AT_ONCE = 20, 3
ENDURANCE_S = float(os.environ.get("GGROUP_ENDURANCE_S", "600"))
STOP = 8
"""Where workload.py is told to stop; its losses come after that."""


def torch(
    mount: Mounted | None, mode: str, steps: int = STEPS, *limits: str
) -> contextlib.AbstractContextManager[Program]:
    """A PyTorch program, managed or (None) plain."""
    words = [sys.executable, os.fspath(ROOT / "tests" / "t7_nvidia" / "workload.py"), mode, "PAGE", str(steps)]
    return program(*(run_in(mount, *limits) if mount else []), *words, size=8 * (steps + 2))


def outcome(run: Program, seconds: float = 60) -> tuple[bytes, float]:
    """What it computed in each step that it did, and its median step in microseconds."""
    assert run.process.stdout is not None
    assert run.process.wait(seconds) == 0
    return bytes(run.page[16 : 16 + 8 * run.passes]), float(run.process.stdout.readline())


@attrs.define
class Rewritten:
    """What became of a limit that was rewritten all the time."""

    footprint: int
    written: int = 0
    refused: Counter[str] = attrs.field(factory=Counter)
    """Writes that failed, by errno; the last one may, when the program has just ended."""
    moved: int = 0
    """Bytes moved out."""

    def __str__(self) -> str:
        refused = f", refused {dict(self.refused)}" if self.refused else ""
        return (
            f"footprint {self.footprint >> 20} MiB, limit written {self.written} times{refused}, "
            f"{self.moved >> 20} MiB moved out"
        )


def rewrite(run: Program, group: Member, seed: int, until: Callable[[Rewritten], bool]) -> Rewritten:
    """Sets gmem.limit.high to between 40 and 100 % of the footprint every 200 ms, at random; in the end to none."""
    rng, result = random.Random(seed), Rewritten(current(group))
    while run.process.poll() is None and not until(result):
        try:
            write(group, "gmem.limit.high", int(result.footprint * rng.uniform(0.4, 1.0)))
            result.written += 1
            result.moved = group.flat("gmem.stat")["swapout_bytes"]
        except OSError as error:
            result.refused[errno.errorcode.get(error.errno or 0, str(error))] += 1
        time.sleep(0.2)
    with contextlib.suppress(OSError):  # it may just have ended
        write(group, "gmem.limit.high", "max")
    return result


@pytest.mark.timeout(300)
def test_training_under_moving_limits(gpu_mount: Mounted) -> None:
    """The losses of every step are the same to the bit: plain, managed, and with the limit rewritten all the time."""
    with torch(None, "train") as run:
        expected, _ = outcome(run)
    assert len(expected) == 8 * STEPS
    with torch(gpu_mount, "train") as run:
        assert outcome(run)[0] == expected
    with torch(gpu_mount, "train") as run:
        result = rewrite(run, member(gpu_mount, run), 3, lambda _: run.passes >= STEPS - 5)
        assert outcome(run)[0] == expected
    print(f"{result}, losses equal")
    assert result.written >= 10
    assert result.moved > result.footprint


@pytest.mark.timeout(400)
def test_twenty_runs(gpu_mount: Mounted) -> None:
    """Twenty short runs, three at a time: none crashes, and each has the losses of the plain one to the bit."""
    with torch(None, "train") as run:
        expected, _ = outcome(run)
    assert len(expected) == 8 * STEPS

    def one(seed: int) -> tuple[Rewritten, int]:
        with torch(gpu_mount, "train") as run:
            group, end = member(gpu_mount, run), time.monotonic() + 60
            result = rewrite(
                run,
                group,
                seed,
                lambda so_far: (so_far.written >= 10 and run.passes >= 12) or time.monotonic() > end,
            )
            run.set(STOP, 1)
            losses, _ = outcome(run)
        assert losses == expected[: len(losses)], f"run {seed}"
        return result, len(losses) // 8

    start = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(one, range(RUNS)))
    for number, (result, steps) in enumerate(results):
        print(f"run {number}: {steps} steps; {result}")
    print(f"{RUNS} runs in {time.monotonic() - start:.0f} s, all losses equal")
    assert all(result.written >= 8 and steps >= 12 for result, steps in results)
    assert all(result.moved > 0 for result, _ in results)


@pytest.mark.timeout(1200)
def test_ten_minutes(gpu_mount: Mounted) -> None:
    """One long run (GGROUP_ENDURANCE_S seconds), and afterwards a plain one of as many steps: the losses are equal."""
    most = 60_000  # steps; a resident one takes some 20 ms
    with torch(gpu_mount, "train", most) as run:
        group, end = member(gpu_mount, run), time.monotonic() + ENDURANCE_S
        result = rewrite(run, group, 5, lambda _: time.monotonic() >= end or run.passes >= most - 100)
        run.set(STOP, 1)
        losses, median = outcome(run)
    steps = len(losses) // 8
    print(f"{ENDURANCE_S:.0f} s: {steps} steps, median {median / 1e3:.0f} ms; {result}", flush=True)
    with torch(None, "train", steps) as run:
        expected, plain = outcome(run, seconds=550)
    print(f"plain: median {plain / 1e3:.0f} ms; losses equal: {losses == expected}")
    assert losses == expected
    assert result.written >= ENDURANCE_S
    assert result.moved > result.footprint


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_overhead(gpu_mount: Mounted, mode: str) -> None:
    """At most 2 % for a program without a limit."""
    plain: list[float] = []
    managed: list[float] = []
    steps = 100 if mode == "train" else 2000
    for _ in range(4):
        for mount, times in ((None, plain), (gpu_mount, managed)):
            with torch(mount, mode, steps) as run:
                times.append(outcome(run)[1])
    ratio = statistics.median(managed) / statistics.median(plain)
    print(f"{mode}: {[round(t) for t in plain]} us plain, {[round(t) for t in managed]} us managed: {ratio:.4f}")
    assert ratio <= 1.02
