"""Trees over the GPUs of this machine, for scale.py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from tests.bench.gpu.lab import CREATED, SOURCES, ProductsProgram, built, started
from tests.support.mounted import Mounted, eventually, mounted, mountpoint
from tests.support.policy_program import PolicyProgram
from tests.t7_nvidia.programs import run_in, where

TICKS = os.sysconf("SC_CLK_TCK")
WORKING = 10
"""One program of so many works, where it is not said."""
SLICE = "gpu.bench"
"""How the names of slices begin that no cgroup has."""
FILE = "compute.weight"


def daemon_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads (proc_pid_stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@attrs.define
class GpuTree:
    """A mounted tree."""

    mount: Mounted
    stack: contextlib.ExitStack
    pids: list[int] = attrs.field(factory=list)

    def programs(self, count: int, gpus: Sequence[int] | None = None) -> list[ProductsProgram]:
        """See scale.Tree. Programs with `gpus` have the library, which migrates them."""
        words = [] if gpus is None else run_in(self.mount)
        found = []
        for number in range(count):
            gpu = 0 if gpus is None else gpus[number % len(gpus)]
            # All GPUs are visible: the first is the one that it works on.
            order = ",".join(map(str, [gpu, *(other for other in sorted(set(gpus or [0])) if other != gpu)]))
            before = ["env", f"CUDA_VISIBLE_DEVICES={order}"] if gpu else []
            command = [*before, *words, built(SOURCES / "products.cu"), "PAGE"]
            run = self.stack.enter_context(started(lambda run: run.u64(CREATED) != 0, *command))
            found.append(ProductsProgram(run))
        for number, one in enumerate(found):
            eventually((self.mount.path / str(one.pid)).exists, f"{one.pid} is in the tree")
            if gpus is not None or number % WORKING == 0:
                one.work(True)
        self.pids += [one.pid for one in found]
        return found

    def slices(self, count: int) -> None:
        """See scale.Tree. They are made by mkdir, as a user's own are."""
        for number in range(count):
            (self.mount.path / "slice" / f"{SLICE}-{number}").mkdir()

    def cpu_s(self) -> float:
        """See scale.Tree."""
        return daemon_cpu_s(self.mount.daemon.pid)

    def write_us(self, count: int) -> list[float]:
        """See scale.Tree: one write(2) each, of values that change."""
        file = os.open(self.mount.group(self.pids[-1]) / FILE, os.O_WRONLY)
        took = []
        try:
            for number in range(count):
                text, begin = f"{100 + number % 2}\n".encode(), time.perf_counter_ns()
                os.pwrite(file, text, 0)
                took.append((time.perf_counter_ns() - begin) / 1e3)
        finally:
            os.close(file)
        return took

    @contextlib.contextmanager
    def balance(self) -> Iterator[Callable[[], list[float]]]:
        """See scale.Tree."""
        config = self.mount.path.parent / f"{self.mount.path.name}.toml"
        config.write_text("")
        try:
            with PolicyProgram(self.mount.path, "balance", config) as policy:
                yield lambda: [1e3 * float(one["seconds"]) for one in policy.events if one["event"] == "moved"]
        finally:
            config.unlink()

    def places(self) -> list[int]:
        """See scale.Tree."""
        return [gpu for pid in self.pids for gpu in where(pid)[:1]]


@attrs.define
class GpuSite:
    """This machine."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @contextlib.contextmanager
    def tree(self) -> Iterator[GpuTree]:
        with contextlib.ExitStack() as stack:
            mount = stack.enter_context(mounted(stack.enter_context(mountpoint()), gpu="nvidia"))
            yield GpuTree(mount, stack)
