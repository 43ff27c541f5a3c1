"""Trees over the GPUs of this machine, for scale.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.lab import CREATED, SOURCES, START_S, STOP_S, ProductsProgram, built, last_line
from tests.bench.papers.sharing import ANY, LINE, LINES, policy, serving
from tests.support.mounted import Mounted, eventually, mounted, mountpoint
from tests.t7_nvidia.conftest import wait_for
from tests.t7_nvidia.programs import STOP, Program, program, run_in, where

TICKS = os.sysconf("SC_CLK_TCK")
WORKING = 10
"""One program of so many works, where it is not said."""
AT_ONCE = 16
"""Programs that start at a time."""
SLICE = "gpu.bench"
"""How the names of slices begin that no cgroup has."""
FILE = "compute.weight"


def daemon_cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads (proc_pid_stat, fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def together(commands: Sequence[Sequence[str]]) -> Iterator[list[Program]]:
    """Programs that have made their contexts, AT_ONCE of them at a time. Unavailable if one ends before. In the end all
    are told to stop before one is waited for: two hundred would else take minutes."""
    with contextlib.ExitStack() as stack:
        runs: list[Program] = []
        try:
            for first in range(0, len(commands), AT_ONCE):
                fresh = [stack.enter_context(program(*command)) for command in commands[first : first + AT_ONCE]]
                runs += fresh
                for run in fresh:
                    ended = run.process.poll
                    wait_for(
                        lambda run=run, ended=ended: run.u64(CREATED) != 0 or ended() is not None,  # type: ignore[misc]
                        "it works",
                        seconds=START_S,
                    )
                    if ended() is not None:
                        raise Unavailable(f"program {len(runs)} ended: {last_line(run.log)}")
            yield runs
        finally:
            for run in runs:
                run.set(STOP, 1)
            for run in runs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(STOP_S)


@attrs.define
class GpuTree:
    """A mounted tree."""

    mount: Mounted
    stack: contextlib.ExitStack
    pids: list[int] = attrs.field(factory=list)
    logged: list[str] = attrs.field(factory=list)
    """By policies."""

    @property
    def said(self) -> list[str]:
        """See scale.Tree."""
        return [*self.logged, *(line.strip()[:LINE] for line in self.mount.errors[:LINES])]

    def programs(self, count: int, gpus: Sequence[int] | None = None) -> list[ProductsProgram]:
        """See scale.Tree. Programs with `gpus` have the library, which migrates them."""
        words, every = ([], [0]) if gpus is None else (run_in(self.mount), list(gpus))
        commands = []
        for number in range(count):
            gpu = every[number % len(every)]
            # All GPUs are visible: the first is the one that it works on.
            order = ",".join(map(str, [gpu, *(other for other in sorted(set(every)) if other != gpu)]))
            before = ["env", f"CUDA_VISIBLE_DEVICES={order}"] if len(every) > 1 else []
            commands.append([*before, *words, built(SOURCES / "products.cu"), "PAGE"])
        runs = self.stack.enter_context(together(commands))
        found = [ProductsProgram(run) for run in runs]
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
            with policy(self.mount.path, "balance", config, self.logged) as program:

                def moves() -> list[float]:
                    program.during(0.0)
                    return [1e3 * float(one["seconds"]) for one in program.events if one["event"] == "moved"]

                yield moves
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
            mount = stack.enter_context(mounted(stack.enter_context(mountpoint()), gpu="nvidia", expect_errors=ANY))
            yield GpuTree(mount, stack)
            serving(mount)
