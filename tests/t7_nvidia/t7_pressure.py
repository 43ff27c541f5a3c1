"""Programs that together hold more GPU memory than allowed: which of them give, and what that costs the others."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import time
from collections.abc import Iterator

import attrs
import pytest

from backend.core.reclaimer import IGNORED_S, USERMEM_S
from backend.process.running import is_stopped
from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import built, wait_for
from tests.t7_nvidia.programs import (
    GIB,
    MIB,
    Program,
    current,
    cycles,
    held,
    member,
    program,
    rate,
    run_in,
    slice_of,
    write,
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "cache")


@pytest.fixture(scope="session")
def alloc(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "alloc")


# A budget on a slice


SAFE, OTHER, SHORT = 4096 * MIB, 6144 * MIB, 2 * GIB


def kept_all(group: Member) -> None:
    """Check that none of its memory is, or ever was, in the host."""
    stat = group.flat("gmem.stat")
    assert (stat["swapped"], stat["swapout"], stat["swapout_bytes"]) == (0, 0, 0)


@pytest.mark.timeout(300)
def test_two_programs_over_a_budget(gpu_mount: Mounted, elastic: str) -> None:
    """Both finish with their data right, and the one under its low loses nothing."""
    with contextlib.ExitStack() as stack:
        name, group = stack.enter_context(slice_of(gpu_mount, "budget"))
        words = run_in(gpu_mount, "gmem.limit.low=6G", within=name)
        safe = stack.enter_context(program(*words, elastic, "PAGE", str(SAFE >> 20)))
        kept = member(gpu_mount, safe)
        alone = rate(safe, 1)
        words = run_in(gpu_mount, within=name)
        other = stack.enter_context(program(*words, elastic, "PAGE", str(OTHER >> 20), "16"))
        gives = member(gpu_mount, other)
        footprints = held(group)
        assert footprints >= SAFE + OTHER
        beside, other_beside = rate(safe, 2), rate(other, 1)
        start = time.monotonic()
        write(group, "gmem.limit.high", footprints - SHORT)
        wait_for(lambda: current(group) <= footprints - SHORT, "the other gives", seconds=10)
        took = time.monotonic() - start
        pressed, other_pressed, later = rate(safe, 3), cycles(other, 2), rate(safe, 3)
        print(
            f"{footprints >> 20} MiB cut by {SHORT >> 20} MiB in {took * 1e3:.0f} ms; passes/s under low: alone "
            f"{alone:.0f}, with a neighbour {beside:.0f}, with one that gives {pressed:.0f} ({pressed / beside:.3f}), "
            f"later {later:.0f} ({later / beside:.3f}); the one that gives {other_beside:.0f}, then {other_pressed:.1f}"
        )
        print(f"under low: {kept.flat('gmem.stat')}\ngives: {gives.flat('gmem.stat')}")
        kept_all(kept)
        assert gives.flat("gmem.stat")["swapped"] >= SHORT - 64 * MIB
        safe.finish()
        other.finish()


@pytest.mark.timeout(300)
def test_a_budget_that_a_program_grows_over(gpu_mount: Mounted, elastic: str) -> None:
    """The budget exists before the second program starts: it allocates all that it wants, and keeps what is left."""
    with contextlib.ExitStack() as stack:
        name, group = stack.enter_context(slice_of(gpu_mount, "grows"))
        words = run_in(gpu_mount, "gmem.limit.low=6G", within=name)
        safe = stack.enter_context(program(*words, elastic, "PAGE", str(SAFE >> 20)))
        kept = member(gpu_mount, safe)
        footprint = held(kept)
        alone = rate(safe, 1)
        limit = 2 * (footprint - SAFE) + SAFE + OTHER - SHORT
        write(group, "gmem.limit.high", limit)
        words = run_in(gpu_mount, within=name)
        other = stack.enter_context(program(*words, elastic, "PAGE", str(OTHER >> 20), "16"))
        start = time.monotonic()
        gives = member(gpu_mount, other)
        took = time.monotonic() - start
        wait_for(lambda: current(group) <= limit, "the slice is within its budget", seconds=10)
        pressed, later = rate(safe, 3), rate(safe, 3)
        print(
            f"works after {took:.1f} s; passes/s under low: alone {alone:.0f}, with one that gives {pressed:.0f}, "
            f"later {later:.0f}"
        )
        print(f"under low: {kept.flat('gmem.stat')}\ngives: {gives.flat('gmem.stat')}")
        kept_all(kept)
        assert gives.flat("gmem.stat")["swapped"] >= SHORT - 256 * MIB  # contexts differ in size
        safe.finish()
        other.finish()


# usermemfd


OPEN, OPENED, PIECES, ASKED, ASKED_BYTES, FREED_NS = 32, 36, 40, 44, 48, 56
"""Offsets in the page of cache.cu."""
HOT, CACHE, PIECE = 2048, 2048, 64
"""MiB of its working set, of its cache, and of a piece of the cache."""


def opened(run: Program) -> None:
    """Have cache.cu open its usermemfd."""
    run.set(OPEN, 1)
    wait_for(lambda: run.u32(OPENED) != 0, "it has opened its usermemfd")
    assert run.u32(OPENED) == 1, os.strerror(run.u32(OPENED) - 1000)


def caching(
    mount: Mounted, cache: str, how: str, hot: int = HOT, besides: int = CACHE, within: str | None = None
) -> list[str]:
    """Return the words of a cache.cu; `hot` and `besides` are in MiB."""
    return [*run_in(mount, within=within), cache, "PAGE", os.fspath(mount.path), "0", how, str(hot), str(besides)]


@pytest.mark.timeout(180)
def test_who_listens_keeps_what_is_hot(gpu_mount: Mounted, cache: str) -> None:
    """A program that drops its cache on the event has nothing in the host, and is as fast as before."""
    cut = 1536 * MIB
    with program(*caching(gpu_mount, cache, "listen")) as run:
        group = member(gpu_mount, run)
        opened(run)
        footprint = held(group)
        assert footprint >= (HOT + CACHE) * MIB
        before = rate(run, 2)
        start = time.monotonic()
        write(group, "gmem.limit.high", footprint - cut)
        took = time.monotonic() - start
        after = rate(run, 2)
        left, asked, stat = run.u32(PIECES), run.u32(ASKED), group.flat("gmem.stat")
        print(
            f"cut by {cut >> 20} MiB: written in {took * 1e3:.0f} ms, asked {asked} times, last for "
            f"{run.u64(ASKED_BYTES) >> 20} MiB, freed in {run.u64(FREED_NS) / 1e6:.1f} ms; cache "
            f"{left * PIECE} of {CACHE} MiB; passes/s {before:.1f}, then {after:.1f} ({after / before:.4f})"
        )
        print(stat)
        kept_all(group)
        assert current(group) <= footprint - cut
        assert 0 < left <= (CACHE - (cut >> 20)) // PIECE
        assert after >= 0.95 * before
        run.finish()


@pytest.mark.timeout(180)
def test_who_ignores_it_is_swapped_after_the_deadline(gpu_mount: Mounted, cache: str) -> None:
    cut = 1536 * MIB
    with program(*caching(gpu_mount, cache, "ignore")) as run:
        group = member(gpu_mount, run)
        opened(run)
        footprint = held(group)
        before = rate(run, 1)
        took = []
        for part in (cut, cut + 256 * MIB):
            start = time.monotonic()
            write(group, "gmem.limit.high", footprint - part)
            took.append(time.monotonic() - start)
        after, stat = rate(run, 2), group.flat("gmem.stat")
        print(
            f"cut by {cut >> 20} MiB in {took[0] * 1e3:.0f} ms, by 256 MiB more in {took[1] * 1e3:.0f} ms; "
            f"passes/s {before:.1f}, then {after:.1f}"
        )
        print(stat)
        assert took[0] >= USERMEM_S
        assert stat["swapped"] >= cut + 256 * MIB - 64 * MIB
        assert run.u32(PIECES) == CACHE // PIECE
        run.finish()


# A neighbour of such programs


GO, IDLE, COUNT, TIMES = 32, 36, 40, 64
"""Offsets in the page of alloc.cu."""
STOPS = 20
ALLOC_PAGES = 65536
ALLOCATED, PIECES_AT_ONCE = 256, 4
"""MiB of an allocation, and number of allocations that it holds at once."""


@attrs.frozen
class Sample:
    """Measurements of the neighbour in one phase."""

    seconds: float
    rate: float
    """Passes a second of its kernels."""
    waits: list[float]
    """Seconds of each cudaMalloc."""

    @property
    def median(self) -> float:
        return statistics.median(self.waits)

    @property
    def worst(self) -> float:
        return max(self.waits)

    def slower(self, seconds: float) -> int:
        """Return how many took longer."""
        return sum(wait > seconds for wait in self.waits)

    def __str__(self) -> str:
        return (
            f"{len(self.waits)} cudaMallocs in {self.seconds:.1f} s, median {self.median * 1e3:.1f} ms, worst "
            f"{self.worst * 1e3:.1f} ms, {self.slower(USERMEM_S)} above {USERMEM_S * 1e3:.0f} ms; "
            f"{self.rate:.0f} passes/s"
        )


@attrs.frozen
class Crowd:
    """Three programs in a slice with a budget. What the neighbour allocates must come from the others."""

    group: Member
    """Control files of the slice."""
    other: Program
    """Program with a usermemfd, which it opens when told to and never reads. It holds the most, and is to give
    first."""
    gives: Member
    """Its control files."""
    giver: Program
    """Ordinary program, which gives in its place."""
    gives_too: Member
    """Its control files."""
    neighbour: Program
    """Protected program that allocates."""

    def begin(self) -> None:
        """Have the neighbour begin to allocate."""
        self.neighbour.set(GO, 1)

    def end(self) -> None:
        """Have the neighbour stop, with nothing allocated."""
        self.neighbour.set(GO, 0)
        wait_for(lambda: self.neighbour.u32(IDLE) == 1, "the neighbour is idle", seconds=30)

    def rest(self, seconds: float = 5) -> None:
        """Wait until the others have their memory back, or nearly so."""
        end = time.monotonic() + seconds
        while self.group.flat("gmem.stat")["swapped"] > 128 * MIB and time.monotonic() < end:
            time.sleep(0.05)

    def waits(self, first: int) -> list[float]:
        """Return the seconds of its cudaMallocs from that one on."""
        return [self.neighbour.u64(TIMES + 8 * i) / 1e9 for i in range(first, self.neighbour.u64(COUNT))]

    def phase(self, seconds: float) -> Sample:
        """Let the neighbour allocate for some seconds."""
        first, passes, start = self.neighbour.u64(COUNT), self.neighbour.passes, time.monotonic()
        self.begin()
        time.sleep(seconds)
        self.end()
        elapsed = time.monotonic() - start
        return Sample(elapsed, (self.neighbour.passes - passes) / elapsed, self.waits(first))

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the other program meanwhile."""
        os.kill(self.other.pid, signal.SIGSTOP)
        try:
            wait_for(lambda: is_stopped(self.other.pid), "it is stopped")
            yield
        finally:
            os.kill(self.other.pid, signal.SIGCONT)

    def finish(self) -> None:
        """Finish all of them, with their data right."""
        for run in (self.neighbour, self.other, self.giver):
            run.finish()


