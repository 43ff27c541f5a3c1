"""Experiment: how levers act on MPS clients and on green contexts within a slice on the stock driver, by progress.

    OUT=DIR PYTHONPATH=$PWD python3 tests/experiments/spatial.py     all cells that fit into LIMIT_S (150) seconds
    CELLS="green mps-levers" ...     the cells whose names begin with one of these

Each line of output is a cell with the rates of its programs (spatial.cu). The same data is in $OUT/spatial.json.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.bench.gpu.systems import MpsStage

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, os.fspath(HERE))

from tests.experiments.celled import Cells  # noqa: E402

FIELDS = {"finished": (0, "<Q"), "copied": (8, "<Q"), "remapped": (16, "<Q"), "changed_ns": (24, "<Q")}
WORDS = ("want", "has", "stop", "extra", "ready", "wrong", "first", "changes")
FIELDS |= {name: (32 + 4 * n, "<I") for n, name in enumerate(WORDS)}
SPENT = ("split_ns", "green_ns", "stream_ns", "events_ns", "launch_ns")
"""What the steps of a change took, in their order."""
FIELDS |= {name: (192 + 8 * n, "<Q") for n, name in enumerate((*SPENT, "took_bytes"))}
ERROR = slice(64, 192)
"""Bytes of the page into which a program writes the first call that failed."""
WINDOW_S = 1.0
"""Time over which progress is measured, seconds."""
SETTLE_S = 0.3
"""Time after a change for work under way to end, seconds."""
START_S = 30.0
"""Longest wait for the first kernel of a program, and for one on other SMs, seconds."""
WORDS_MOST = 1500
"""Characters of the end of a server's log that are told."""
COPIES, REMAPS = 1, 2
"""Bits of `extra`."""
FULL = 132 * 6
"""Number of blocks of a kernel that fills an H200 six times."""


class Failed(Exception):
    """A program ended, or a call of it failed."""


class Program:
    """A running spatial.cu, and its page."""

    numbers = itertools.count()

    def __init__(self, binary: Path, us: float, blocks: int, mode: str, environment: Mapping[str, str]) -> None:
        self.file = Path(f"/dev/shm/ggroupfs-spatial-{os.getpid()}-{next(self.numbers)}")
        self.file.write_bytes(bytes(4096))
        with self.file.open("r+b") as opened:
            self.page = mmap.mmap(opened.fileno(), 4096)
        words = [os.fspath(binary), os.fspath(self.file), str(us), str(blocks), mode]
        self.process = subprocess.Popen(words, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)

    def __getattr__(self, name: str) -> int:
        if name not in FIELDS:
            raise AttributeError(name)
        offset, form = FIELDS[name]
        return int(struct.unpack_from(form, self.page, offset)[0])

    @property
    def error(self) -> str:
        return bytes(self.page[ERROR]).rstrip(b"\0").decode()

    def ask(self, name: str, value: int) -> None:
        offset, form = FIELDS[name]
        struct.pack_into(form, self.page, offset, value)

    def until(self, done: Callable[[], bool], seconds: float = START_S) -> None:
        end = time.monotonic() + seconds
        while not done():
            if self.process.poll() is not None or self.error:
                raise Failed(self.error or f"ended with {self.process.returncode}")
            if time.monotonic() > end:
                raise Failed(f"not within {seconds:.0f} s")
            time.sleep(0.002)

    def end(self) -> None:
        self.ask("stop", 1)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.page.close()
        self.file.unlink()


def changed(one: Program, changes: int) -> bool:
    """Return whether a program has changed its SMs since it had done so `changes` times, or has all of them."""
    return not one.has or one.changes > changes


