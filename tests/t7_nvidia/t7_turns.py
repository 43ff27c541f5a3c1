"""Limits while programs take turns: what waits for its turn gives memory, and computes right."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.colocations import started
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import GIB, MIB, Program, member, nvml_used, program, run_in, slice_of, write

SIZE = 4 * GIB
"""Bytes that each of the programs computes with, besides its context."""
MISSED = 64 * MIB
"""Bytes over a limit that NVML may see."""
WRITES = 30


def waits(group: Member) -> bool:
    """Whether a program is off the runlist, with the GR engine alone, since it is the turn of another."""
    stat = group.flat("gcgroup.stat")
    return bool(stat["off_turn"] and stat["off_gr"])


@contextlib.contextmanager
def turns(mount: Mounted, elastic: str, within: str, count: int) -> Iterator[list[tuple[Program, Member]]]:
    """Programs that fill what a better one leaves, in turns."""
    with contextlib.ExitStack() as stack:
        words = run_in(mount, "compute.priority=5", within=within)
        runs = [stack.enter_context(program(*words, elastic, "PAGE", str(SIZE >> 20))) for _ in range(count)]
        yield [(run, member(mount, run)) for run in runs]


@contextlib.contextmanager
def lead(mount: Mounted) -> Iterator[None]:
    """A program that serves requests and goes before all others: they take turns behind it."""
    with started(mount, "requests") as one:
        write(Member(one.process.pid, 0, mount.group(one.process.pid)), "compute.priority", 0)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                one.latencies(1)

        server = threading.Thread(target=serve)
        server.start()
        try:
            yield
        finally:
            over.set()
            server.join()


def total_used(runs: Sequence[Program]) -> int:
    """Bytes that the driver counts for some programs."""
    return sum(nvml_used(run.pid) for run in runs)


@pytest.mark.timeout(240)
def test_what_waits_for_its_turn_gives(gpu_mount: Mounted, elastic: str) -> None:
    """Limits are written while the program is off for its turn: each write is taken, and holds by the driver."""
    with slice_of(gpu_mount, "turns") as (name, _), lead(gpu_mount), turns(gpu_mount, elastic, name, 3) as each:
        rng, refused, took, over = random.Random(1), Counter[str](), [], []
        for _ in range(WRITES):
            run, group = rng.choice(each)
            wait_for(lambda: waits(group), "it waits for its turn", seconds=15)  # noqa: B023
            limit = int(SIZE * rng.uniform(0.4, 0.9)) + 600 * MIB
            start = time.monotonic()
            try:
                write(group, "gmem.limit.high", limit)
            except OSError as error:
                refused[errno.errorcode.get(error.errno or 0, str(error))] += 1
            took.append(time.monotonic() - start)
            over.append(nvml_used(run.pid) - limit)
            write(group, "gmem.limit.high", "max")
        took.sort()
        print(
            f"{WRITES} writes to programs that wait: refused {dict(refused)}; "
            f"median {took[WRITES // 2] * 1e3:.0f} ms, worst {took[-1] * 1e3:.0f} ms; "
            f"at most {max(over) / MIB:.0f} MiB over by NVML"
        )
        assert not refused
        assert max(over) <= MISSED
        for run, _ in each:
            run.finish()


@pytest.mark.timeout(240)
def test_a_slice_holds_its_limit_during_turns(gpu_mount: Mounted, elastic: str) -> None:
    """A fourth program allocates over the budget while three take turns: the slice holds, its protected one too."""
    budget = 3 * SIZE + 3 * GIB
    with (
        slice_of(gpu_mount, "turns") as (name, slice_),
        lead(gpu_mount),
        turns(gpu_mount, elastic, name, 3) as each,
        contextlib.ExitStack() as stack,
    ):
        write(each[0][1], "gmem.limit.low", "max")
        write(slice_, "gmem.limit.high", budget)
        wait_for(lambda: any(waits(group) for _, group in each), "they take turns", seconds=15)
        words = run_in(gpu_mount, "compute.priority=5", within=name)
        fourth = stack.enter_context(program(*words, elastic, "PAGE", str(SIZE >> 20)))
        runs = [run for run, _ in each] + [fourth]
        most, end = 0, time.monotonic() + 20
        wait_for(lambda: fourth.passes > 2, "the fourth works", seconds=60)
        while time.monotonic() < end:
            most = max(most, total_used(runs))
        kept = each[0][1].flat("gmem.stat")
        print(f"budget {budget >> 20} MiB, NVML at most {most >> 20}; protected: {kept['swapout_bytes']} bytes out")
        assert most <= budget + MISSED
        assert kept["swapout_bytes"] == 0
        for run in runs:
            run.finish()
