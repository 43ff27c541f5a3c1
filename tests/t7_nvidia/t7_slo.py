"""`ggroupfs policy slo` on a real GPU: a critical program beside none to four best-effort ones (Flyt, table 6)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from tests.support.mounted import Mounted
from tests.support.policy_program import PolicyProgram
from tests.t7_nvidia.conftest import ROOT, wait_for

OTHERS = 4
DATA = os.environ.get("GGROUP_SLO_DATA", "zeros")
"""Contents of the matrices: zeros, or random; see matmul.py."""
RUNNING_S, FROZEN_S, SETTLED_S = 3.0, 1.5, 0.3
"""Seconds of windows with the others running and frozen, and seconds that are left out after each change."""
WITHIN = 0.02
"""Bound of the paper: the latency of the critical program varies "by less than 2 %"."""
FILLED = 0.25
"""Least total work of the others, relative to one alone, while the critical program leaves them half."""

CONFIG = """
socket = "{socket}"
interval = "200ms"
cooldown = "1s"

[[group]]
name = "critical"
pid = {critical}
upper = "{upper}us"
lower = "{lower}us"
statistic = "mean"
share = 0.5
scale_up = 0.5
"""


@attrs.define
class Program:
    """A running matmul.py."""

    process: subprocess.Popen[str]

    def tell(self, line: str) -> None:
        """Send a command that has no answer."""
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def ask(self, line: str) -> str:
        """Send a command; return the answer."""
        self.tell(line)
        return self.answer()

    def answer(self) -> str:
        """Return its next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def begin(self) -> None:
        """Have it use the GPU; it does so on return."""
        assert self.ask("begin") == "ready\n"


@attrs.frozen
class Latency:
    """Latency of the requests that began and ended in a window."""

    mean: float
    """Mean in seconds; 0 if there was none."""
    deviation: float
    """Standard deviation in seconds."""
    count: int
    """Number of requests."""

    @classmethod
    def of(cls, found: Sequence[float]) -> Latency:
        mean = statistics.fmean(found) if found else 0.0
        return cls(mean, statistics.stdev(found) if len(found) > 1 else 0.0, len(found))

    def __str__(self) -> str:
        return f"{1e3 * self.mean:8.2f} ± {1e3 * self.deviation:5.2f} ms ({self.count:3})" if self.count else "none"


def measure(programs: Sequence[Program], seconds: float) -> list[list[float]]:
    """Return for each program the durations of the requests in a window of that many seconds."""
    time.sleep(SETTLED_S)
    start = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    found = [json.loads(one.ask("take")) for one in programs]
    return [[took for at, took in each if at >= start and at + took <= end] for each in found]


@pytest.fixture
def program() -> Iterator[Callable[..., Program]]:
    """A function that starts programs; they are ended by pid after the test."""
    pytest.importorskip("torch")
    programs: list[Program] = []

    def start(*words: object) -> Program:
        command = [sys.executable, str(Path(__file__).with_name("matmul.py")), DATA, *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.fspath(ROOT), *sys.path])}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        programs.append(Program(process))
        return programs[-1]

    yield start
    for one in programs:
        one.process.kill()
        one.process.communicate()


def freeze(mount: Mounted, programs: Sequence[Program], value: int) -> None:
    """Freeze or thaw them."""
    for one in programs:
        (mount.group(one.process.pid) / "compute.freeze").write_text(f"{value}\n")


def compared(mount: Mounted, critical: Program, others: Sequence[Program]) -> tuple[Latency, Latency, list[Latency]]:
    """Return the critical program's latency with the others frozen, before and after, and running; and the others'."""
    freeze(mount, others, 1)
    alone = measure([critical], FROZEN_S)[0]
    freeze(mount, others, 0)
    first, *rest = measure([critical, *others], RUNNING_S)
    freeze(mount, others, 1)
    alone += measure([critical], FROZEN_S)[0]
    freeze(mount, others, 0)
    return Latency.of(alone), Latency.of(first), [Latency.of(each) for each in rest]


def told_of(rest: Sequence[Latency]) -> str:
    """Format the latencies of the fillers. Their turns take 0.5 s, so the count says more about a window."""
    return ", ".join(map(str, rest)) + f"; {sum(one.count for one in rest) / RUNNING_S:.2f} requests a second in all"


@pytest.mark.timeout(120)
def test_latency_isolation(gpu_mount: Mounted, program: Callable[..., Program], tmp_path: Path) -> None:
    """The mean latency of the critical program stays within 2 % while best-effort programs grow from none to four.

    The critical one computes half of the time, as in the paper, where it has 8 of the 16 SMs that all of them share;
    after that, back to back. Its share is half of the GPU at first, and the policy finds how much it needs. The
    baseline is measured at the start and at the end, without any others, and before and after each measurement.
    """
    path = tmp_path / "slo.sock"
    critical, *others = [program("critical", path), *[program() for _ in range(OTHERS)]]
    for one in (critical, *others):
        assert one.answer() == "loaded\n"
    critical.begin()
    critical.tell("think 1")
    before = Latency.of(measure([critical], RUNNING_S)[0])
    print(f"\nalone                  {before}, {DATA}")
    config = tmp_path / "slo.toml"
    bounds = {"upper": int(1e6 * before.mean * (1 + WITHIN)), "lower": int(1e6 * before.mean / 2)}
    text = CONFIG.format(socket=path, critical=critical.process.pid, **bounds)
    config.write_text(text + "".join(f"[[best_effort]]\npid = {one.process.pid}\n" for one in others))
    ratios = {}
    with PolicyProgram(gpu_mount.path, "slo", config) as policy:
        for number, newcomer in enumerate(others, 1):
            newcomer.begin()
            wait_for((gpu_mount.group(newcomer.process.pid) / "compute.freeze").exists, "it is in the tree")
            running = others[:number]
            if number == 1:
                start = time.monotonic()
                policy.until("share", share=1.0)
                print(f"policy: all of the GPU after {time.monotonic() - start:.1f} s; it told {policy.events}")
            alone, latency, rest = compared(gpu_mount, critical, running)
            ratios[f"{number}"] = latency.mean / alone.mean
            assert latency.mean <= (1 + WITHIN) * before.mean
            assert sum(one.count for one in rest) / RUNNING_S >= FILLED / before.mean, "they have what is left"
            print(f"beside {number}: frozen {alone}, running {latency}: {latency.mean / alone.mean:.4f}; theirs:")
            print("    " + told_of(rest))
        critical.tell("think 0")
        alone, latency, rest = compared(gpu_mount, critical, others)
        ratios["back to back"] = latency.mean / alone.mean
        print(
            f"back to back beside {OTHERS}: frozen {alone}, running {latency}: {latency.mean / alone.mean:.4f}; theirs:"
        )
        print("    " + told_of(rest))
        for one in others:
            one.process.kill()
            one.process.wait()
        critical.tell("think 1")
        after = Latency.of(measure([critical], RUNNING_S)[0])
        print(f"alone again            {after}: {after.mean / before.mean:.4f} of that at the begin")
        policy.end()
        told = [event["event"] for event in policy.events]
        print(f"policy: {len(told)} events, {told.count('share')} of them shares")
        assert "migrate" not in told
    print("ratios", {name: round(ratio, 4) for name, ratio in ratios.items()})
    assert all(abs(ratio - 1) <= WITHIN for ratio in ratios.values())
