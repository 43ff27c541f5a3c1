"""The papers' programs on this machine's GPUs, and the ways to share one between two of them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.lab import built, free_mib, last_line
from tests.bench.papers.requests import Answer, Request, answers
from tests.t7_nvidia.programs import STOP, Program, program

PROGRAMS = Path(__file__).parent / "programs"
READY, WRONG, GO, OVER = 8, 16, 32, 36
"""Offsets of programs/page.py."""
CALLS = (40, 48, 56, 64)
"""Offsets of calls.cu."""
START_S, STOP_S, LOOK_S = 150.0, 60.0, 0.01
"""Seconds for a program to be ready: it imports torch and makes 8 billion weights; to end; and between two looks."""
SERVE_S = 60.0
"""Seconds after its limit in which a round has to be over."""


class Running(Protocol):
    """A program that runs."""

    @property
    def pid(self) -> int: ...


class Steps(Running, Protocol):
    """A program that does the same again and again."""

    @property
    def passes(self) -> int:
        """Steps that it did. Unavailable once it has ended by failing."""
        ...

    def finish(self) -> None:
        """Have it stop. RuntimeError where what it computed is wrong."""
        ...


class Server(Running, Protocol):
    """llm.py"""

    def serve(self, requests: Sequence[Request], limit_s: float, seed: int) -> list[Answer]:
        """A round of requests; returns when it is over."""
        ...


class Nursery(Running, Protocol):
    """nursery.py"""

    def serve(self, order: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """A round of jobs; returns when all have ended."""
        ...


class Lab(Protocol):
    """Where the papers' programs run."""

    def now(self) -> float:
        """Seconds, of a clock that never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...

    def server(self, words: Sequence[str]) -> contextlib.AbstractContextManager[Server]:
        """An LLM server, ready. Unavailable if it ends before, with its last words."""
        ...

    def loops(
        self, commands: Sequence[tuple[Sequence[str], Sequence[str]]]
    ) -> contextlib.AbstractContextManager[Sequence[Steps]]:
        """Programs, each of the words before it and its name and options, started together and ready on return.
        Unavailable if one ends before, with its last words."""
        ...

    def both(
        self, high: Sequence[str], low: Sequence[str], command: Sequence[str]
    ) -> contextlib.AbstractContextManager[tuple[Server, Steps]]:
        """A server and another program, started together."""
        ...

    def nursery(self, words: Sequence[str]) -> contextlib.AbstractContextManager[Nursery]:
        """What starts jobs, ready."""
        ...

    def calls(self, words: Sequence[str]) -> tuple[float, float, float, float]:
        """calls.cu: microseconds of a copy to the GPU and back, of a launch, and of cudaGetDeviceCount."""
        ...

    def ballast(self, mib: int) -> contextlib.AbstractContextManager[None]:
        """So much GPU memory that nothing else has."""
        ...

    def free_mib(self) -> int:
        """MiB of GPU memory that no process has."""
        ...


@attrs.define
class StepsProgram:
    """One that runs."""

    run: Program

    @property
    def pid(self) -> int:
        return self.run.pid

    @property
    def passes(self) -> int:
        if self.run.process.poll():
            raise Unavailable(f"the program ended: {last_line(self.run.log)}")
        return self.run.passes

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self.run.process.poll() is not None

    def finish(self) -> None:
        self.run.set(STOP, 1)
        if self.run.process.wait(STOP_S) or self.run.u64(WRONG):
            raise RuntimeError(f"what it computed is wrong: {last_line(self.run.log)}")


@attrs.define
class Ordered:
    """A program that serves rounds of orders."""

    run: Program
    orders: Path
    rounds: int = 0

    @property
    def pid(self) -> int:
        return self.run.pid

    def ask(self, order: Mapping[str, Any], limit_s: float) -> Any:
        """What came of a round. Unavailable if the program ends; TimeoutError where it takes SERVE_S too long."""
        self.rounds += 1
        (self.orders / f"{self.rounds}.json").write_text(json.dumps(order))
        self.run.set(GO, self.rounds)
        deadline = time.monotonic() + limit_s + SERVE_S
        while self.run.u32(OVER) != self.rounds:
            if self.run.process.poll() is not None:
                raise Unavailable(f"the program ended: {last_line(self.run.log)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"a round of {limit_s} s is not over after {limit_s + SERVE_S} s")
            time.sleep(LOOK_S)
        return json.loads((self.orders / f"{self.rounds}.result.json").read_text())


class ServerProgram(Ordered):
    """llm.py that runs."""

    def serve(self, requests: Sequence[Request], limit_s: float, seed: int) -> list[Answer]:
        asked = [attrs.asdict(one) for one in requests]
        return answers(self.ask({"limit_s": limit_s, "seed": seed, "requests": asked}, limit_s))


class NurseryProgram(Ordered):
    """nursery.py that runs."""

    def serve(self, order: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask(order, limit_s)
        return found


def ready(run: Program, until: float) -> None:
    """Wait until a program is. Unavailable if it ends before, or is not by then."""
    while not run.u64(READY):
        if run.process.poll() is not None:
            raise Unavailable(f"the program ended: {last_line(run.log)}")
        if time.monotonic() > until:
            raise Unavailable(f"the program is not ready after {START_S:.0f} s: {last_line(run.log)}")
        time.sleep(LOOK_S)


@contextlib.contextmanager
def stopped(run: Program) -> Iterator[Program]:
    """A program that is told to stop in the end, and waited for: a client of MPS that is killed may take others."""
    try:
        yield run
    finally:
        run.set(STOP, 1)
        with contextlib.suppress(Exception):
            run.process.wait(STOP_S)


@attrs.define
class PapersLab:
    """This machine."""

    device: str = "cuda"
    small: bool = False
    """Whether all shapes are small, to see on a CPU that it works."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def words(self, name: str, options: Sequence[str]) -> list[str]:
        """The command of one of programs/*.py."""
        return [sys.executable, os.fspath(PROGRAMS / f"{name}.py"), "PAGE", *options, "--device", self.device]

    def _server(self, stack: contextlib.ExitStack, words: Sequence[str]) -> tuple[Program, Path]:
        orders = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-papers-")))
        shape = ["--shape", "small", "--kv-mib", "4"] if self.small else ["--shape", "llama-3-8b", "--kv-mib", "4096"]
        run = stack.enter_context(program(*words, *self.words("llm", [os.fspath(orders), *shape])))
        return stack.enter_context(stopped(run)), orders

    def _loop(self, stack: contextlib.ExitStack, words: Sequence[str], command: Sequence[str]) -> Program:
        name, *options = command
        if self.small:
            options = [*options, *SMALL.get(name, ())]
        return stack.enter_context(stopped(stack.enter_context(program(*words, *self.words(name, options)))))

    @contextlib.contextmanager
    def server(self, words: Sequence[str]) -> Iterator[ServerProgram]:
        with contextlib.ExitStack() as stack:
            run, orders = self._server(stack, words)
            ready(run, time.monotonic() + START_S)
            yield ServerProgram(run, orders)

    @contextlib.contextmanager
    def loops(self, commands: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Iterator[list[StepsProgram]]:
        with contextlib.ExitStack() as stack:
            runs = [self._loop(stack, words, command) for words, command in commands]
            until = time.monotonic() + START_S
            for run in runs:
                ready(run, until)
            yield [StepsProgram(run) for run in runs]

    @contextlib.contextmanager
    def both(
        self, high: Sequence[str], low: Sequence[str], command: Sequence[str]
    ) -> Iterator[tuple[ServerProgram, StepsProgram]]:
        with contextlib.ExitStack() as stack:
            server, orders = self._server(stack, high)
            loop = self._loop(stack, low, command)
            until = time.monotonic() + START_S
            ready(server, until)
            ready(loop, until)
            yield ServerProgram(server, orders), StepsProgram(loop)

    @contextlib.contextmanager
    def nursery(self, words: Sequence[str]) -> Iterator[NurseryProgram]:
        with contextlib.ExitStack() as stack:
            orders = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggroupfs-papers-")))
            run = stack.enter_context(program(*words, *self.words("nursery", [os.fspath(orders)])))
            ready(stack.enter_context(stopped(run)), time.monotonic() + START_S)
            yield NurseryProgram(run, orders)

    def calls(self, words: Sequence[str]) -> tuple[float, float, float, float]:
        with program(*words, built(PROGRAMS / "calls.cu"), "PAGE") as run, stopped(run):
            ready(run, time.monotonic() + START_S)
            into, out, launch, count = (run.u64(offset) / 1e3 for offset in CALLS)
            return into, out, launch, count

    @contextlib.contextmanager
    def ballast(self, mib: int) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            run = stack.enter_context(program(built(PROGRAMS / "ballast.cu"), "PAGE", str(mib)))
            stack.enter_context(stopped(run))
            ready(run, time.monotonic() + START_S)
            yield

    def free_mib(self) -> int:
        return free_mib()


SMALL = {
    "diffusion": ("--shape", "small", "--batch", "1"),
    "finetune": ("--shape", "small", "--batch", "1", "--tokens", "16"),
}
"""Options that come last, and so hold, of a program's small shape."""
