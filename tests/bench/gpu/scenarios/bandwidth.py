"""Bandwidth of memory moves to the host and back, next to cudaMemcpy with pinned memory, which has the bus's speed.

For ggroupfs the library's own clock counts: copying and remapping, without the wait for the program's kernels. For
unified memory it is a prefetch of memory that is all resident.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Subject
from tests.bench.gpu.faces import Lab, Part, System
from tests.bench.gpu.systems import Ggroupfs, nothing

MIB, TIMES = 8192, 3
PINNED_S, MOVED_S = 3.0, 2.0
"""Seconds for the library to make pinned memory ahead, and for all memory to be back."""
REFERENCE = "cudaMemcpy, pinned"
PROGRAM = Part(memory=True)


@attrs.define
class Copied:
    """The bus."""

    lab: Lab
    name: str = REFERENCE

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        with self.lab.copied() as copy:
            out, back = copy()
            yield {}, {"out_gb_s": out, "in_gb_s": back}


@attrs.define
class Prefetched:
    """Unified memory."""

    lab: Lab
    name: str = "unified memory, prefetch"

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        with self.lab.elastic([], MIB, 1, "managed") as program:
            out, back = program.prefetched
            yield {}, {"out_gb_s": out, "in_gb_s": back}


@attrs.define
class Limited:
    """A limit that is lowered to half of the memory in use, and lifted."""

    lab: Lab
    system: System

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        with self.system.enter() as stage, self.lab.elastic(stage.words(PROGRAM), MIB, 1) as program:
            stage.share([(PROGRAM, program)])
            self.lab.sleep(PINNED_S)
            for _ in range(TIMES):
                for limit in (str(MIB << 19), "max"):
                    stage.write(program, "gmem.limit.high", limit)
                    self.lab.sleep(MOVED_S)
            out, back = program.moved()
            yield {}, {"out_gb_s": out, "in_gb_s": back}


def make(lab: Lab, seed: int, system: System | None = None) -> Scenario:
    """Return the scenario."""
    system = Ggroupfs("ggroupfs", nothing) if system is None else system
    subjects: list[Subject] = [Copied(lab), Prefetched(lab), Limited(lab, system)]
    return Scenario("bandwidth", REFERENCE, subjects, parameters={"mib": MIB, "times": TIMES})
