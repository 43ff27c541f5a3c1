"""Requests beside a program that fills, by ggroupfs with each value of the knob, and by other systems."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from backend.core.turns import YIELD_AHEAD_US
from backend.scheduler.core import HELD_US
from tests.experiments import bursts
from tests.experiments.timed.cells import (
    CHUNK,
    COMPARED,
    HOLD,
    SYSTEMS,
    TAILS,
    TURN_S,
    TWO_LOADS,
    TWO_REQUESTS,
    Cell,
    Tail,
)
from tests.experiments.timed.results import Found

FULL_S = 1.5
"""Seconds over which the speed of what fills is measured on a GPU of its own."""
WORST = 8.0
"""Times as long as requests arrive in which they are to be served, by whatever system."""
FILL_US = 200
"""Microseconds of a kernel of what fills."""
CAP = 60
"""Percent of the SMs that what fills has, by MPS with a cap."""


def arrivals(name: str, load: float, in_bursts: bool, service_us: float, count: int) -> list[int]:
    """Return when requests come, nanoseconds, the same for each run and system: by the length that they are to have."""
    from tests.t7_nvidia.requested import SHAPE

    source, now, found = random.Random(name), 0.0, list[int]()
    rate = (2 * load if in_bursts else load) / service_us * 1e6
    for _ in range(count):
        now += source.gammavariate(SHAPE, 1 / rate / SHAPE)
        found.append(round(1e9 * (now + 0.5 * int(now / 0.5) if in_bursts else now)))
    return found


def chunks(tail: Tail, requests: int) -> list[list[int]]:
    """Return the arrivals of so many requests, in goes of CHUNK at most."""
    sizes = [min(CHUNK, requests - first) for first in range(0, requests, CHUNK)]
    return [arrivals(f"{tail}-{n}", tail.load, tail.bursts, tail.service_us, size) for n, size in enumerate(sizes)]


def serve(run: Any, requests: Sequence[int]) -> list[float]:
    """Return the latencies of these requests, seconds."""
    from tests.t7_nvidia.conftest import wait_for
    from tests.t7_nvidia.requested import ARRIVALS, COUNT, GO, MOST, OVER

    struct.pack_into(f"<{len(requests)}Q", run.page, ARRIVALS, *requests)
    run.set(COUNT, len(requests))
    number = run.u32(GO) + 1
    run.set(GO, number)
    most_s = 10 + WORST * requests[-1] / 1e9
    wait_for(lambda: run.u32(OVER) == number or run.process.poll() is not None, "all are served", seconds=most_s)
    assert run.process.poll() is None
    return [ns / 1e9 for ns in struct.unpack_from(f"<{len(requests)}Q", run.page, ARRIVALS + 8 * MOST)]


def milliseconds(latencies: Sequence[float]) -> list[float]:
    return [round(1e3 * one, 3) for one in latencies]


class Tails:
    """The cells of a run that are of one length of requests."""

    def __init__(self, found: Found, binary: str, service_us: int) -> None:
        self._found, self._binary, self._service_us = found, binary, service_us
        self._tails = {str(one): one for one in TAILS if one.service_us == service_us}
        self._alone: dict[tuple[str, int], list[float]] = {}  # of each cell and go
        self._service_s = 0.0
        self._rounds: dict[str, int] = {}  # of kernels, of each kind of program, as the first of it found them
        self._full = 0.0

    def run(self, cells: Sequence[Cell]) -> None:
        """Measure these cells: first by ggroupfs, by which kernels are as long for the others."""
        by = {session: [one for one in cells if one.session == session] for session in ("ggroupfs", "two", *SYSTEMS)}
        if by["ggroupfs"] or by["two"]:
            with bursts.tree(GPU) as mount:
                mount.set(self._knobs(HOLD))
                if by["ggroupfs"]:
                    self._ggroupfs(mount, by["ggroupfs"])
                if by["two"]:
                    self._two(mount)
        for system in SYSTEMS:
            if by[system]:
                with words_of(system) as (first, second):
                    self._by(system, first, second, by[system])

    @staticmethod
    def _knobs(hold_us: int | None) -> dict[str, Any]:
        """Return what the product has, but for the hold."""
        return {"held_us": HELD_US, "ahead_us": YIELD_AHEAD_US, "hold_us": hold_us}

    # Programs

    @contextlib.contextmanager
    def _leader(self, words: Sequence[str]) -> Iterator[Any]:
        from tests.t7_nvidia.conftest import wait_for
        from tests.t7_nvidia.programs import program
        from tests.t7_nvidia.requested import ALONE_NS, KERNELS, ROUNDS, SIZE

        more = ["serve", str(self._service_us), str(KERNELS), *map(str, self._known("serve"))]
        with program(*words, self._binary, "PAGE", *more, size=SIZE) as one:
            wait_for(lambda: one.u64(ALONE_NS) > 0 or one.process.poll() is not None, "it serves", seconds=60)
            assert one.process.poll() is None
            self._rounds.setdefault("serve", one.u32(ROUNDS))
            service_s = one.u64(ALONE_NS) / 1e9
            print(f"a request takes {1e3 * service_s:.3f} ms alone", flush=True)
            self._service_s = self._service_s or service_s
            yield one
            one.finish()

    @contextlib.contextmanager
    def _filler(self, words: Sequence[str], mount: Any = None) -> Iterator[Any]:
        from tests.t7_nvidia.conftest import wait_for
        from tests.t7_nvidia.programs import member, program, rate, write
        from tests.t7_nvidia.requested import ROUNDS, SIZE

        more = ["fill", str(FILL_US), *map(str, self._known("fill"))]
        with program(*words, self._binary, "PAGE", *more, size=SIZE) as other:
            if mount is not None:
                group = member(mount, other)
            wait_for(lambda: other.passes > 2 or other.process.poll() is not None, "it fills", seconds=60)
            time.sleep(1)  # nothing to wait for: it is to be at its speed
            full = rate(other, FULL_S)
            print(f"what fills does {full:.0f} a second alone", flush=True)
            self._rounds.setdefault("fill", other.u32(ROUNDS))
            self._full = self._full or full
            if mount is not None:
                write(group, "compute.priority", 9)
                time.sleep(1.5)  # as long as the scheduler takes to see both
            yield other
            other.finish()

    def _known(self, kind: str) -> list[int]:
        return [self._rounds[kind]] if kind in self._rounds else []

    # Cells

    def _measure_alone(self, leader: Any, names: Sequence[str], requests: int | None = None) -> None:
        """What is not known yet of these: the same arrivals, before anything fills."""
        for name in dict.fromkeys(names):
            tail = self._tails[name]
            for n, wanted in enumerate(chunks(tail, requests or tail.requests)):
                if len(self._alone.get((name, n), [])) < len(wanted):
                    self._alone[name, n] = serve(leader, wanted)

    def _beside(self, cell: str, name: str, leader: Any, other: Any, requests: int | None = None) -> None:
        tail = self._tails[name]
        for n, wanted in enumerate(chunks(tail, requests or tail.requests)):
            before, begun = other.passes, time.monotonic()
            latencies = serve(leader, wanted)
            figures = {"passes": other.passes - before, "took_s": time.monotonic() - begun}
            without = self._alone[name, n][: len(wanted)]
            self._row("tail", cell, [latencies], [without], **figures)

    def _row(self, kind: str, cell: str, ms: list[list[float]], alone: list[list[float]], **figures: Any) -> None:
        of = {"service_s": self._service_s, "full": self._full, **figures}
        each = {"ms": [milliseconds(one) for one in ms], "alone_ms": [milliseconds(one) for one in alone]}
        self._found.add(kind, cell, **each, **of)

    def _ggroupfs(self, mount: Any, cells: Sequence[Cell]) -> None:
        from tests.t7_nvidia.programs import run_in

        words, names = run_in(mount), [one.what.split(" ")[0] for one in cells]
        with self._leader(words) as leader:
            self._measure_alone(leader, names)
            with self._filler(words, mount) as other:
                now = f"{HOLD}"
                for cell, name in zip(cells, names, strict=True):
                    hold = cell.what.split("hold=")[1]
                    if hold != now:
                        mount.set(self._knobs(None if hold == "no" else int(hold)))
                        time.sleep(TURN_S)
                        now = hold
                    self._beside(cell.what, name, leader, other)
                mount.set(self._knobs(HOLD))

    def _two(self, mount: Any) -> None:
        from tests.t7_nvidia.programs import run_in

        words = run_in(mount)
        wanted = [arrivals(f"two-{n}", load, False, self._service_us, TWO_REQUESTS) for n, load in enumerate(TWO_LOADS)]
        with contextlib.ExitStack() as stack:
            # One after the other: each measures what a request takes on a GPU of its own.
            leaders = [stack.enter_context(self._leader(words)) for _ in TWO_LOADS]
            alone = both(leaders, wanted)
            other = stack.enter_context(self._filler(words, mount))
            before, begun = other.passes, time.monotonic()
            beside = both(leaders, wanted)
            figures = {"passes": other.passes - before, "took_s": time.monotonic() - begun}
            self._row("two", "two", beside, alone, **figures)

    def _by(self, system: str, first: Sequence[str], second: Sequence[str], cells: Sequence[Cell]) -> None:
        names = [one.what.split(" ")[0] for one in cells]
        with self._leader(first) as leader:
            self._measure_alone(leader, names, COMPARED)
            with self._filler(second) as other:
                for cell, name in zip(cells, names, strict=True):
                    try:
                        self._beside(cell.what, name, leader, other, COMPARED)
                    except AssertionError as error:  # its queue grows for as long as requests come
                        print(f"{cell.what}: {error}", flush=True)
                        break


def both(leaders: Sequence[Any], wanted: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the latencies of requests that several serve at the same time."""
    found: list[list[float]] = [[] for _ in leaders]

    def one(n: int) -> None:
        found[n] = serve(leaders[n], wanted[n])

    threads = [threading.Thread(target=one, args=(n,)) for n in range(len(leaders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found), "one that serves has ended"
    return found


@contextlib.contextmanager
def words_of(system: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the words before a program that serves, and before one that fills."""
    if system == "slices":
        yield [], []
        return
    from tests.bench.gpu.faces import Part
    from tests.bench.gpu.systems import Mps

    with Mps().enter() as stage:
        words = stage.words(Part())
        cap = [f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={CAP}"] if system == "mps-cap" else []
        yield [*words, "CUDA_MPS_CLIENT_PRIORITY=0"], [*words, "CUDA_MPS_CLIENT_PRIORITY=1", *cap]


def build() -> str:
    """Return the path of requests.cu, built, as the library is."""
    return bursts.build()


GPU = "nvidia"
"""The GPU of mounts; the self-test has another."""
