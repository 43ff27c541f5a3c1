"""Time from the write of a control file until its effect holds, and until a new program is in the tree.

The reference is a write that is booked and moves nothing on the GPU.

Strangers that start or end with the driver meanwhile, as a machine's own monitor starts them, make all levers wait
(docs/nvidia.md). Waits beside strangers are left out, and counted.

A program appears at the daemon's next look, so it matters when between two looks it starts. When one is seen it is
ended and the next starts, which would always be equally long after a look, depending on the start-up time of the
machine. So each waits first, and each for another part of the interval: a dozen random waits would often be close
together.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import attrs

from backend.nvidia.gpu import POLL
from tests.bench.core.arrivals import seed_of
from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Subject, Unavailable
from tests.bench.core.spread import percentile
from tests.bench.gpu.faces import Lab, Part, Running, Stage, Strangers, System
from tests.bench.gpu.systems import Ggroupfs, nothing

TIMES = 100
STARTS = 12
BOOKED = "a write that is only booked"
BATCH = Part()


def pauses(chance: random.Random, count: int = STARTS) -> list[float]:
    """Return waits in seconds, one in each of so many parts of the interval between two looks, in random order."""
    found = [(part + chance.random()) * POLL / count for part in range(count)]
    chance.shuffle(found)
    return found


Wait = tuple[float, float]
"""Start and end of a wait, in seconds of the lab's clock."""


def waits(lab: Lab, acts: Sequence[Callable[[], None]], times: int = TIMES) -> list[list[Wait]]:
    """Return the start and end of each of some acts, which are done one after another, so many times."""
    found: list[list[Wait]] = [[] for _ in acts]
    for _ in range(times):
        for act, into in zip(acts, found, strict=True):
            start = lab.now()
            act()
            into.append((start, lab.now()))
    return found


def figures(waited: Sequence[Wait], strangers: Strangers) -> Figures:
    """Return the figures of all waits without strangers. Unavailable if there is none."""
    ms = [1e3 * (end - begin) for begin, end in waited if not strangers.during(begin, end)]
    if not ms:
        raise Unavailable("strangers were on the GPU all the time")
    disturbed = len(waited) - len(ms)
    return {"p50_ms": percentile(ms, 0.5), "p99_ms": percentile(ms, 0.99), "worst_ms": max(ms), "disturbed": disturbed}


def writing(stage: Stage, program: Running, name: str, value: str) -> Callable[[], None]:
    """Return the act of writing a file."""
    return lambda: stage.write(program, name, value)


@attrs.define
class Booked:
    """The cost of a write that does not concern a GPU."""

    lab: Lab
    system: System
    name: str = BOOKED

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        with (
            self.lab.strangers() as strangers,
            self.system.enter() as stage,
            self.lab.products(stage.words(BATCH)) as program,
        ):
            program.work(True)
            stage.share([(BATCH, program)])
            (waited,) = waits(self.lab, [writing(stage, program, "gmem.peak", "reset")])
            yield {}, figures(waited, strangers)


@attrs.define
class Levers:
    """Writes that act on the GPU."""

    lab: Lab
    system: System
    seed: int

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        with self.lab.strangers() as strangers, self.system.enter() as stage:
            appeared: list[Wait] = []
            chance = random.Random(seed_of(self.seed, "appears", repetition))
            for pause in pauses(chance):
                self.lab.sleep(pause)
                with self.lab.begun(stage.words(BATCH)) as program:
                    stage.present(program)
                    appeared.append((program.created, self.lab.now()))
            yield {"lever": "appears in the tree"}, figures(appeared, strangers)
            with self.lab.products(stage.words(BATCH)) as program:
                program.work(True)
                stage.share([(BATCH, program)])
                act = [writing(stage, program, "compute.freeze", value) for value in "10"]
                for name, waited in zip(("freeze", "thaw"), waits(self.lab, act), strict=True):
                    yield {"lever": name}, figures(waited, strangers)
                act = [writing(stage, program, "compute.timeslice", value) for value in "14"]
                waited = list(itertools.chain(*waits(self.lab, act)))
                yield {"lever": "timeslice"}, figures(waited, strangers)


def make(lab: Lab, seed: int, system: System | None = None) -> Scenario:
    """Return the scenario."""
    system = Ggroupfs("ggroupfs", nothing) if system is None else system
    subjects: list[Subject] = [Booked(lab, system), Levers(lab, system, seed)]
    return Scenario("levers", BOOKED, subjects, parameters={"seed": seed, "times": TIMES})
