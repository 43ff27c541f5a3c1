"""A program with bursts of requests beside one without a deadline, in a budget that is less than both could use.

Three ways to share the memory, in turn in one run: a static split, `ggroupfs policy dynamic`, and `ggroupfs policy
cooperative` with the second program listening to its usermemfd. Nothing else differs: the first program always has
compute.priority 0, its own limit at its peak, and the same requests; and a slice holds the budget.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import built
from tests.t7_nvidia.pairs import (
    ASKED,
    ASKED_BYTES,
    BUDGET,
    BURSTS,
    FREED_NS,
    RESULTS_THERE,
    SETTLED_S,
    Pair,
    Turn,
    milliseconds,
    pair_of,
    policy,
)
from tests.t7_nvidia.programs import current, write

ROUNDS = (
    ("static", "dynamic", "cooperative"),
    ("cooperative", "static", "dynamic"),
    ("dynamic", "cooperative", "static"),
)
"""Orders of the three ways, each once in each place. Two rounds gave 759 requests a way, of which the 99th percentile
is the eighth from the top: too few for a ratio that is to be known within a tenth."""


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "serving")


@pytest.fixture(scope="session")
def batch(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "batch")


@contextlib.contextmanager
def sampled(pair: Pair, start: float) -> Iterator[list[str]]:
    """Sample what each has, a few times a second, in MiB; print the samples at the end."""
    stop, most = threading.Event(), [0]
    lines: list[str] = []

    def look() -> None:
        while not stop.wait(0.05):
            now, both = time.monotonic() - start, current(pair.both)
            most[0] = max(most[0], both)
            if len(lines) < now / 0.25:
                swapped = int(pair.low.read("gmem.swap.current")) >> 20
                high = pair.low.read("gmem.limit.high")
                limit = high if high == "max" else str(int(high) >> 20)
                lines.append(
                    f"{now:.2f}:{current(pair.high) >> 20}/{current(pair.low) >> 20}+{swapped}"
                    f"<{limit}({pair.second.u32(RESULTS_THERE)})"
                )

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lines
    finally:
        stop.set()
        thread.join()
        print(f"    both at most {most[0] >> 20} MiB; s:first/second+in the host<its limit(results): {' '.join(lines)}")


@pytest.mark.timeout(400)
def test_memory_follows_the_load(gpu_mount: Mounted, serving: str, batch: str, tmp_path: Path) -> None:
    """`dynamic` has 1.5 times the throughput of a static split, with p99 within 1.1; `cooperative` is better still."""
    turns = {name: Turn() for name in ROUNDS[0]}
    began = time.monotonic()
    with pair_of(gpu_mount, serving, batch) as pair:
        for number, names in enumerate(ROUNDS):
            for name in names:
                start = time.monotonic()
                print(f"{start - began:.0f} s: {name}", flush=True)
                with contextlib.ExitStack() as stack:
                    stack.enter_context(sampled(pair, start))
                    write(pair.low, "gmem.limit.high", BUDGET - pair.peak if name == "static" else "max")
                    pair.listen(name == "cooperative")
                    if name != "static":
                        stack.enter_context(policy(pair, name, tmp_path))
                    time.sleep(SETTLED_S)
                    pair.turn(1 + BURSTS * number, turns[name])
        print(f"{time.monotonic() - began:.0f} s in all; first: {pair.high.flat('gmem.stat')}")
        print(f"second: {pair.low.flat('gmem.stat')}")
        asked = pair.second.u32(ASKED), pair.second.u64(ASKED_BYTES) >> 20, pair.second.u64(FREED_NS) / 1e6
        print("asked {} times for {} MiB in all, freed in {:.1f} ms at most".format(*asked))
        first_swapped = pair.high.flat("gmem.stat")["swapout_bytes"]
    static, dynamic, cooperative = (turns[name] for name in ("static", "dynamic", "cooperative"))
    for name, turn in turns.items():
        print(
            f"{name}: {len(turn.latencies)} requests, {milliseconds(turn.latencies)}, p99 {turn.p99 / static.p99:.3f} "
            f"of static; in cudaMalloc {milliseconds(turn.waits)}\n    second: {turn.throughput:.0f} pieces/s, "
            f"{turn.throughput / static.throughput:.2f} of static; in bursts {turn.rates(0)}, in pauses "
            f"{turn.rates(1)}; {turn.moved >> 20} MiB moved out, {turn.computed} results computed"
        )
    assert first_swapped == 0
    assert dynamic.throughput >= 1.5 * static.throughput
    assert dynamic.p99 <= 1.1 * static.p99
    assert cooperative.throughput > dynamic.throughput
    assert cooperative.p99 < dynamic.p99
    assert cooperative.moved < dynamic.moved / 4
