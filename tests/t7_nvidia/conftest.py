"""Real CUDA programs on a real GPU, controlled through a mounted tree."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.support.cgroups import cgroup
from tests.support.mounted import Mounted, mounted

# These tests are for a host with a GPU; elsewhere there is nothing to collect, which `make test-gpu` reports.
collect_ignore_glob = [] if os.path.exists("/dev/nvidiactl") else ["t7_*.py"]
if not os.path.exists("/dev/nvidia1"):
    # About machines with several.
    collect_ignore_glob += ["t7_two_gpus.py", "t7_migrate.py", "t7_balance.py", "t7_memory_gangs.py", "t7_peers.py"]

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 20.0
CONTEXTS = 8
FINISHED, LAUNCHED, ERROR, RUNNING, WANT, STOP, IDLE, BEGUN, CREATED = 0, 64, 128, 132, 136, 140, 144, 152, 160
"""Offsets in the page shared with worker.cu."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = SECONDS) -> float:
    """Waits until `condition` holds; returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        waited = time.monotonic() - start
        assert waited < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.001)
    return time.monotonic() - start


@attrs.define
class Reporting:
    """A running program, and the page that it reports on."""

    process: subprocess.Popen[Any]
    page: mmap.mmap

    @property
    def pid(self) -> int:
        return self.process.pid

    def u32(self, offset: int) -> int:
        return int(struct.unpack_from("<I", self.page, offset)[0])

    def u64(self, offset: int) -> int:
        return int(struct.unpack_from("<Q", self.page, offset)[0])

    def set(self, offset: int, value: int) -> None:
        struct.pack_into("<I", self.page, offset, value)


class Worker(Reporting):
    """A CUDA program that was not told about ggroupfs (worker.cu)."""

    @property
    def finished(self) -> int:
        """Kernels that the GPU itself counted."""
        return sum(struct.unpack_from(f"<{CONTEXTS}Q", self.page, FINISHED))

    @property
    def launched(self) -> int:
        return sum(struct.unpack_from(f"<{CONTEXTS}Q", self.page, LAUNCHED))

    def started(self, contexts: int = 1) -> None:
        wait_for(lambda: self.u32(RUNNING) >= contexts and self.finished > 100, f"{contexts} contexts run")

    def drained(self) -> None:
        """Lets it finish what it launched: no kernel may be missing and no error may have come up."""
        self.set(STOP, 2)
        wait_for(lambda: self.u32(IDLE) == 1, "idle")
        assert self.u32(ERROR) == 0
        assert self.finished == self.launched
        self.set(STOP, 0)


def built(tmp_path_factory: pytest.TempPathFactory, name: str) -> str:
    """NAME.cu, built."""
    path = os.fspath(tmp_path_factory.mktemp("cuda") / name)
    source = Path(__file__).with_name(f"{name}.cu")
    subprocess.run(
        ["nvcc", "-O2", "-I", ROOT / "backend" / "cuda" / "library", "-o", path, source, "-lcuda"], check=True
    )
    return path


@pytest.fixture(scope="session")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> str:
    return built(tmp_path_factory, "elastic")


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """worker.cu, built."""
    path = tmp_path_factory.mktemp("cuda") / "worker"
    source = Path(__file__).with_name("worker.cu")
    subprocess.run(["nvcc", "-O2", "-o", path, source, "-lcuda"], check=True)
    return path


@pytest.fixture
def worker(binary: Path) -> Iterator[Callable[..., Worker]]:
    """Starts CUDA programs, ended by pid after the test whatever state they are in."""
    workers: list[Worker] = []
    files: list[Path] = []

    def start(kernel_us: int = 200, nbytes: int = 0, gpu: int = 0, before: Sequence[str] = ()) -> Worker:
        # On tmpfs: the page is pinned for the GPU, and pages of other file systems may not be.
        file = Path(f"/dev/shm/ggroupfs-t7-{os.getpid()}-{len(files)}")
        file.write_bytes(bytes(4096))
        files.append(file)
        with file.open("r+b") as opened:
            page = mmap.mmap(opened.fileno(), 4096)
        struct.pack_into("<I", page, WANT, 1)
        words = [*before, os.fspath(binary), os.fspath(file), str(kernel_us)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        words = [*words, str(nbytes)] if nbytes else words
        workers.append(Worker(subprocess.Popen(words, env=environment), page))
        return workers[-1]

    yield start
    for one in workers:
        one.process.kill()
        one.process.wait()
        one.page.close()
    for file in files:
        file.unlink()


@pytest.fixture
def place() -> Iterator[Path]:
    """A cgroup, to be left after the programs in it have ended."""
    with cgroup(f"ggroup-t7-{os.getpid()}") as path:
        yield path


@pytest.fixture(scope="module")
def gpu_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mounted tree over the NVIDIA GPUs of this host."""
    with mounted(tmp_path_factory.mktemp("ggroup"), gpu="nvidia") as mount:
        yield mount


def rates(*workers: Worker, seconds: float = 1.5) -> list[float]:
    """Kernels a second that each completes from now on."""
    before = [one.finished for one in workers]
    start = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - start
    return [(one.finished - count) / elapsed for one, count in zip(workers, before, strict=True)]