@contextlib.contextmanager
def crowd(mount: Mounted, name: str, cache: str, alloc: str) -> Iterator[Crowd]:
    """Start them, and have each give once: all that they have is hot, so it comes back whenever there is room."""
    with contextlib.ExitStack() as stack:
        within, group = stack.enter_context(slice_of(mount, name))
        other = stack.enter_context(program(*caching(mount, cache, "ignore", 4608, 512, within)))
        giver = stack.enter_context(program(*caching(mount, cache, "ignore", 3072, 512, within)))
        words = run_in(mount, "gmem.limit.low=16G", within=within)
        numbers = ("256", str(ALLOCATED), str(PIECES_AT_ONCE), "100", "400")
        neighbour = stack.enter_context(program(*words, alloc, "PAGE", *numbers, size=ALLOC_PAGES))
        gives, gives_too = member(mount, other), member(mount, giver)
        member(mount, neighbour)
        write(group, "gmem.limit.high", held(group) + 128 * MIB)
        one = Crowd(group, other, gives, giver, gives_too, neighbour)
        one.phase(2)  # so that host memory is allocated
        one.rest()
        with one.stopped():
            one.phase(1)
        one.rest()
        yield one


def taken(group: Member) -> int:
    """Return the bytes of it that were ever moved to the host."""
    return group.flat("gmem.stat")["swapout_bytes"]


