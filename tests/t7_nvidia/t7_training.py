"""PyTorch under memory limits: the same results to the bit, no cost without a limit, and for a long time."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import Program, member
from tests.t7_nvidia.trained import MAY, STEPS, STOP, Rewritten, outcome, rewrite, seconds_of, torch

RUNS, AT_ONCE = 20, 3
ENDURANCE_S = float(os.environ.get("GGROUP_ENDURANCE_S", "600"))
SAME = ("env", "PYTHONHASHSEED=0", "taskset", "--cpu-list", "2-5")
"""Command prefix: four CPUs, and one order of Python's sets, for each of several programs that take turns."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("expandable", [False, True])
def test_training_under_moving_limits(gpu_mount: Mounted, expandable: bool) -> None:
    """The losses of every step are the same to the bit: plain, managed, and with the limit rewritten all the time.

    With expandable segments PyTorch makes its memory by cuMemCreate, and maps it itself.
    """
    on = ("env", f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:{expandable}")
    with torch(None, "train", on=on) as run:
        expected, _ = outcome(run)
    assert len(expected) == 8 * STEPS
    with torch(gpu_mount, "train", on=on) as run:
        assert outcome(run)[0] == expected
    with torch(gpu_mount, "train", on=on) as run:
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
    """One long run (GGROUP_ENDURANCE_S seconds), and a plain one of as many steps: the losses are equal."""
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


def turns(runs: Sequence[Program], rounds: int, turn: int) -> list[list[list[float]]]:
    """Run programs in turns of `turn` steps; return for each program, by round, the durations of its steps.

    The first turn, and the first tenth of each turn, do not count.
    """
    result: list[list[list[float]]] = [[] for _ in runs]
    for number in range(rounds + 1):
        end = (number + 1) * turn
        for run, steps in zip(runs, result, strict=True):
            run.set(MAY, end)
            reaches(run, end)
            if number:
                steps.append(seconds_of(run, end - turn + max(1, turn // 10), end))
    for run in runs:
        assert run.process.wait(60) == 0
    return result


def reaches(run: Program, steps: int) -> None:
    wait_for(lambda: run.passes >= steps or run.process.poll() is not None, "it has had its turn", seconds=90)
    assert run.passes >= steps


def undisturbed(steps: list[list[float]]) -> float:
    """Return the duration of a step with the CPU for itself: a tenth of the steps are as fast."""
    return statistics.quantiles([one for turn in steps for one in turn], n=10)[0]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "turn"), [("train", 5), ("infer", 200)])
def test_overhead(gpu_mount: Mounted, mode: str, turn: int) -> None:
    """At most 2 % for a program without a limit.

    The CPU limits a step of this training (enqueuing it takes as long as doing it). A virtual machine's CPU is faster
    and slower by 20 % from one second to the next, and of equal programs one may be 3 % faster than another for as long
    as it lives. So twelve programs, six of them managed, take turns of a tenth of a second on the same CPUs.
    Undisturbed steps are compared, by the median of each round, whose median is known to 1 or 2 %: with 97 % certainty
    it is not below the one that is used.
    """
    rounds = 60
    with contextlib.ExitStack() as stack:
        mounts = (None, gpu_mount, gpu_mount, None) * 3
        runs = [stack.enter_context(torch(mount, mode, (rounds + 1) * turn, may=0, on=SAME)) for mount in mounts]
        times = turns(runs, rounds, turn)
    plain = [one for one, mount in zip(times, mounts, strict=True) if mount is None]
    managed = [one for one, mount in zip(times, mounts, strict=True) if mount is not None]
    for name, group in (("plain", plain), ("managed", managed)):
        print(f"{mode}, {name}: undisturbed {' '.join(f'{undisturbed(one) * 1e6:.0f}' for one in group)} us a step")
    best = sum(map(undisturbed, managed)) / sum(map(undisturbed, plain))
    ratios = sorted(
        sum(statistics.median(one[i]) for one in managed) / sum(statistics.median(one[i]) for one in plain)
        for i in range(rounds)
    )
    low, high = ratios[rounds // 2 - math.isqrt(rounds)], ratios[rounds // 2 + math.isqrt(rounds)]
    print(f"{mode}: {best:.4f} undisturbed; medians {statistics.median(ratios):.4f}, from {low:.4f} to {high:.4f}")
    assert best <= 1.02
    assert low <= 1.02