class Experiment(Cells):
    """The cells, and the programs in them."""

    def __init__(self, out: Path) -> None:
        super().__init__(out / "spatial.json")
        self.out = out
        self.binaries: dict[str, Path] = {}

    def build(self) -> None:
        source = os.fspath(HERE / "tests/experiments/spatial.cu")
        for mode, words in (("plain", []), ("blas", ["-DBLAS", "-lcublas"])):
            path = self.out / f"spatial-{mode}"
            done = subprocess.run(
                ["nvcc", "-O2", "-o", os.fspath(path), source, "-lcuda", *words],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                print(f"== build {mode}: {done.stderr[-600:]}", flush=True)
            else:
                self.binaries[mode] = path

    @contextlib.contextmanager
    def programs(
        self, *each: tuple[float, int], mode: str = "plain", environment: Mapping[str, str] | None = None
    ) -> Iterator[list[Program]]:
        """Run a program for each pair of microseconds and blocks, and end them all."""
        binary = self.binaries["blas" if mode == "blas" else "plain"]
        those: list[Program] = []
        try:
            those.extend(Program(binary, us, blocks, mode, environment or {}) for us, blocks in each)
            for one in those:
                one.until(lambda one=one: bool(one.ready))  # type: ignore[misc]
            yield those
        finally:
            for one in those:
                one.end()

    def rates(self, those: Sequence[Program], seconds: float = WINDOW_S) -> list[list[float]]:
        """Return kernels, copies and remaps a second of each."""
        names = ("finished", "copied", "remapped")
        before, start = [[getattr(one, name) for name in names] for one in those], time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - start
        return [
            [round((getattr(one, name) - was) / took, 1) for name, was in zip(names, counts, strict=True)]
            for one, counts in zip(those, before, strict=True)
        ]

    def green(self, mode: str, environment: Mapping[str, str] | None = None) -> Any:
        """Return rates at several numbers of SMs, 0 for all, and the time that each change took, with that of its
        steps. Half of the SMs are asked for twice: the second time the program makes another green context.
        """
        found: list[dict[str, Any]] = []
        with self.programs((200, FULL), mode=mode, environment=environment) as (one,):
            for sms in (0, 32, 64, 96, 128, 64, 0):
                changes, before = one.changes, one.want
                one.ask("want", sms)
                if sms != before:
                    one.until(lambda changes=changes: one.changes > changes)  # type: ignore[misc]
                time.sleep(SETTLE_S)
                spent = {name: round(getattr(one, f"{name}_ns") / 1e6, 3) for name in (word[:-3] for word in SPENT)}
                found.append({"sms": sms, "has": one.has, "rate": self.rates([one])[0][0], "ms": one.changed_ns / 1e6})
                if sms:
                    found[-1] |= {**spent, "mib": round(one.took_bytes / (1 << 20), 1)}
        return found

    def beside(self, environment: Mapping[str, str]) -> Any:
        """Return rates of two programs on parts of the SMs: the same ones, some that overlap in a group, and others.

        Seven groups of 15 from the first and from the eighth on have none in common, if the split is the same in each
        process; eight from there on have group 7 in common.
        """
        found: dict[str, Any] = {}
        with self.programs((200, FULL), (200, FULL), environment=environment) as (a, b):
            found["plain"] = self.rates([a, b])
            for name, sms, first in (
                ("both on the first 64", 64, 0),
                ("on 64 from group 0 and from 7", 64, 7),
                ("on 56 from group 0 and from 8", 56, 8),
            ):
                for one, group in ((a, 0), (b, first)):
                    changes = one.changes
                    one.ask("want", 0)
                    one.until(partial(changed, one, changes))
                    time.sleep(SETTLE_S)
                    one.ask("first", group)
                    one.ask("want", sms)
                time.sleep(SETTLE_S)
                found[name] = self.rates([a, b])
        return found

    def levers(self, environment: Mapping[str, str]) -> Any:
        """Return the effect of each lever on an MPS client, on that client, another client, and a program outside
        MPS.
        """
        import trio

        from backend.core.reasons import Engines
        from backend.nvidia.linux import LinuxSystem
        from backend.nvidia.opening import open_gpus
        from backend.process.identity import identify

        async def main(a: Program, b: Program, other: Program) -> Any:
            found: dict[str, Any] = {}
            those = (a, b, other)
            system = LinuxSystem()
            system.begin()
            try:
                gpu = (await open_gpus(system=system, selftest=False))[0]
                found["nothing"] = self.rates(those)
                for one, name in ((a, "first"), (other, "outside")):
                    process = identify(one.process.pid)
                    for engines in (Engines.GR, Engines.ALL):
                        try:
                            await gpu.take(process, engines)
                        except OSError as error:
                            found[f"{name} {engines.name}"] = f"{error}"
                            continue
                        await trio.sleep(SETTLE_S)
                        found[f"{name} {engines.name}"] = self.rates(those)
                        await gpu.take(process, Engines.NONE)
                        await trio.sleep(SETTLE_S)
                        found[f"{name} {engines.name} given back"] = self.rates(those, 0.4)
                    try:
                        await gpu.set_timeslice(process, 8000)
                    except OSError as error:
                        found[f"{name} 8 ms"] = f"{error}"
                    else:
                        await trio.sleep(SETTLE_S)
                        found[f"{name} 8 ms"] = self.rates(those)
                        await gpu.set_timeslice(process, 2000)
                    gpu.forget(process)
            finally:
                system.end()
            return found

        with contextlib.ExitStack() as stack:
            a, b = stack.enter_context(self.programs((200, FULL), (200, FULL), environment=environment))
            (other,) = stack.enter_context(self.programs((200, FULL)))
            a.ask("extra", COPIES | REMAPS)
            b.ask("extra", COPIES)
            found = trio.run(main, a, b, other)
            found["contents wrong"] = a.wrong
            return found

    def percentage(self, stage: MpsStage) -> Any:
        """Return rates by CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, of a program alone, each after the others. Of one that
        fails, what the server says of it.
        """
        found: dict[str, Any] = {"default": stage.ask("get_default_active_thread_percentage").strip()}
        for part in (100, 75, 50, 25):
            found[str(part)] = self.at(stage, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(part)})
        return found

    def percentage_fresh(self) -> Any:
        """Return rates at half of the SMs, by a server that was just started: as the client says, as the default of
        the servers says, and as the variable says that the control daemon was started with.
        """
        from tests.bench.gpu.systems import Mps

        half, found = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, {}
        with Mps().enter() as stage:
            found["client"] = self.at(stage, half)
        with Mps().enter() as stage:
            stage.ask("set_default_active_thread_percentage 50")
            found["default"] = self.at(stage, {})
            found["default, and client"] = self.at(stage, half)
        os.environ.update(half)
        try:
            with Mps().enter() as stage:
                found["daemon"] = self.at(stage, {})
        finally:
            del os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
        return found

    def at(self, stage: MpsStage, words: Mapping[str, str]) -> Any:
        """Return the rate of a client with more words in its environment, or why there is none."""
        environment = dict(stage.environment)
        try:
            with self.programs((200, FULL), environment={**environment, **words}) as those:
                return self.rates(those)[0][0]
        except Failed as error:
            folder = Path(environment["CUDA_MPS_LOG_DIRECTORY"])
            logs = {path.name: path.read_text(errors="replace")[-WORDS_MOST:] for path in sorted(folder.iterdir())}
            servers = [f"{one}: {stage.ask(f'get_server_status {one}').strip()}" for one in stage.servers()]
            return {"error": str(error), "servers": servers, **logs}

    def eight(self, environment: Mapping[str, str]) -> Any:
        """Return rates of eight programs whose kernels fill 8 SMs."""
        with self.programs(*[(100, 8)] * 8, environment=environment) as those:
            each = [one[0] for one in self.rates(those)]
        return {"sum": round(sum(each), 1), "least": min(each), "most": max(each)}

    def run(self) -> None:
        from tests.bench.gpu.systems import Mps

        self.build()
        for mode in ("plain", "graph", "blas"):
            self.cell(f"green-{mode}", 12, lambda mode=mode: self.green(mode))  # type: ignore[misc]
        self.cell("green-beside", 6, lambda: self.beside({}))
        self.cell("eight-slicing", 6, lambda: self.eight({}))
        with Mps().enter() as stage:
            environment = dict(stage.environment)
            self.cell("mps-levers", 25, lambda: self.levers(environment))
            self.cell("mps-eight", 6, lambda: self.eight(environment))
            self.cell("mps-green-plain", 12, lambda: self.green("plain", environment))
            self.cell("mps-green-graph", 12, lambda: self.green("graph", environment))
            self.cell("mps-green-beside", 6, lambda: self.beside(environment))
            self.cell("mps-percentage", 12, lambda: self.percentage(stage))
        self.cell("mps-percentage-fresh", 15, self.percentage_fresh)


if __name__ == "__main__":
    directory = Path(os.environ.get("OUT") or tempfile.mkdtemp())
    Experiment(directory).run()