@pytest.mark.timeout(300)
def test_nobody_delays_his_neighbour(gpu_mount: Mounted, cache: str, alloc: str) -> None:
    """Memory that a neighbour allocates comes from an ordinary program; from one that is stopped; from one that has its
    usermemfd open and never reads it.

    The stopped one is not asked at all: another gives, and the neighbour waits no longer than for an ordinary one. The
    one that ignores its records is waited for 50 ms, once in 10 s. The neighbour's kernels run on all the while.
    """
    with crowd(gpu_mount, "neighbour", cache, alloc) as all_of_them:
        before = taken(all_of_them.gives)
        ordinary = all_of_them.phase(6)
        print(f"ordinary: {ordinary}", flush=True)
        assert taken(all_of_them.gives) > before
        all_of_them.rest()
        with all_of_them.stopped():
            before, other = taken(all_of_them.gives), taken(all_of_them.gives_too)
            stopped = all_of_them.phase(6)
            print(f"stopped:  {stopped}", flush=True)
            assert taken(all_of_them.gives) == before
            assert taken(all_of_them.gives_too) > other
        all_of_them.rest()
        opened(all_of_them.other)
        before = taken(all_of_them.gives)
        ignoring = all_of_them.phase(8)
        print(f"ignoring: {ignoring}", flush=True)
        assert taken(all_of_them.gives) > before
        all_of_them.finish()
    assert min(len(one.waits) for one in (ordinary, stopped, ignoring)) >= 2 * PIECES_AT_ONCE
    # A stopped program costs nothing; equal programs differ by half as much again, and 5 ms.
    assert stopped.median <= 1.5 * ordinary.median + 0.005
    assert stopped.worst <= ordinary.worst + 0.1
    assert stopped.rate >= 0.85 * ordinary.rate
    # A program that ignores its records costs the deadline, once in IGNORED_S; one more may be late for other reasons.
    assert ignoring.median <= 1.5 * ordinary.median + 0.005
    assert ignoring.worst <= ordinary.worst + USERMEM_S + 0.05
    late = ordinary.median + 0.8 * USERMEM_S
    assert ignoring.slower(late) <= ordinary.slower(late) * 2 + math.ceil(ignoring.seconds / IGNORED_S) + 1
    assert ignoring.rate >= 0.85 * ordinary.rate


@pytest.mark.timeout(300)
def test_stopped_in_the_middle_of_a_move(gpu_mount: Mounted, cache: str, alloc: str) -> None:
    """A program that is stopped while it moves memory is not waited for: repeatedly, at any moment of the move."""
    with crowd(gpu_mount, "middle", cache, alloc) as all_of_them:
        first = all_of_them.neighbour.u64(COUNT)
        all_of_them.begin()
        for number in range(STOPS):
            time.sleep(0.3 + 0.037 * number)  # it runs, and gives
            with all_of_them.stopped():
                time.sleep(0.5)
        all_of_them.end()
        waits = all_of_them.waits(first)
        print(f"{len(waits)} cudaMallocs, median {statistics.median(waits) * 1e3:.1f} ms, longest: ", end="")
        print(", ".join(f"{wait * 1e3:.0f} ms" for wait in sorted(waits)[-4:]))
        all_of_them.finish()
    assert max(waits) < 0.25
