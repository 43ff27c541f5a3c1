"""A program with bursts of requests and one without a deadline, in a budget, and ways to share it."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from ggroupfs.client import Member
from tests.support.mounted import Mounted
from tests.support.policy_program import PolicyProgram
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import GIB, MIB, Program, current, held, member, program, run_in, slice_of, write
from tests.t7_nvidia.strangers import Strangers

BUDGET = 14 * GIB
WEIGHTS, KV = 1024, 5120
"""MiB of the first program: always, and at the peak of a burst."""
STATE, RESULTS = 3072, 7168
"""MiB of the second program: what it needs, and what it could recompute."""
PIECE = 64
"""MiB of a result."""
RATE, BUSY_S, IDLE_S, BURSTS = 80.0, 2.4, 2.2, 2
"""Requests a second in a burst, seconds of a burst and of the pause after it, and number of both in a turn."""
SETTLED_S = 0.8
TRIES = 5
"""Tries of a burst, until one is without strangers."""
GO, OVER, COUNT, HELD = 32, 36, 40, 44
ARRIVALS, LATENCIES, WAITS, MOST = 4096, 4096 + 32768, 4096 + 65536, 4096
"""Offsets in the page of serving.cu, and its size."""
LISTEN, LISTENS, RESULTS_THERE, ASKED, ASKED_BYTES, FREED_NS, COMPUTED = 32, 36, 40, 44, 48, 56, 64
"""Offsets in the page of batch.cu."""


def part(values: Sequence[float], of: float) -> float:
    """Return the quantile of the values at `of`."""
    return sorted(values)[min(len(values) - 1, int(of * len(values)))]


def milliseconds(values: Sequence[float]) -> str:
    return "p50 {:.2f}, p99 {:.2f}, worst {:.2f} ms".format(*(part(values, of) * 1e3 for of in (0.5, 0.99, 1.0)))


@attrs.define
class Turn:
    """Measurements of one way to share, added up over its turns."""

    latencies: list[float] = attrs.field(factory=list)
    """Latency of each request, in seconds."""
    waits: list[float] = attrs.field(factory=list)
    """Time of each request in cudaMalloc, in seconds."""
    work: list[tuple[int, float]] = attrs.field(factory=list)
    """Pieces that the second program did, and seconds, for bursts and pauses alternately."""
    moved: int = 0
    """Bytes of the second program that went to the host."""
    computed: int = 0
    """Number of results that it computed."""

    def add(self, other: Turn) -> None:
        for field in attrs.fields(Turn):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def p99(self) -> float:
        """99th percentile of the latencies, in seconds."""
        return part(self.latencies, 0.99)

    @property
    def throughput(self) -> float:
        """Pieces a second of the second program, overall."""
        return sum(done for done, _ in self.work) / sum(seconds for _, seconds in self.work)

    def rates(self, first: int) -> str:
        """Return the pieces a second in each burst (0) or pause (1)."""
        return " ".join(f"{done / seconds:.0f}" for done, seconds in self.work[first::2])


class Pair:
    """Both programs, their slice, and what is measured of them."""

    def __init__(
        self, mount: Mounted, within: str, both: Member, first: Program, second: Program, strangers: Strangers
    ) -> None:
        self.mount, self.within, self.both, self.first, self.second = mount, within, both, first, second
        self.strangers = strangers
        self.high, self.low = member(mount, first), member(mount, second)
        self.peak = 0
        """Bytes of the first program when a burst has all that it may have."""
        self._bursts = 0

    def burst(self, seed: int) -> tuple[list[float], list[float]]:
        """Send a burst of requests, the same for the same seed. Return the latencies, and the times in cudaMalloc, once
        the first program has freed their memory."""
        chance, due = random.Random(seed), 0.0
        arrivals: list[float] = []
        while (due := due + chance.expovariate(RATE)) < BUSY_S and len(arrivals) < MOST:
            arrivals.append(due)
        page, count = self.first.page, len(arrivals)
        memoryview(page)[ARRIVALS : ARRIVALS + 8 * count] = b"".join(
            int(a * 1e9).to_bytes(8, "little") for a in arrivals
        )
        self._bursts += 1
        self.first.set(COUNT, count)
        self.first.set(GO, self._bursts)
        wait_for(lambda: self.first.u32(OVER) == self._bursts, "the burst is over", seconds=30)
        latencies, waits = ([self.first.u64(at + 8 * i) / 1e9 for i in range(count)] for at in (LATENCIES, WAITS))
        return latencies, waits

    def listen(self, on: bool) -> None:
        """Set whether the second program gives memory back by itself; if not, wait until it has all of its results."""
        self.second.set(LISTEN, int(on))
        wait_for(lambda: self.second.u32(LISTENS) != int(not on), "it changes its mind")
        assert self.second.u32(LISTENS) == int(on), os.strerror(self.second.u32(LISTENS) - 1000)
        if not on:
            wait_for(lambda: self.second.u32(RESULTS_THERE) == RESULTS // PIECE, "it has all results", seconds=30)

    def turn(self, seed: int, into: Turn) -> None:
        """Measure bursts and pauses; a burst with strangers is repeated."""
        for number in range(BURSTS):
            for _ in range(TRIES):
                once, begin = Turn(), time.monotonic()
                end = self._burst_and_pause(seed + number, once)
                print(
                    f"    burst {number + 1}: {milliseconds(once.latencies)}; in cudaMalloc {milliseconds(once.waits)}"
                )
                found = self.strangers.during(begin, end)
                if not found:
                    break
                print("    once more, for", ", ".join(map(str, found)), flush=True)
            assert not found, "none without strangers"
            into.add(once)

    def _burst_and_pause(self, seed: int, into: Turn) -> float:
        """Measure a burst and its pause; return when the burst was over."""
        stat, computed = self.low.flat("gmem.stat"), self.second.u64(COMPUTED)

        def measured(seconds: float, start: float, before: int) -> None:
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            into.work.append((self.second.passes - before, time.monotonic() - start))

        start, before = time.monotonic(), self.second.passes
        into.latencies, into.waits = self.burst(seed)
        over = time.monotonic()
        measured(BUSY_S, start, before)
        measured(IDLE_S, time.monotonic(), self.second.passes)
        into.moved = self.low.flat("gmem.stat")["swapout_bytes"] - stat["swapout_bytes"]
        into.computed = self.second.u64(COMPUTED) - computed
        return over


@contextlib.contextmanager
def policy(pair: Pair, name: str, tmp_path: Path) -> Iterator[None]:
    """Run a policy; in the end all of its settings are undone."""
    config = tmp_path / f"{name}.toml"
    config.write_text(
        f'high = "{pair.first.pid}"\nlow = "{pair.second.pid}"\nwithin = "/{pair.within}"\nheadroom = "1G"\n'
    )
    running = PolicyProgram(pair.mount.path, name, config)
    try:
        with running:
            yield
    finally:
        told = running.events
        print(f"    {name} told {len(told)} things: " + " ".join(brief(one) for one in told), flush=True)
    assert (pair.low.read("gmem.limit.high"), pair.high.read("gmem.limit.low")) == ("max", "0")


def brief(said: dict[str, Any]) -> str:
    """Return a line of a policy, shortened."""
    if said["event"] != "limit":
        return f"[{' '.join(str(value) for value in said.values())}]"
    limit, high, growth, moved = (said[key] >> 20 for key in ("limit", "high", "growth", "moved"))
    return f"{said['at']:.2f}:{limit}(first {high} +{growth}/s, moved {moved} in {said['took_ms']:.0f} ms)"


@contextlib.contextmanager
def pair_of(mount: Mounted, serving: str, batch: str) -> Iterator[Pair]:
    """Start both in a slice with its budget; the first program has served a burst, and the second has given once."""
    with contextlib.ExitStack() as stack:
        within, both = stack.enter_context(slice_of(mount, "dynamic"))
        words = run_in(mount, "compute.priority=0", within=within)
        size = WAITS + 8 * MOST
        first = stack.enter_context(program(*words, serving, "PAGE", str(WEIGHTS), str(KV), size=size))
        words = [*run_in(mount, within=within), batch, "PAGE", os.fspath(mount.path), "0", str(STATE), str(RESULTS)]
        second = stack.enter_context(program(*words))
        strangers = stack.enter_context(Strangers())
        pair = Pair(mount, within, both, first, second, strangers)
        base, other = held(pair.high), current(pair.low)
        pair.burst(0)
        pair.peak = int(pair.high.read("gmem.peak")) + 128 * MIB
        write(pair.high, "gmem.limit.high", pair.peak)
        began = time.monotonic()
        write(pair.low, "gmem.limit.high", BUDGET - pair.peak)
        write(both, "gmem.limit.high", BUDGET)
        print(
            f"first {base >> 20} to {pair.peak >> 20} MiB, second {other >> 20} MiB, together {BUDGET >> 20}; "
            f"first cut: {time.monotonic() - began:.2f} s"
        )
        yield pair
        first.finish()
        second.finish()
