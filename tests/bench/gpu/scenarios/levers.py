"""How long it takes that a control file is written, until what it says holds; and until a program is in the tree.

The reference is a write that is booked and moves nothing on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario
from tests.bench.core.spread import percentile
from tests.bench.gpu.faces import Lab, Part, Running, Stage, System
from tests.bench.gpu.systems import Ggroupfs, nothing

TIMES = 100
STARTS = 5
BOOKED = "a write that is only booked"
BATCH = Part()


def waits(lab: Lab, acts: Sequence[Callable[[], None]], times: int = TIMES) -> list[list[float]]:
    """What each of some acts took, in ms, one after the other so many times."""
    found: list[list[float]] = [[] for _ in acts]
    for _ in range(times):
        for act, into in zip(acts, found, strict=True):
            start = lab.now()
            act()
            into.append(1e3 * (lab.now() - start))
    return found


def figures(ms: Sequence[float]) -> Figures:
    """Of all waits."""
    return {"p50_ms": percentile(ms, 0.5), "p99_ms": percentile(ms, 0.99), "worst_ms": max(ms)}


def writing(stage: Stage, program: Running, name: str, value: str) -> Callable[[], None]:
    """The act of writing a file."""
    return lambda: stage.write(program, name, value)


@attrs.define
class Booked:
    """What a write costs that has nothing to do with a GPU."""

    lab: Lab
    system: System
    name: str = BOOKED

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """See runner.Subject."""
        with self.system.enter() as stage, self.lab.products(stage.words(BATCH)) as program:
            program.work(True)
            stage.share([(BATCH, program)])
            (ms,) = waits(self.lab, [writing(stage, program, "gmem.peak", "reset")])
            yield {}, figures(ms)


@attrs.define
class Levers:
    """Those that act on the GPU."""

    lab: Lab
    system: System

    @property
    def name(self) -> str:
        """Of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """See runner.Subject."""
        with self.system.enter() as stage:
            appeared = []
            for _ in range(STARTS):
                with self.lab.products(stage.words(BATCH)) as program:
                    stage.present(program)
                    appeared.append(1e3 * (self.lab.now() - program.created))
            yield {"lever": "appears in the tree"}, figures(appeared)
            with self.lab.products(stage.words(BATCH)) as program:
                program.work(True)
                stage.share([(BATCH, program)])
                act = [writing(stage, program, "compute.freeze", value) for value in "10"]
                for name, ms in zip(("freeze", "thaw"), waits(self.lab, act), strict=True):
                    yield {"lever": name}, figures(ms)
                act = [writing(stage, program, "compute.timeslice", value) for value in "14"]
                yield {"lever": "timeslice"}, figures([one for each in waits(self.lab, act) for one in each])


def make(lab: Lab, seed: int, system: System | None = None) -> Scenario:
    """The scenario."""
    system = Ggroupfs("ggroupfs", nothing) if system is None else system
    return Scenario("levers", BOOKED, [Booked(lab, system), Levers(lab, system)], parameters={"times": TIMES})
