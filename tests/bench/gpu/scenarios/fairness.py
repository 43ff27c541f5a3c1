"""Three batch programs with weights 100, 200 and 400: how far each one's work is from its share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario
from tests.bench.gpu.faces import Lab, Part, System
from tests.bench.gpu.systems import Ggroupfs, Mps, Plain, weights

WEIGHTS = (100, 200, 400)
SETTLE_S, WINDOW_S = 4.0, 5.0
REFERENCE = "time slicing"


def unfairness(work: Sequence[float], weights: Sequence[int]) -> float:
    """Return the largest relative difference of a share from what its weight demands. ValueError without any work."""
    total = sum(work)
    if not total:
        raise ValueError("nobody did anything")
    return max(abs(one / total / (weight / sum(weights)) - 1) for one, weight in zip(work, weights, strict=True))


@attrs.define
class Weighed:
    """Three programs under some system."""

    lab: Lab
    system: System

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        parts = [Part(weight=weight) for weight in WEIGHTS]
        with self.system.enter() as stage, contextlib.ExitStack() as stack:
            programs = [stack.enter_context(self.lab.products(stage.words(part))) for part in parts]
            for one in programs:
                one.work(True)
            stage.share(list(zip(parts, programs, strict=True)))
            self.lab.sleep(SETTLE_S)
            before, start = [one.done for one in programs], self.lab.now()
            self.lab.sleep(WINDOW_S)
            work = [float(one.done - done) for one, done in zip(programs, before, strict=True)]
            elapsed = self.lab.now() - start
            for one in programs:
                one.work(False)
            case: Case = {"weights": ":".join(map(str, WEIGHTS))}
            yield case, {"unfairness": unfairness(work, WEIGHTS), "batch_per_s": sum(work) / elapsed}


def systems() -> list[System]:
    """Return the systems that are compared."""
    total = sum(WEIGHTS)
    return [
        Plain(REFERENCE),
        Mps("MPS, percentages by weight", lambda part: round(100 * part.weight / total)),
        Ggroupfs("ggroupfs", weights),
    ]


def make(lab: Lab, seed: int, compared: Sequence[System] | None = None) -> Scenario:
    """Return the scenario."""
    subjects = [Weighed(lab, one) for one in (systems() if compared is None else compared)]
    return Scenario("fairness", REFERENCE, subjects, parameters={"window_s": WINDOW_S, "settle_s": SETTLE_S})
