"""Programs under `ggroupfs run`, slices to put them into, and their reports on a page of shared memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pynvml

from ggroupfs.client import Member
from tests.support.cgroups import cgroup, slice_path
from tests.support.mounted import Mounted
from tests.t7_nvidia.conftest import Reporting, Worker, wait_for

GIB, MIB = 1 << 30, 1 << 20
STOP, ERROR = 24, 28
"""Offsets that elastic.cu, cache.cu and alloc.cu have in common; passes are at 0, wrong words at 16."""
CYCLE = 8
"""Length of a cycle of elastic.cu in passes, one of which uses everything."""

_numbers = itertools.count()


def run_in(mount: Mounted, *limits: str, within: str | None = None) -> list[str]:
    """Return the words before a command whose memory is to be managed; in a cgroup, if one is named."""
    words = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(mount.path)]
    for limit in limits:
        words += ["-p", limit]
    if within is not None:
        words += ["--slice", within]
    return [*words, "--"]


def nvml_used(pid: int) -> int:
    """Return the bytes of GPU memory that the driver counts for a process."""
    pynvml.nvmlInit()
    try:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        return sum(one.usedGpuMemory or 0 for one in found if one.pid == pid)
    finally:
        pynvml.nvmlShutdown()


@attrs.define
class Program(Reporting):
    """A running program, and the page on which it reports."""

    log: Path
    """Standard error of the program and of the library in it."""

    @property
    def passes(self) -> int:
        return self.u64(0)

    def finish(self) -> None:
        """Tell it to stop; every word that it holds must be right."""
        self.set(STOP, 1)
        assert self.process.wait(120) == 0
        assert self.u64(16) == 0


@contextlib.contextmanager
def program(*words: str, size: int = 4096) -> Iterator[Program]:
    """Run a program that reports on a page, whose name replaces PAGE in its words; it is ended in the end."""
    path = Path(f"/dev/shm/ggroupfs-t7-{os.getpid()}-{time.monotonic_ns()}-{next(_numbers)}")
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
        print(f"{' '.join(command)}: exit code {process.poll()}")
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


def member(mount: Mounted, run: Program) -> Member:
    """Return its control files, once they are there and it works."""
    group = Member(run.pid, 0, mount.group(run.pid))
    wait_for(lambda: run.passes > 2 or run.process.poll() is not None, "it works", seconds=60)
    wait_for(lambda: group.path.exists() or run.process.poll() is not None, f"{group.path} appears")
    assert run.process.poll() is None
    return group


@contextlib.contextmanager
def slice_of(mount: Mounted, name: str) -> Iterator[tuple[str, Member]]:
    """Yield the name that `ggroupfs run --slice` has for an empty cgroup, and its control files, which exist once a
    program does.

    The context has to be left after the programs in it have ended.
    """
    with cgroup(f"ggroup-t7-{name}-{os.getpid()}") as place:
        yield slice_path(place), Member(0, 0, mount / "slice" / slice_path(place) / "0")


def write(group: Member, name: str, value: object) -> None:
    """Write with one write(2): a buffered file would repeat a failed write, and one without a buffer hides EAGAIN."""
    file = os.open(group.path / name, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(file, f"{value}\n".encode())
    finally:
        os.close(file)


def current(group: Member) -> int:
    return int(group.read("gmem.current"))


def held(group: Member, seconds: float = 10) -> int:
    """Return gmem.current once it is stable, since the driver's memory for a context is found by looking."""
    last, since = -1, time.monotonic()
    until = since + seconds
    while time.monotonic() < min(since + 1, until):
        if (now := current(group)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)
    return last


def rate(run: Program, seconds: float) -> float:
    """Return the passes a second from now on."""
    before, start = run.passes, time.monotonic()
    time.sleep(seconds)
    return (run.passes - before) / (time.monotonic() - start)


def cycles(run: Program, seconds: float) -> float:
    """Return the passes a second over at least `seconds`, in whole cycles, from the end of one pass to another's."""
    first = run.passes
    wait_for(lambda: run.passes > first, "a pass ends", seconds=60)
    first, start = run.passes, time.monotonic()
    time.sleep(seconds)
    last = first + math.ceil(max(1, run.passes - first) / CYCLE) * CYCLE
    wait_for(lambda: run.passes >= last, "a cycle ends", seconds=60)
    return (run.passes - first) / (time.monotonic() - start)


def speed(log: str, what: str) -> float:
    """Return the GB a second of the moves that the library logged, without the time spent waiting for kernels."""
    moves = [(int(m[1]) * MIB, int(m[2])) for m in re.finditer(what, log)]
    return sum(size for size, _ in moves) / sum(usec for _, usec in moves) / 1e3


def where(pid: int) -> list[int]:
    """Return the GPUs that the driver has a process on."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            index
            for index, handle in enumerate(handles)
            if any(one.pid == pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
        ]
    finally:
        pynvml.nvmlShutdown()


def group_of(mount: Mounted, worker: Worker) -> Path:
    """Return the control files of a worker, once they are there and it runs."""
    worker.started()
    group = mount.group(worker.pid)
    wait_for((group / "compute.freeze").exists, f"{group} appears")
    return group


SECONDS = 3.0


@attrs.frozen
class Used:
    """What a worker did in a window."""

    seconds: float
    """Engine time in seconds, from gcgroup.stat."""
    kernels: int
    """Number of kernels that it completed, by its own count."""


def used(mount: Mounted, *workers: Worker, seconds: float = SECONDS) -> tuple[float, list[Used]]:
    """Return the seconds of a window, and what each worker did in it."""

    def look() -> tuple[float, list[tuple[int, int]]]:
        texts = [(mount.group(worker.pid) / "gcgroup.stat").read_text() for worker in workers]
        stats = [int(text.split("gpu_usec ")[1].split()[0]) for text in texts]
        return time.monotonic(), list(zip(stats, [worker.finished for worker in workers], strict=True))

    begin, before = look()
    time.sleep(seconds)
    end, after = look()
    pairs = zip(before, after, strict=True)
    return end - begin, [Used((b[0] - a[0]) / 1e6, b[1] - a[1]) for a, b in pairs]
