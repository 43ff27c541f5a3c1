"""Memory turns on a real GPU: the results of programs are right, whatever moves, and however the daemon ends."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted, daemons, kill, mounted, mountpoint
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import GIB, Program, current, member, program, run_in, slice_of, write
from tests.t7_nvidia.trained import STOP, outcome, rewrite, torch

SIZE = 4 * GIB
"""Memory that each program computes with, besides its context, bytes."""
COUNT = 3
"""Number of programs."""
ROOM = 0.6
"""Room of the slice, as a fraction of what the programs hold."""
TURNS, TURNS_S = 200, 200.0
"""Number of turns, of all programs together, during which they compute, and the time within which there must be as
many, seconds.
"""
WAIT = "500ms"
"""Longest wait for a turn: turns are short, so that there are many."""
KILLS, SLOWER_S = 20, 2.0
"""Number of times that the daemon is killed, and the time that each may cost, seconds."""
TRAINED_S = float(os.environ.get("GGROUP_MEMORY_TURNS_S", "480"))
"""Time for which programs train, seconds."""
MOST_STEPS = 60_000
"""Number of steps that a training program has room for, more than it can make in that time."""


@contextlib.contextmanager
def turning() -> Iterator[Mounted]:
    """Mount a tree with memory turns."""
    with mountpoint() as path, mounted(path, "turns=on", gpu="nvidia") as mount:
        yield mount


@contextlib.contextmanager
def worked(mount: Mounted, elastic: str, within: str) -> Iterator[list[Program]]:
    """Run programs that check every word at the end."""
    words = [*run_in(mount, within=within), elastic, "PAGE", str(SIZE >> 20)]
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(program(*words)) for _ in range(COUNT)]
        for run in runs:
            member(mount, run)
        yield runs


def pressed(slice_: Member) -> None:
    """Give the slice room for a fraction of what its programs hold, and a short wait for turns."""
    write(slice_, "compute.wait.max", WAIT)
    write(slice_, "gmem.limit.high", int(current(slice_) * ROOM))


def turns_of(slice_: Member) -> int:
    """Return the number of memory turns of all programs of a slice."""
    return slice_.flat("gcgroup.stat").get("memory_turns", 0)


def go_on(runs: Sequence[Program], seconds: float) -> float:
    """Wait until each program has made a pass; return the seconds that this took."""
    before = [run.passes for run in runs]
    return wait_for(
        lambda: all(run.passes > was for run, was in zip(runs, before, strict=True)), "all go on", seconds=seconds
    )


@pytest.mark.timeout(TURNS_S + 120)
def test_two_hundred_turns(elastic: str) -> None:
    """Every word of all programs is right afterwards."""
    with turning() as mount, slice_of(mount, "memory") as (name, slice_), worked(mount, elastic, name) as runs:
        pressed(slice_)
        start = time.monotonic()
        wait_for(lambda: turns_of(slice_) >= TURNS, f"{TURNS} turns", seconds=TURNS_S)
        seconds, stat = time.monotonic() - start, slice_.flat("gmem.stat")
        print(
            f"{turns_of(slice_)} turns in {seconds:.0f} s; fetched {stat['turn_fetched_bytes'] / 1e9:.0f} GB, evicted "
            f"{stat['turn_evicted_bytes'] / 1e9:.0f} GB; missed {stat['turn_missed_bytes'] >> 20} MiB, over "
            f"{stat['turn_over_bytes'] >> 20} MiB of {stat['working_set'] >> 20}; passes {[run.passes for run in runs]}"
        )
        assert all(run.passes > 2 for run in runs)
        for run in runs:
            run.finish()


@pytest.mark.timeout(400)
def test_a_daemon_killed_in_switches(elastic: str) -> None:
    """Whenever it is killed, all programs continue at once without turns, and have turns again with the next daemon."""
    rng, idle, back = random.Random(45), [], []
    with mountpoint() as place, daemons(place, "turns=on", gpu="nvidia") as start:
        mount = start()
        with slice_of(mount, "memory") as (name, slice_), worked(mount, elastic, name) as runs:
            pressed(slice_)
            wait_for(lambda: turns_of(slice_) > COUNT, "they have turns", seconds=60)
            usual = max(go_on(runs, 60) for _ in range(3))
            for _ in range(KILLS):
                time.sleep(rng.uniform(0.0, 0.5))
                kill(mount)
                idle.append(go_on(runs, 60))
                mount = start()
                wait_for(slice_.path.exists, "the slice is there")
                before = turns_of(slice_)
                again = wait_for(
                    lambda before=before: turns_of(slice_) > before,  # type: ignore[misc]
                    "turns",
                    seconds=60,
                )
                back.append(again)
            print(
                f"killed {KILLS} times; a pass of all took {usual:.2f} s at most before, {max(idle):.2f} s after a "
                f"kill; turns again {max(back):.2f} s after the next daemon answered at most"
            )
            for run in runs:
                run.finish()
        assert max(idle) <= usual + SLOWER_S


@pytest.mark.timeout(TRAINED_S + 450)
def test_training_with_turns_and_limits_that_move() -> None:
    """Losses are equal to the bit, of programs that train in turns while the limits of each are rewritten."""
    with turning() as mount, slice_of(mount, "memory") as (name, slice_), contextlib.ExitStack() as stack:
        on = run_in(mount, within=name)
        runs = [stack.enter_context(torch(None, "train", MOST_STEPS, on=on)) for _ in range(COUNT)]
        groups = [member(mount, run) for run in runs]
        pressed(slice_)
        end = time.monotonic() + TRAINED_S
        with ThreadPoolExecutor(COUNT) as pool:
            each = [
                pool.submit(rewrite, run, group, number, lambda _: time.monotonic() >= end)
                for number, (run, group) in enumerate(zip(runs, groups, strict=True))
            ]
            results = [one.result() for one in each]
        turns, steps = turns_of(slice_), [run.passes for run in runs]
        for run in runs:
            run.set(STOP, 1)
        losses = [outcome(run, seconds=120)[0] for run in runs]
    for result, done in zip(results, steps, strict=True):
        print(f"{done} steps; {result}", flush=True)
    with torch(None, "train", max(len(one) for one in losses) // 8) as run:
        expected, _ = outcome(run, seconds=300)
    print(f"{turns} turns; losses equal: {[one == expected[: len(one)] for one in losses]}")
    assert all(one == expected[: len(one)] for one in losses)
    assert turns >= TRAINED_S / 10
    assert all(steps)
    assert all(result.moved for result in results)
