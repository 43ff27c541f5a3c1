"""CUDA programs on this machine's GPU, controlled through shared pages of memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pynvml

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.faces import Carried, Job, Served, Shared
from tests.support.mounted import mounted, mountpoint
from tests.t7_nvidia.conftest import ROOT, wait_for
from tests.t7_nvidia.pairs import SETTLED_S, Turn, pair_of, policy
from tests.t7_nvidia.programs import MIB, STOP, Program, nvml_used, program, speed, write
from tests.t7_nvidia.strangers import Strangers

SOURCES = Path(__file__).parent / "programs"
TESTS = ROOT / "tests" / "t7_nvidia"
BUILD = ROOT / "build" / "bench"

READY, GO, OVER, COUNT, SERVED, LIMIT = 8, 32, 36, 40, 44, 48
ARRIVALS, LATENCIES, MOST = 4096, 4096 + 32768, 4096
SIZE = LATENCIES + 8 * MOST
"""Offsets in the page of critical.cu, and its size."""
WORK, IDLE, CREATED = 32, 36, 40
"""Offsets of products.cu."""
HOT_NS, FULL_NS, PREFETCH_OUT, PREFETCH_IN = 64, 72, 48, 56
"""Offsets of elastic.cu."""
OUT, IN, BOTH_OUT, BOTH_IN = 40, 48, 56, 64
"""Offsets of copies.cu."""
WRONG = 16
"""Offset of programs that do jobs."""
START_S, STOP_S = 90.0, 60.0
COPIED_MIB = 4096


def built(source: Path) -> str:
    """Return the path of a compiled CUDA program; compile it if its source is newer. Unavailable without nvcc."""
    path = BUILD / source.stem
    newest = max(one.stat().st_mtime for one in (source, TESTS / "words.cuh"))
    if not path.exists() or path.stat().st_mtime < newest:
        BUILD.mkdir(parents=True, exist_ok=True)
        words = [
            "nvcc",
            "-O2",
            f"-I{TESTS}",
            f"-I{ROOT}/backend/cuda/library",
            "-o",
            os.fspath(path),
            os.fspath(source),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True)
        except FileNotFoundError:
            raise Unavailable("there is no nvcc") from None
        if done.returncode:
            raise Unavailable(f"nvcc: {done.stderr[-300:]}")
    return os.fspath(path)


@contextlib.contextmanager
def started(ready: Callable[[Program], bool], *words: str, size: int = 4096) -> Iterator[Program]:
    """Run a program, and yield it once it is ready. At the end the program is told to stop and waited for, because
    killing a client of MPS may take others with it.
    """
    with program(*words, size=size) as run:
        wait_for(lambda: ready(run) or run.process.poll() is not None, f"{words[-2:]} is ready", seconds=START_S)
        if run.process.poll() is not None:
            raise Unavailable(f"the program ended: {last_line(run.log)}")
        try:
            yield run
        finally:
            run.set(STOP, 1)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(STOP_S)


def last_line(log: Path) -> str:
    """Return the last words of a program, shortened."""
    lines = log.read_text().strip().splitlines()
    return lines[-1][:200] if lines else "without a word"


class CriticalProgram:
    """A running critical.cu."""

    def __init__(self, run: Program) -> None:
        self._run = run
        self.pid = run.pid

    def serve(self, arrivals: Sequence[float], limit: float, watch: Callable[[float], None] | None = None) -> Served:
        run, count = self._run, len(arrivals)
        if not 0 < count <= MOST:
            raise ValueError(f"{count} requests, and there is room for {MOST}")
        data = b"".join(int(one * 1e9).to_bytes(8, "little") for one in arrivals)
        memoryview(run.page)[ARRIVALS : ARRIVALS + 8 * count] = data
        memoryview(run.page)[LIMIT : LIMIT + 8] = int(limit * 1e9).to_bytes(8, "little")
        run.set(COUNT, count)
        memoryview(run.page)[:8] = bytes(8)  # requests finished in the burst before
        number = run.u32(OVER) + 1
        run.set(GO, number)
        told, deadline = 0, time.monotonic() + limit + START_S
        while run.u32(OVER) != number:
            if run.process.poll() is not None:
                raise Unavailable(f"the program ended: {last_line(run.log)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a burst of {limit} s is not over after {limit + START_S} s")
            time.sleep(0.001)
            told = self._tell(told, min(run.u64(0), count), watch)
        self._tell(told, count, watch)
        return Served([self._latency(number) for number in range(count)], count - run.u32(SERVED))

    def _tell(self, told: int, over: int, watch: Callable[[float], None] | None) -> int:
        """Report new latencies; return how many have been reported."""
        if watch is not None:
            for number in range(told, over):
                watch(self._latency(number))
        return over

    def _latency(self, number: int) -> float:
        return self._run.u64(LATENCIES + 8 * number) / 1e9


class ProductsProgram:
    """A running products.cu."""

    def __init__(self, run: Program) -> None:
        self._run = run
        self.pid = run.pid

    @property
    def done(self) -> int:
        return self._run.u64(0)

    @property
    def created(self) -> float:
        return self._run.u64(CREATED) / 1e9

    def work(self, on: bool) -> None:
        self._run.set(WORK, int(on))
        ended = self._run.process.poll
        wait_for(lambda: self._run.u32(IDLE) == int(not on) or ended() is not None, "it is told", seconds=START_S)
        if ended() is not None:
            raise Unavailable(f"the program ended: {last_line(self._run.log)}")


class ElasticProgram:
    """A running elastic.cu of the tests."""

    def __init__(self, run: Program) -> None:
        self._run = run
        self.pid = run.pid

    @property
    def passes(self) -> int:
        if self._run.process.poll() is not None:
            raise Unavailable(f"the program ended: {last_line(self._run.log)}")
        return self._run.passes

    @property
    def pass_seconds(self) -> tuple[float, float]:
        return self._run.u64(HOT_NS) / 1e9, self._run.u64(FULL_NS) / 1e9

    @property
    def prefetched(self) -> tuple[float, float]:
        return self._run.u64(PREFETCH_OUT) / 1e9, self._run.u64(PREFETCH_IN) / 1e9

    def moved(self) -> tuple[float, float]:
        log = self._run.log.read_text()
        try:
            return speed(log, r"moved (\d+) MiB in (\d+) us"), speed(log, r"moved (\d+) MiB back in (\d+) us")
        except ZeroDivisionError:
            raise ValueError("the library has not moved memory both ways") from None


CLEAN = re.compile(r"device \d+: (\d+) MiB were clean")
OUT_MOVED = re.compile(r"asked to move \d+ MiB, moved (\d+) MiB in (\d+) us")
IN_MOVED = re.compile(r"asked to prepare \d+ MiB, moved (\d+) MiB in (\d+) us")
"""Lines of the library about its moves."""


def carried(log: str) -> Carried:
    """Return the moves for turns in a log."""
    clean = sum(int(found[1]) for found in CLEAN.finditer(log))
    out, back = (
        [(int(found[1]), int(found[2])) for found in pattern.finditer(log)] for pattern in (OUT_MOVED, IN_MOVED)
    )
    return Carried(
        *(sum(mib for mib, _ in out) * MIB, clean * MIB, sum(us for _, us in out) / 1e6),
        *(sum(mib for mib, _ in back) * MIB, sum(us for _, us in back) / 1e6),
    )


class WorkedProgram:
    """A running decode.cu, science.cu or vision.py."""

    def __init__(self, run: Program) -> None:
        self._run = run
        self.pid = run.pid

    @property
    def passes(self) -> int:
        if self._run.process.poll() is not None:
            raise Unavailable(f"the program ended: {last_line(self._run.log)}")
        return self._run.passes

    def carried(self) -> Carried:
        return carried(self._run.log.read_text())

    def finish(self) -> None:
        self._run.set(STOP, 1)
        if self._run.process.wait(STOP_S) or self._run.u64(WRONG):
            raise RuntimeError(f"what it computed is wrong: {last_line(self._run.log)}")


def _told(value: str | float) -> str:
    """Return a value of a case as it is written on the command line."""
    return value if isinstance(value, str) else f"{value:g}"


def command_of(job: Job) -> list[str]:
    """Return the command of a job. Unavailable without nvcc, or torchvision."""
    match job.kind:
        case "decode":
            return [built(SOURCES / "decode.cu"), "PAGE", str(job.mib), *(["graph"] if job.graph else [])]
        case "wavelet" | "stencil" | "gather" | "neighbours":
            return [built(SOURCES / "science.cu"), "PAGE", str(job.mib), job.kind]
    if importlib.util.find_spec("torchvision") is None:
        raise Unavailable("there is no torchvision")
    return [sys.executable, os.fspath(SOURCES / "vision.py"), "PAGE", str(job.mib), job.kind]


class GpuLab:
    """The GPU 0 of this machine."""

    def __init__(self, cells: Mapping[str, str] | None = None) -> None:
        """`cells` restricts the cases that a scenario can leave out to those with these values."""
        self._cells = cells or {}

    def wants(self, case: Mapping[str, str | float]) -> bool:
        return all(_told(case[key]) == value for key, value in self._cells.items() if key in case)

    @contextlib.contextmanager
    def jobs(self, words: Sequence[str], jobs: Sequence[Job]) -> Iterator[list[WorkedProgram]]:
        commands = [command_of(job) for job in jobs]
        with contextlib.ExitStack() as stack:
            runs = [stack.enter_context(program(*words, *command)) for command in commands]
            for run in runs:
                ended = run.process.poll
                wait_for(lambda: run.passes > 0 or ended() is not None, "it works", seconds=START_S)  # noqa: B023
                if ended() is not None:
                    raise Unavailable(f"the program ended: {last_line(run.log)}")
            yield [WorkedProgram(run) for run in runs]

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.contextmanager
    def critical(self, words: Sequence[str], kind: str) -> Iterator[CriticalProgram]:
        command = [*words, built(SOURCES / "critical.cu"), "PAGE", kind]
        with started(lambda run: run.u64(READY) == 1, *command, size=SIZE) as run:
            yield CriticalProgram(run)

    def products(self, words: Sequence[str]) -> contextlib.AbstractContextManager[ProductsProgram]:
        return self._products(words, READY)

    def begun(self, words: Sequence[str]) -> contextlib.AbstractContextManager[ProductsProgram]:
        return self._products(words, CREATED)

    @contextlib.contextmanager
    def _products(self, words: Sequence[str], mark: int) -> Iterator[ProductsProgram]:
        """Start products.cu, and yield it once it has set the word `mark` of its page."""
        with started(lambda run: run.u64(mark) != 0, *words, built(SOURCES / "products.cu"), "PAGE") as run:
            yield ProductsProgram(run)

    @contextlib.contextmanager
    def elastic(self, words: Sequence[str], mib: int, parts: int, *options: str) -> Iterator[ElasticProgram]:
        if "managed" in options and mib > free_mib() // 2:
            raise Unavailable(f"{mib} MiB of unified memory are more than half of what the GPU has free")
        command = [*words, built(TESTS / "elastic.cu"), "PAGE", str(mib), str(parts), *options]
        with started(lambda run: run.passes > 0, *command) as run:
            yield ElasticProgram(run)

    @contextlib.contextmanager
    def copied(self) -> Iterator[Callable[[], tuple[float, float]]]:
        command = [built(SOURCES / "copies.cu"), "PAGE", str(COPIED_MIB)]
        with started(lambda run: run.u64(READY) == 1, *command) as run:

            def measure() -> tuple[float, float]:
                number = run.u32(OVER) + 1
                run.set(GO, number)
                wait_for(lambda: run.u32(OVER) == number, "it has copied", seconds=START_S)
                return run.u64(OUT) / 1e9, run.u64(IN) / 1e9

            yield measure

    def both_ways(self) -> tuple[float, float]:
        command = [built(SOURCES / "copies.cu"), "PAGE", str(COPIED_MIB)]
        with started(lambda run: run.u64(READY) == 1, *command) as run:
            run.set(GO, 1)
            wait_for(lambda: run.u32(OVER) == 1, "it has copied", seconds=START_S)
            return run.u64(BOTH_OUT) / 1e9, run.u64(BOTH_IN) / 1e9

    def shared(self, how: str, seed: int) -> Shared:
        serving, batch = (built(TESTS / f"{name}.cu") for name in ("serving", "batch"))
        with contextlib.ExitStack() as stack:
            mount = stack.enter_context(mounted(stack.enter_context(mountpoint()), gpu="nvidia"))
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-bench-")))
            pair = stack.enter_context(pair_of(mount, serving, batch))
            if how != "static":
                write(pair.low, "gmem.limit.high", "max")
            pair.listen(how == "cooperative")
            turn = Turn()
            with contextlib.nullcontext() if how == "static" else policy(pair, how, directory):
                time.sleep(SETTLED_S)
                pair.turn(seed, turn)
            return Shared(turn.latencies, turn.throughput)

    def strangers(self) -> Strangers:
        return Strangers()

    def context_mib(self) -> int:
        mib = 64
        command = [built(TESTS / "elastic.cu"), "PAGE", str(mib)]
        with started(lambda run: run.passes > 0, *command) as run:
            return nvml_used(run.pid) // MIB - mib


def free_mib() -> int:
    """Return the free memory of the GPU, MiB."""
    pynvml.nvmlInit()
    try:
        found: int = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free
        return found >> 20
    finally:
        pynvml.nvmlShutdown()
