"""Programs under `ggroupfs run`, slices to put them into, and what they report on a page of shared memory."""

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
"""Offsets that elastic.cu, cache.cu and alloc.cu have in common; passes are at 0, words wrong at 16."""
CYCLE = 8
"""Passes of elastic.cu, of which one uses everything."""

_numbers = itertools.count()


def run_in(mount: Mounted, *limits: str, within: str | None = None) -> list[str]:
    """The words before a command that is to have its memory managed; in a cgroup, if it is named."""
    words = [sys.executable, "-m", "ggroupfs", "run", "--mount", os.fspath(mount.path)]
    for limit in limits:
        words += ["-p", limit]
    if within is not None:
        words += ["--slice", within]
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
class Program(Reporting):
    """A running program, and the page that it reports on."""

    log: Path
    """What it, and the library in it, wrote to standard error."""

    @property
    def passes(self) -> int:
        return self.u64(0)

    def finish(self) -> None:
        """Tells it to stop: every word that it holds must be right."""
        self.set(STOP, 1)
        assert self.process.wait(120) == 0
        assert self.u64(16) == 0


@contextlib.contextmanager
def program(*words: str, size: int = 4096) -> Iterator[Program]:
    """Starts a program that reports on a page, named where its words say PAGE; ended in the end."""
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
    """Its control files, once they are there and it works."""
    group = Member(run.pid, 0, mount.group(run.pid))
    wait_for(lambda: run.passes > 2 or run.process.poll() is not None, "it works", seconds=60)
    wait_for(lambda: group.path.exists() or run.process.poll() is not None, f"{group.path} appears")
    assert run.process.poll() is None
    return group


@contextlib.contextmanager
def slice_of(mount: Mounted, name: str) -> Iterator[tuple[str, Member]]:
    """An empty cgroup: what `ggroupfs run --slice` calls it, and its control files, which are there once a program is.

    To be left after the programs in it have ended.
    """
    with cgroup(f"ggroup-t7-{name}-{os.getpid()}") as place:
        yield slice_path(place), Member(0, 0, mount / "slice" / slice_path(place) / "0")


def write(group: Member, name: str, value: object) -> None:
    """One write(2): a buffered file makes another one where the first fails, and one without a buffer says nothing of
    EAGAIN."""
    file = os.open(group.path / name, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(file, f"{value}\n".encode())
    finally:
        os.close(file)


def current(group: Member) -> int:
    return int(group.read("gmem.current"))


def held(group: Member, seconds: float = 10) -> int:
    """gmem.current once it stays the same: what the driver allocates for a context is found by looking."""
    last, since = -1, time.monotonic()
    until = since + seconds
    while time.monotonic() < min(since + 1, until):
        if (now := current(group)) != last:
            last, since = now, time.monotonic()
        time.sleep(0.05)
    return last


def rate(run: Program, seconds: float) -> float:
    """Passes a second from now on."""
    before, start = run.passes, time.monotonic()
    time.sleep(seconds)
    return (run.passes - before) / (time.monotonic() - start)


def cycles(run: Program, seconds: float) -> float:
    """Passes a second over `seconds` or longer, in whole cycles, from the end of a pass to the end of another."""
    first = run.passes
    wait_for(lambda: run.passes > first, "a pass ends", seconds=60)
    first, start = run.passes, time.monotonic()
    time.sleep(seconds)
    last = first + math.ceil(max(1, run.passes - first) / CYCLE) * CYCLE
    wait_for(lambda: run.passes >= last, "a cycle ends", seconds=60)
    return (run.passes - first) / (time.monotonic() - start)


def speed(log: str, what: str) -> float:
    """GB a second of the moves that the library logged, without the time that it waited for kernels."""
    moves = [(int(m[1]) * MIB, int(m[2])) for m in re.finditer(what, log)]
    return sum(size for size, _ in moves) / sum(usec for _, usec in moves) / 1e3


def where(pid: int) -> list[int]:
    """The GPUs that the driver has a process on."""
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
    """The control files of a worker, once they are there and it runs."""
    worker.started()
    group = mount.group(worker.pid)
    wait_for((group / "compute.freeze").exists, f"{group} appears")
    return group


SECONDS = 3.0


@attrs.frozen
class Used:
    """What a worker did in a window."""

    seconds: float
    """On the engine, by gcgroup.stat."""
    kernels: int
    """That it completed, by itself."""


def used(mount: Mounted, *workers: Worker, seconds: float = SECONDS) -> tuple[float, list[Used]]:
    """The seconds of a window, and what each used of it."""

    def look() -> tuple[float, list[tuple[int, int]]]:
        texts = [(mount.group(worker.pid) / "gcgroup.stat").read_text() for worker in workers]
        stats = [int(text.split("gpu_usec ")[1].split()[0]) for text in texts]
        return time.monotonic(), list(zip(stats, [worker.finished for worker in workers], strict=True))

    begin, before = look()
    time.sleep(seconds)
    end, after = look()
    pairs = zip(before, after, strict=True)
    return end - begin, [Used((b[0] - a[0]) / 1e6, b[1] - a[1]) for a, b in pairs]
