"""The applications of actions.py on this machine's GPUs."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs

from ggroupfs.client import Latencies
from tests.bench.gpu.faces import Critical, Part, Products
from tests.bench.gpu.lab import GpuLab
from tests.bench.gpu.systems import Ggroupfs, GgroupfsStage, nothing
from tests.bench.papers.actions import LOWER, OURS, REFERENCE, SHARE, STEP, UPPER, Event
from tests.bench.papers.sharing import ANY, LINE, LINES, policy, serving
from tests.support.policy_program import PolicyProgram

KINDS = ("decode", "convolution")
"""Of critical.cu, by turns."""
ALONE = 40
"""Requests that measure how long one takes."""
GRACE_S = 1.0
"""Seconds after a phase in which what waits may still begin."""
LOOK_S = 0.2
HEAD = """
socket = "{socket}"
interval = "200ms"
window = 3
cooldown = "1s"
silence = "3s"
"""
GROUP = """
[[group]]
name = "{name}"
pid = {pid}
upper = "{upper}us"
lower = "{lower}us"
statistic = "mean"
share = {share}
scale_up = {step}
scale_down = {step}
"""
FILLER = """
[[best_effort]]
pid = {pid}
gpu = {gpu}
"""


def first(gpu: int, gpus: int) -> list[str]:
    """Words that have a program work on a GPU; all others are visible to it, so that it can migrate."""
    order = ",".join(map(str, [gpu, *(other for other in range(gpus) if other != gpu)]))
    return ["env", f"CUDA_VISIBLE_DEVICES={order}"] if gpus > 1 else []


def config(socket: Path, pids: Sequence[int], services: Sequence[float], fillers: Sequence[int]) -> str:
    """Of the policy slo."""
    text = HEAD.format(socket=socket)
    for number, (pid, service) in enumerate(zip(pids, services, strict=True)):
        bounds = {"upper": round(1e6 * UPPER * service), "lower": round(1e6 * LOWER * service)}
        text += GROUP.format(name=f"app-{number}", pid=pid, share=SHARE, step=STEP, **bounds)
    return text + "".join(FILLER.format(pid=pid, gpu=gpu) for gpu, pid in enumerate(fillers))


@attrs.define
class GpuApps:
    """Applications that run."""

    programs: Sequence[Critical]
    fillers: Sequence[Products]
    services: Sequence[float]
    begin: float = attrs.field(factory=time.monotonic)
    reports: Sequence[Latencies] = ()
    """To the policy, of each application."""
    policy: PolicyProgram | None = None
    told: list[Event] = attrs.field(factory=list)
    said: list[str] = attrs.field(factory=list)

    def now(self) -> float:
        """See Apps."""
        return time.monotonic() - self.begin

    def events(self) -> list[Event]:
        """See Apps."""
        return self.told

    def filled(self) -> int:
        """See Apps."""
        return sum(one.done for one in self.fillers)

    def serve(self, arrivals: Sequence[Sequence[float]], seconds: float) -> list[list[float]]:
        """See Apps: each in a thread, which sleeps nearly all of the time."""
        over = threading.Event()
        with ThreadPoolExecutor(len(arrivals)) as pool:

            def one(number: int) -> list[float]:
                report = self.reports[number].report if self.reports else None
                found = self.programs[number].serve(arrivals[number], seconds + GRACE_S, report)
                return [*found.latencies]

            futures = [pool.submit(one, number) for number in range(len(arrivals))]
            until = time.monotonic() + seconds
            while time.monotonic() < until or not all(future.done() for future in futures):
                self._listen(over)
            return [future.result() for future in futures]

    def _listen(self, over: threading.Event) -> None:
        """Take up what the policy tells for LOOK_S."""
        if self.policy is None:
            over.wait(LOOK_S)
            return
        begin = time.monotonic()
        self.told += [(at - self.begin, event) for at, event in self.policy.during(LOOK_S)]
        over.wait(max(0.0, LOOK_S - (time.monotonic() - begin)))


@contextlib.contextmanager
def _started(lab: GpuLab, words: Sequence[str], count: int, gpus: int, spread: bool) -> Iterator[GpuApps]:
    """The applications, measured alone, and a program that fills on each GPU. All applications are on the first GPU, or
    spread over them."""
    with contextlib.ExitStack() as stack:
        programs: list[Critical] = []
        for number in range(count):
            before = [*first(number % gpus if spread else 0, gpus), *words]
            programs.append(stack.enter_context(lab.critical(before, KINDS[number % len(KINDS)])))
        services = [max(one.serve([0.0] * ALONE, 30.0).latencies) / ALONE for one in programs]
        fillers = [stack.enter_context(lab.products([*first(gpu, gpus), *words])) for gpu in range(gpus)]
        for one in fillers:
            one.work(True)
        yield GpuApps(programs, fillers, services)


@attrs.frozen
class Sliced:
    """Time slicing, the applications spread over the GPUs by hand."""

    lab: GpuLab
    name: str = REFERENCE

    @contextlib.contextmanager
    def enter(self, count: int, gpus: int) -> Iterator[GpuApps]:
        """See Stage."""
        with _started(self.lab, [], count, gpus, spread=True) as apps:
            apps.begin = time.monotonic()
            yield apps


@attrs.frozen
class Managed:
    """A mounted tree and the policy slo, the applications all on the first GPU."""

    lab: GpuLab
    name: str = OURS

    @contextlib.contextmanager
    def enter(self, count: int, gpus: int) -> Iterator[GpuApps]:
        """See Stage."""
        with Ggroupfs(self.name, nothing, expected=ANY).enter() as stage:
            words = stage.words(Part(memory=True))
            with _started(self.lab, words, count, gpus, spread=False) as apps:
                yield from self._kept(stage, apps)
            apps.said += [line.strip()[:LINE] for line in stage.mount.errors[:LINES]]

    def _kept(self, stage: GgroupfsStage, apps: GpuApps) -> Iterator[GpuApps]:
        for one in (*apps.programs, *apps.fillers):
            stage.present(one)
        with tempfile.TemporaryDirectory(prefix="ggroupfs-slo-") as name:
            folder = Path(name)
            path, socket = folder / "slo.toml", folder / "slo.sock"
            pids = [[one.pid for one in several] for several in (apps.programs, apps.fillers)]
            path.write_text(config(socket, pids[0], apps.services, pids[1]))
            with policy(stage.mount.path, "slo", path, apps.said) as apps.policy:
                apps.reports = [Latencies(f"app-{number}", os.fspath(socket)) for number in range(len(apps.programs))]
                apps.begin = time.monotonic()
                try:
                    yield apps
                finally:
                    for report in apps.reports:
                        report.close()
                serving(stage.mount)
