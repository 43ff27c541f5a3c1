"""Memory limits that act on unmodified CUDA programs: what moves, how fast, and that nobody notices."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pynvml
import pytest

from ggroupfs.client import Member
from tests.mounted import Mounted
from tests.t7_nvidia.conftest import wait_for

GIB, MIB = 1 << 30, 1 << 20
HERE = Path(__file__).parent
STEPS = 200


def run_in(mount: Mounted, *limits: str) -> list[str]:
    """The words before a command that is to have its memory managed."""
    words = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(mount.path)]
    for limit in limits:
        words += ["-p", limit]
    return [*words, "--"]


def nvml_used(pid: int) -> int:
    """Bytes of GPU memory that the driver counts for a process."""
    pynvml.nvmlInit()
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        return sum(one.usedGpuMemory or 0 for one in found if one.pid == pid)
    finally:
        pynvml.nvmlShutdown()


@attrs.define
class Program:
    """A running program, and the page that it reports on."""

    process: subprocess.Popen[str]
    page: mmap.mmap
    log: Path
    """What it, and the library in it, wrote to standard error."""

    def u64(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", self.page, offset)[0])

    @property
    def passes(self) -> int:
        return self.u64(0)

    def finish(self) -> None:
        """Tells elastic.cu to stop: every word that it holds must be right."""
        struct.pack_into("<I", self.page, 24, 1)
        assert self.process.wait(120) == 0
        assert self.u64(16) == 0


@contextlib.contextmanager
def program(*words: str, size: int = 4096) -> Iterator[Program]:
    """Starts a program that reports on a page, named where its words say PAGE; ended in the end."""
    path = Path(f"/dev/shm/ggroupfs-t7-{os.getpid()}-{time.monotonic_ns()}")
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        page = mmap.mmap(file.fileno(), size)
    command = [os.fspath(path) if word == "PAGE" else word for word in words]
    log, environment = path.with_suffix(".log"), {**os.environ, "GGROUP_CUDA_LOG": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
    try:
        yield Program(process, page, log)
    except BaseException:
        print(log.read_text()[-4000:])
        raise
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stdin):
            assert stream is not None
            stream.close()
        path.unlink()
        log.unlink()


def built(tmp_path_factory: pytest.TempPathFactory, name: str) -> str:
    path = tmp_path_factory.mktemp("cuda") / name
    subprocess.run(["nvcc", "-O2", "-o", path, HERE / f"{name}.cu"], check=True)
    return os.fspath(path)


@pytest.fixture(scope="session")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "elastic")


@pytest.fixture(scope="session")
def counts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "counts")


def member(mount: Mounted, run: Program) -> Member:
    """Its control files, once it works."""
    wait_for(lambda: run.passes > 2 or run.process.poll() is not None, "it works", seconds=60)
    assert run.process.poll() is None
    return Member(run.process.pid, 0, mount.group(run.process.pid))


def write(group: Member, name: str, value: object) -> None:
    (group.path / name).write_text(f"{value}\n")


def test_counts_are_exact(gpu_mount: Mounted, counts: str) -> None:
    """Plain, cooperative, graph and multi-stream launches: as many as the program made, and as many finished."""
    with program(*run_in(gpu_mount), counts) as run:
        assert run.process.stdout is not None
        launched, found = map(int, run.process.stdout.readline().split())
        assert launched == found
        group = Member(run.process.pid, 0, gpu_mount.group(run.process.pid))
        wait_for(lambda: group.flat("gcgroup.stat").get("finished", 0) >= launched, "all are finished", seconds=1)
        stat = group.flat("gcgroup.stat")
        print(f"launched {launched}: {stat}")
        assert (stat["submitted"], stat["finished"], stat["pending"]) == (launched, launched, 0)


def speed(log: str, what: str) -> float:
    """GB a second of the moves that the library logged, without the time that it waited for kernels."""
    moves = [(int(m[1]) * MIB, int(m[2])) for m in re.finditer(what, log)]
    return sum(size for size, _ in moves) / sum(usec for _, usec in moves) / 1e3


def test_eight_gib_cut_to_four(gpu_mount: Mounted, elastic: str) -> None:
    with program(elastic, "PAGE", "8192", "1", "managed") as uvm:
        wait_for(lambda: uvm.passes > 2, "it works", seconds=60)
        uvm_out, uvm_in = uvm.u64(48) / 1e9, uvm.u64(56) / 1e9
        uvm.finish()
    with program(*run_in(gpu_mount), elastic, "PAGE", "8192") as run:
        group = member(gpu_mount, run)
        resident = run.u64(8) / 1e9
        before = nvml_used(run.process.pid)
        assert before >= 8 * GIB
        time.sleep(3)  # pinned host memory is made ahead, at about 3 GB/s
        slowest = 0.0
        for attempt in range(3):
            start = time.monotonic()
            write(group, "gmem.limit.high", "4G")
            written = time.monotonic() - start
            left = (lambda: nvml_used(run.process.pid) <= 4 * GIB + 64 * MIB, "NVML agrees")
            took = written + wait_for(*left, seconds=5)
            slowest = max(slowest, took)
            count = run.passes
            wait_for(lambda count=count: run.passes > count + 2, "it goes on", seconds=60)  # type: ignore[misc]
            slow = run.u64(8) / 1e9
            start = time.monotonic()
            write(group, "gmem.limit.high", "max")
            wait_for(lambda: nvml_used(run.process.pid) >= before - 64 * MIB, "all is back", seconds=10)
            back = time.monotonic() - start
            print(
                f"cut {attempt}: {before >> 20} MiB; written in {written * 1e3:.0f} ms, NVML in {took * 1e3:.0f}, "
                f"back in {back * 1e3:.0f}; passes at {resident:.0f} GB/s resident, {slow:.0f} cut"
            )
        run.finish()
        log = run.log.read_text()
    print(log)
    out = speed(log, r"moved (\d+) MiB in (\d+) us")
    back = speed(log, r"moved (\d+) MiB back in (\d+) us")
    print(f"out {out:.1f} GB/s, back {back:.1f} GB/s; UVM out {uvm_out:.1f}, in {uvm_in:.1f} GB/s")
    assert slowest < 0.5
    assert out >= 30
    assert back >= 40


def test_no_swap_is_out_of_memory(gpu_mount: Mounted, elastic: str) -> None:
    """With gmem.swap.max 0 an allocation beyond the limit is refused, and nothing else."""
    with program(*run_in(gpu_mount, "gmem.limit.high=4G", "gmem.swap.max=0"), elastic, "PAGE", "8192") as run:
        assert run.process.wait(60) == 1
        assert struct.unpack_from("<I", run.page, 28)[0] == 2  # cudaErrorMemoryAllocation


def test_the_program_sees_its_limit(gpu_mount: Mounted, elastic: str) -> None:
    with program(*run_in(gpu_mount, "gmem.limit.high=4G"), elastic, "PAGE", "1024") as run:
        member(gpu_mount, run)
        assert run.u64(32) == 4 * GIB
        assert 0 < run.u64(40) <= 3 * GIB
        run.finish()


def torch(
    mount: Mounted | None, mode: str, steps: int = STEPS, *limits: str
) -> contextlib.AbstractContextManager[Program]:
    """A PyTorch program, managed or (None) plain."""
    words = [sys.executable, os.fspath(HERE / "workload.py"), mode, "PAGE", str(steps)]
    return program(*(run_in(mount, *limits) if mount else []), *words, size=8 * (steps + 1))


def outcome(run: Program) -> tuple[bytes, float]:
    """What it computed, and its median step in microseconds."""
    assert run.process.stdout is not None
    line = run.process.stdout.readline()
    assert run.process.wait(60) == 0, line
    return bytes(run.page[8:]), float(line)


@pytest.mark.timeout(300)
def test_training_under_moving_limits(gpu_mount: Mounted) -> None:
    """The losses of every step are the same to the bit: plain, managed, and with the limit rewritten all the time."""
    with torch(None, "train") as run:
        expected, _ = outcome(run)
    with torch(gpu_mount, "train") as run:
        assert outcome(run)[0] == expected
    rng, written, moved = random.Random(3), 0, 0
    with torch(gpu_mount, "train") as run:
        group = member(gpu_mount, run)
        footprint = int(group.read("gmem.current"))
        while run.process.poll() is None and run.passes < STEPS - 5:
            with contextlib.suppress(OSError):  # it may just have ended
                write(group, "gmem.limit.high", int(footprint * rng.uniform(0.4, 1.0)))
                written += 1
                moved = group.flat("gmem.stat")["swapout_bytes"]
            time.sleep(0.2)
        with contextlib.suppress(OSError):
            write(group, "gmem.limit.high", "max")
        assert outcome(run)[0] == expected
    print(f"footprint {footprint >> 20} MiB, limit written {written} times, {moved >> 20} MiB moved out, losses equal")
    assert written >= 10
    assert moved > footprint


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


def rate(run: Program, seconds: float) -> float:
    """Passes a second from now on."""
    before, start = run.passes, time.monotonic()
    time.sleep(seconds)
    return (run.passes - before) / (time.monotonic() - start)


def test_throughput_curve(gpu_mount: Mounted, elastic: str) -> None:
    """What is left of it at 90, 70, 50 and 40 % of the footprint, with half of its memory cold."""
    with program(*run_in(gpu_mount), elastic, "PAGE", "8192", "64") as run:
        group = member(gpu_mount, run)
        footprint = int(group.read("gmem.current"))
        full = rate(run, 2)
        points: list[Sequence[float]] = []
        for percent in (90, 70, 50, 40):
            write(group, "gmem.limit.high", footprint * percent // 100)
            time.sleep(2)  # what is hot comes back
            points.append((percent, rate(run, 2) / full))
        write(group, "gmem.limit.high", "max")
        print(f"full {full:.0f} passes/s; " + ", ".join(f"{p:.0f} %: {r:.3f}" for p, r in points))
        run.finish()
    assert points[1][1] > 0.02


def test_two_programs_over_a_budget(gpu_mount: Mounted, elastic: str) -> None:
    """Both finish with their data right, and the one under its low loses nothing."""
    with (
        program(*run_in(gpu_mount, "gmem.limit.low=6G"), elastic, "PAGE", "4096") as safe,
        program(*run_in(gpu_mount), elastic, "PAGE", "6144", "16") as other,
    ):
        kept, gives = member(gpu_mount, safe), member(gpu_mount, other)
        assert kept.path.parent.parent == gives.path.parent.parent
        root = gpu_mount / "gpus/0"
        held = int((root / "gmem.current").read_text())
        write(gives, "gmem.limit.high", int(gives.read("gmem.current")) - 2 * GIB)
        wait_for(lambda: int((root / "gmem.current").read_text()) <= held - 2 * GIB, "the other gives", seconds=10)
        assert kept.flat("gmem.stat")["swapped"] == 0
        assert gives.flat("gmem.stat")["swapped"] >= 2 * GIB - 64 * MIB
        safe.finish()
        other.finish()
