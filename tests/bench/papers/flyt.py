"""Flyt's tables on a real GPU: what a program loses to the library that is in it, and what a critical one to others.

Table 4: run times of programs that compute for long; Rodinia's are others, and here it is passes of science.cu. Table
5: single calls of CUDA. Table 6: products of matrices, one program critical, beside none to four. Table 8: images a
second of four networks, batches of 30. Flyt's programs run in virtual machines, over TCP or shared memory, so native is
what they have in common with these. Table 7 is actions.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.bench.core.runner import Unavailable
from tests.bench.gpu.faces import Job, Part, Products, System
from tests.bench.gpu.faces import Lab as GpuLab
from tests.bench.gpu.systems import Ggroupfs, Mps, Plain, nothing, priority
from tests.bench.papers.cells import LATER, SECOND, Cell, Measured
from tests.bench.papers.lab import Lab
from tests.bench.papers.sharing import ANY

NAME, NATIVE = "flyt", "native"
SCIENCE = ("wavelet", "stencil", "gather", "neighbours")
NETWORKS = ("resnet50", "vgg16", "efficientnet_b0", "densenet121")
BATCH, MIB = 30, 4096
CALLS = ("copy_in", "copy_out", "launch", "count")
"""Calls that are timed, as their figures are called."""
OTHERS = (1, 2, 3, 4)
SETTLE_S, WINDOW_S = 2.0, 6.0
CRITICAL, OTHER, MANAGED = Part(critical=True), Part(), Part(memory=True)


def rate(lab: Lab | GpuLab, count: Callable[[], int], seconds: float = WINDOW_S) -> float:
    """What is counted, a second, from now on."""
    before, start = count(), lab.now()
    lab.sleep(seconds)
    return (count() - before) / (lab.now() - start)


def cells(
    lab: Lab, gpu: GpuLab, managed: System | None = None, compared: Sequence[System] | None = None
) -> Iterator[Cell]:
    """All of them. `managed` is ggroupfs with its library in the program, of tables 4, 5 and 8."""
    ours = Ggroupfs("ggroupfs", nothing, expected=ANY) if managed is None else managed

    @contextlib.contextmanager
    def words(with_library: bool) -> Iterator[Sequence[str]]:
        if not with_library:
            yield []
            return
        with ours.enter() as stage:
            yield stage.words(MANAGED)

    def science(kind: str, library: bool) -> Callable[[int], Measured]:
        def measure(number: int) -> Measured:
            with words(library) as before, gpu.jobs(before, [Job(kind, MIB)]) as (job,):
                gpu.sleep(SETTLE_S)
                found = rate(gpu, lambda: job.passes)
                job.finish()
            return Measured({"passes_per_s": found})

        return measure

    def calls(library: bool) -> Callable[[int], Measured]:
        def measure(number: int) -> Measured:
            with words(library) as before:
                found = lab.calls(before)
            return Measured({f"{name}_us": value for name, value in zip(CALLS, found, strict=True)})

        return measure

    def network(name: str, library: bool) -> Callable[[int], Measured]:
        def measure(number: int) -> Measured:
            command = ("zoo", name, "infer", "--batch", str(BATCH))
            with words(library) as before, lab.loops([(before, command)]) as (loop,):
                lab.sleep(SETTLE_S)
                found = BATCH * rate(lab, lambda: loop.passes)
                loop.finish()
            return Measured({"images_per_s": found})

        return measure

    for system, library in ((NATIVE, False), (ours.name, True)):
        yield Cell(NAME, system, {"table": 5}, 12.0, calls(library), rank=SECOND)
        for kind in SCIENCE:
            rank = SECOND if kind in SCIENCE[:2] else LATER
            yield Cell(NAME, system, {"table": 4, "program": kind}, 14.0, science(kind, library), rank=rank)
        for name in NETWORKS:
            rank = SECOND if name == NETWORKS[0] else LATER
            yield Cell(NAME, system, {"table": 8, "program": name}, 24.0, network(name, library), rank=rank)
    yield Cell(NAME, NATIVE, {"table": 6}, 12.0, beside(gpu, Plain(NATIVE), 0), rank=SECOND)
    for way in contended() if compared is None else compared:
        for others in OTHERS:
            rank = SECOND if others == max(OTHERS) and way.name != "MPS" else LATER
            yield Cell(NAME, way.name, {"table": 6, "others": others}, 16.0, beside(gpu, way, others), rank=rank)


def contended() -> list[System]:
    """Ways of table 6."""
    return [Plain("time slicing"), Mps("MPS"), Ggroupfs("ggroupfs", priority, expected=ANY)]


def beside(gpu: GpuLab, way: System, others: int) -> Callable[[int], Measured]:
    """A critical program that multiplies matrices back to back, beside others that do (the paper's C-App and G-Apps). A
    product takes the inverse of the rate in the mean."""

    def measure(number: int) -> Measured:
        with way.enter() as stage, contextlib.ExitStack() as stack:
            parts = [CRITICAL, *([OTHER] * others)]
            programs: list[Products] = [stack.enter_context(gpu.products(stage.words(part))) for part in parts]
            for one in programs:
                one.work(True)
            if others:
                stage.share(list(zip(parts, programs, strict=True)))
            gpu.sleep(SETTLE_S)
            before, start = [one.done for one in programs], gpu.now()
            gpu.sleep(WINDOW_S)
            seconds = gpu.now() - start
            rates = [(one.done - done) / seconds for one, done in zip(programs, before, strict=True)]
            for one in programs:
                one.work(False)
        if not rates[0]:
            raise Unavailable(f"the critical program did nothing in {WINDOW_S:.0f} s")
        found = {"mean_ms": 1e3 / rates[0]}
        if others:
            found["batch_per_s"] = sum(rates[1:])
        if all(rates[1:]) and others:
            found["others_ms"] = 1e3 * sum(1 / rate for rate in rates[1:]) / others
        return Measured(found)

    return measure


PUBLISHED: Mapping[str, Sequence[tuple[str, str]]] = {
    "4": (
        ("Needleman-Wunsch", "3.61 s native, 5.32 s (shared memory)"),
        ("LU decomposition", "2.05 s, 2.35 s"),
        ("StreamCluster", "56.52 s, 63.26 s"),
        ("SRAD", "8.51 s, 9.55 s"),
    ),
    "5": (
        ("cudaMemcpyH2D of 4 MB", "5.8 us native, 68 us (shared memory)"),
        ("cudaMemcpyD2H of 4 MB", "7.1 us, 29 us"),
        ("cudaLaunchKernel", "2.8 us, 62 us"),
        ("cudaGetDeviceCount", "0.24 us, 58 us"),
    ),
    "6": (("C-App beside 0 to 4", "2.02, 2.03, 2.02, 2.01, 2.04 s"), ("G-App beside 1 to 4", "2.05 to 10.29 s")),
    "8a": (
        ("ResNet50", "300 images/s native, 20.0 (shared memory)"),
        ("VGG16", "296, 55.0"),
        ("EfficientNet-B0", "305, 19.7"),
        ("DenseNet121", "308, 8.1"),
    ),
}
"""By its table: what it has, on an A5000 or A4000."""
