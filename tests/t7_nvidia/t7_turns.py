"""Limits while programs take turns: a program that waits for its turn gives memory, and computes right."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.colocations import LOAD, Colocated, p99, started
from tests.t7_nvidia.conftest import WANT, built, wait_for
from tests.t7_nvidia.programs import GIB, MIB, Program, current, member, nvml_used, program, run_in, slice_of, write
from tests.t7_nvidia.trained import STOP, Rewritten, outcome, rewrite, torch

SIZE = 4 * GIB
"""Bytes that each program computes with, besides its context."""
MISSED = 64 * MIB
"""Bytes over a limit that NVML may show."""
WRITES = 30
"""Number of writes of limits to a program that waits for its turn before and after, and has moved memory in between."""
WRITTEN_S = 150.0
"""Seconds within which there must be so many."""
SLICE_S = 20.0
"""Seconds for which a full slice is watched."""
LOOK_S = 0.02
"""Seconds between two looks whether a waiting program has moved memory."""
ALONE_S = 30.0
"""Seconds for which a program trains alone, its limit rewritten, to measure its speed."""
TRAINED_S = float(os.environ.get("GGROUP_TURNS_S", "480"))
"""Seconds for which programs train in turns."""
MOST_STEPS = 60_000
"""Number of steps for which a training program has room: more than it does in that time."""
LONG_US = 2_000_000
"""Microseconds of a kernel that outlasts the end of any turn."""
WATCHED_S = 40.0
"""Seconds for which programs with such kernels are watched."""


def wait_of(group: Member) -> int | None:
    """Return the number of the wait in which a program is off the runlist, with GR alone, during another's turn; None
    while it is on the runlist."""
    stat = group.flat("gcgroup.stat")
    return stat["nr_throttled"] if stat["off_turn"] and stat["off_gr"] else None


def waits(group: Member) -> bool:
    """Return whether it waits like that."""
    return wait_of(group) is not None


def moved_out(group: Member) -> int:
    """Return the bytes that went to the host so far."""
    return group.flat("gmem.stat")["swapout_bytes"]


@contextlib.contextmanager
def moves_seen(group: Member) -> Iterator[list[int]]:
    """Yield a list of the bytes that the program moved out between two looks of one wait for its turn."""
    over, moves = threading.Event(), list[int]()

    def look() -> None:
        while not over.is_set():
            wait, before = wait_of(group), moved_out(group)
            over.wait(LOOK_S)
            after = moved_out(group)
            if after > before and wait is not None and wait_of(group) == wait:
                moves.append(after - before)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield moves
        finally:
            over.set()
            looking.result()


@contextlib.contextmanager
def turns(
    mount: Mounted, elastic: str, within: str, count: int, *options: str
) -> Iterator[list[tuple[Program, Member]]]:
    """Run programs that fill what a better one leaves, in turns."""
    with contextlib.ExitStack() as stack:
        words = run_in(mount, "compute.priority=5", within=within)
        words += [elastic, "PAGE", str(SIZE >> 20), *options]
        runs = [stack.enter_context(program(*words)) for _ in range(count)]
        yield [(run, member(mount, run)) for run in runs]


@contextlib.contextmanager
def lead(mount: Mounted) -> Iterator[Colocated]:
    """Run a program that serves requests and precedes all others, so that they take turns behind it."""
    with started(mount, "requests") as one:
        write(Member(one.process.pid, 0, mount.group(one.process.pid)), "compute.priority", 0)
        yield one


@contextlib.contextmanager
def serving(one: Colocated) -> Iterator[list[float]]:
    """Have it serve meanwhile; yield the latencies so far, in seconds."""
    over, latencies = threading.Event(), list[float]()

    def serve() -> None:
        while not over.is_set():
            latencies.extend(one.latencies(1))

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield latencies
    finally:
        over.set()
        server.join()


@contextlib.contextmanager
def totals_used(runs: Sequence[Program]) -> Iterator[list[int]]:
    """Yield a list of the total bytes that the driver counts for some programs, including ones added meanwhile."""
    over, totals = threading.Event(), list[int]()

    def look() -> None:
        while not over.is_set():
            totals.append(sum(nvml_used(run.pid) for run in list(runs)))

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            yield totals
        finally:
            over.set()
            looking.result()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("options", [(), ("1", "steps")], ids=["busy", "steps"])
def test_what_waits_for_its_turn_gives(gpu_mount: Mounted, elastic: str, options: Sequence[str]) -> None:
    """Limits are written while the program is off for its turn: each write succeeds, and holds by the driver. This
    includes turns that end in a rest of the program, which then begins with events."""
    with (
        slice_of(gpu_mount, "turns") as (name, _),
        lead(gpu_mount) as one,
        serving(one),
        turns(gpu_mount, elastic, name, 3, *options) as each,
    ):
        rng, refused, written = random.Random(1), Counter[str](), 0
        took, over = list[float](), list[int]()
        end = time.monotonic() + WRITTEN_S
        while len(took) < WRITES and time.monotonic() < end:
            run, group = rng.choice(each)
            limit = int(SIZE * rng.uniform(0.4, 0.9)) + 600 * MIB
            wait_for(lambda: current(group) > limit, "its memory is back", seconds=30)  # noqa: B023
            wait_for(lambda: waits(group), "it waits for its turn", seconds=15)  # noqa: B023
            wait, before, start = wait_of(group), moved_out(group), time.monotonic()
            try:
                write(group, "gmem.limit.high", limit)
            except OSError as error:
                refused[errno.errorcode.get(error.errno or 0, str(error))] += 1
            seconds = time.monotonic() - start
            over.append(nvml_used(run.pid) - limit)
            if moved_out(group) > before and wait is not None and wait_of(group) == wait:
                took.append(seconds)
            written += 1
            write(group, "gmem.limit.high", "max")
        took.sort()
        assert took, f"{written} writes"
        print(
            f"{written} writes, {len(took)} of which moved memory of a program that waited all the time: refused "
            f"{dict(refused)}; median {took[len(took) // 2] * 1e3:.0f} ms, worst {took[-1] * 1e3:.0f} ms; "
            f"at most {max(over) / MIB:.0f} MiB over by NVML"
        )
        assert not refused
        assert len(took) >= WRITES
        assert max(over) <= MISSED
        for run, _ in each:
            run.finish()


@pytest.mark.timeout(240)
def test_a_slice_holds_its_limit_during_turns(gpu_mount: Mounted, elastic: str) -> None:
    """A fourth program allocates over the budget while three take turns: the limit holds, and so does protection."""
    budget = 3 * SIZE + 3 * GIB
    with (
        slice_of(gpu_mount, "turns") as (name, slice_),
        lead(gpu_mount) as one,
        serving(one),
        turns(gpu_mount, elastic, name, 3) as each,
        contextlib.ExitStack() as stack,
    ):
        write(each[0][1], "gmem.limit.low", "max")
        write(slice_, "gmem.limit.high", budget)
        wait_for(lambda: any(waits(group) for _, group in each), "they take turns", seconds=15)
        words = run_in(gpu_mount, "compute.priority=5", within=name)
        runs = [run for run, _ in each]
        waited = [group.flat("gcgroup.stat")["nr_throttled"] for _, group in each]
        with totals_used(runs) as totals:
            fourth = stack.enter_context(program(*words, elastic, "PAGE", str(SIZE >> 20)))
            runs.append(fourth)
            wait_for(lambda: fourth.passes > 2, "the fourth works", seconds=60)
            time.sleep(SLICE_S)
        times = [group.flat("gcgroup.stat")["nr_throttled"] for _, group in each]
        waited = [now - before for now, before in zip(times, waited, strict=True)]
        kept, most = moved_out(each[0][1]), max(totals)
        print(
            f"budget {budget >> 20} MiB, NVML {most >> 20} at most in {len(totals)} looks; {waited} turns waited "
            f"meanwhile; protected: {kept} bytes out"
        )
        assert budget - GIB < most <= budget + MISSED
        assert all(waited)
        assert kept == 0
        for run in runs:
            run.finish()


def trained_alone(mount: Mounted) -> float:
    """Return the steps a second of a program that trains alone, its limit rewritten all the time."""
    with torch(mount, "train", MOST_STEPS) as run:
        group, before, start = member(mount, run), run.passes, time.monotonic()
        rewrite(run, group, 0, lambda _: time.monotonic() >= start + ALONE_S)
        rate = (run.passes - before) / (time.monotonic() - start)
        run.set(STOP, 1)
        outcome(run)
    return rate


@pytest.mark.timeout(TRAINED_S + ALONE_S + 450)
def test_training_in_turns(gpu_mount: Mounted) -> None:
    """Three programs train in turns behind one that serves, their limits rewritten all the time: losses are the same to
    the bit, and each does at least half of what a third of the remaining time allows."""
    least = trained_alone(gpu_mount) * (1 - LOAD) / 3 / 2 * TRAINED_S
    with contextlib.ExitStack() as stack:
        serves = stack.enter_context(lead(gpu_mount))
        stack.enter_context(serving(serves))
        runs = [stack.enter_context(torch(gpu_mount, "train", MOST_STEPS, "compute.priority=5")) for _ in range(3)]
        groups = [member(gpu_mount, run) for run in runs]
        before, end = [run.passes for run in runs], time.monotonic() + TRAINED_S

        def one(number: int) -> tuple[Rewritten, int]:
            with moves_seen(groups[number]) as moves:
                result = rewrite(runs[number], groups[number], number, lambda _: time.monotonic() >= end)
            return result, len(moves)

        with ThreadPoolExecutor(len(runs)) as pool:
            results, moved = zip(*pool.map(one, range(len(runs))), strict=True)
        waited = [group.flat("gcgroup.stat")["nr_throttled"] for group in groups]
        steps = [run.passes - was for run, was in zip(runs, before, strict=True)]
        for run in runs:
            run.set(STOP, 1)
        losses = [outcome(run)[0] for run in runs]
    for result, times, done, seen in zip(results, waited, steps, moved, strict=True):
        print(
            f"{done} steps, {least:.0f} at least; {times} times off for a turn; seen to move memory then {seen} times; "
            f"{result}",
            flush=True,
        )
    with torch(None, "train", max(len(each) for each in losses) // 8) as run:
        expected, _ = outcome(run, seconds=300)
    print(f"losses equal: {[each == expected[: len(each)] for each in losses]}")
    assert all(each == expected[: len(each)] for each in losses)
    assert all(done >= least for done in steps)
    assert all(times >= TRAINED_S / 10 for times in waited)
    assert all(seen >= TRAINED_S / 10 for seen in moved)
    assert all(result.moved > result.footprint for result in results)
    assert not any(result.refused for result in results)


@pytest.mark.timeout(300)
def test_kernels_that_no_turn_is_long_enough_for(
    gpu_mount: Mounted, elastic: str, binary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A program with kernels of 2 s, one with a kernel that never ends and one with short ones take turns behind one
    that serves: all go on, and the cost is reported."""
    endless = built(tmp_path_factory, "endless")
    words = run_in(gpu_mount, "compute.priority=5")
    with lead(gpu_mount) as serves:
        alone = p99(serves.latencies())
        with (
            program(*words, os.fspath(binary), "PAGE", str(LONG_US)) as long,
            program(*words, endless, "PAGE") as persists,
            program(*words, elastic, "PAGE", str(SIZE >> 20)) as short,
            serving(serves) as latencies,
        ):
            long.set(WANT, 1)
            groups = [member(gpu_mount, run) for run in (long, persists, short)]
            before, start = [run.passes for run in (long, persists, short)], time.monotonic()
            latencies.clear()
            undrained, over = Counter[str](), start + WATCHED_S
            while time.monotonic() < over:
                for name, group in zip(("long", "persists", "short"), groups, strict=True):
                    undrained[name] += waits(group) and "compute.turn_end late" in group.read("gcgroup.record")
                time.sleep(0.05)
            seconds = time.monotonic() - start
            done = [run.passes - one for run, one in zip((long, persists, short), before, strict=True)]
            beside = p99(latencies)
            throttled = [group.flat("gcgroup.stat")["nr_throttled"] for group in groups]
            persists.finish()
            short.finish()
        print(
            f"in {seconds:.0f} s: {done[0]} kernels of 2 s, {done[1] / seconds:.0f} ms a second of the endless one, "
            f"{done[2] / seconds:.1f} passes/s; times off for a turn {throttled}; seen waiting and not drained "
            f"{dict(undrained)}; p99 of requests {alone * 1e3:.1f} ms alone, {beside * 1e3:.1f} beside them"
        )
        assert done[0] >= 2
        assert done[1] >= 1000
        assert done[2] >= 2
        assert all(throttled)
        assert undrained["persists"]
