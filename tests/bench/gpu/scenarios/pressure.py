"""One program that holds more than a budget of 16 GiB of GPU memory: how much of its speed is left.

It uses all of its memory in one pass of eight, and half of it in the others. The card itself has far more free memory,
since oversubscribing it with unified memory can hang it. So with unified memory the program itself keeps to the budget,
(elastic.cu; docs/notes/measurements.md): the least recently used parts are sent to the host before others come back, by
the kernel's page faults or by a prefetch; or its author decides for good (advice).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import attrs

from tests.bench.core.record import Case, Figures
from tests.bench.core.runner import Scenario, Unavailable
from tests.bench.gpu.faces import Elastic, Lab, Part, System
from tests.bench.gpu.systems import Ggroupfs, Mps, Plain, nothing

BUDGET_MIB = 16 << 10
PERCENTS = (120, 150, 200)
"""Memory of the program in percent of the budget."""
PARTS = 64
CYCLE = 8
"""Length of a cycle in passes, one of which uses everything."""
WINDOW_S, SLOW_S, STUCK_S = 2.0, 8.0, 90.0
SETTLE_S, SETTLED_S = 6.0, 42.0
"""Seconds between two looks at a limited program, and in all, until its speed stops growing as hot memory returns."""
FASTER = 1.1
PROGRAM, LIMITED = Part(memory=True), Part(memory=True, limit="16G")
RESIDENT = "all of it resident"


def speed(lab: Lab, program: Elastic, window: float = WINDOW_S) -> float:
    """Return the passes per second. For a program without a whole cycle in a window, from its last passes of both
    kinds. TimeoutError for one that is stuck."""
    first, deadline = program.passes, lab.now() + STUCK_S
    while program.passes == first and lab.now() < deadline:  # start at the end of a pass
        lab.sleep(0.005)
    first, start = program.passes, lab.now()
    while lab.now() < deadline:
        lab.sleep(0.01)
        done, elapsed = program.passes - first, lab.now() - start
        if elapsed >= window and done >= CYCLE and done % CYCLE == 0:
            return done / elapsed
        hot, full = program.pass_seconds
        if elapsed >= SLOW_S and hot and full and done < CYCLE:
            return CYCLE / ((CYCLE - 1) * hot + full)
        if elapsed >= SLOW_S + window and done >= CYCLE:
            return done / elapsed  # too fast for the end of a cycle to be seen
    raise TimeoutError(f"{program.passes} passes, and none of some kind, within {STUCK_S:.0f} s")


def settled(lab: Lab, program: Elastic) -> float:
    """Wait until a program gets no faster; return the seconds until then, in steps of SETTLE_S."""
    start, fastest = lab.now(), 0.0
    while (waited := lab.now() - start) < SETTLED_S:
        passes, began = program.passes, lab.now()
        lab.sleep(SETTLE_S)
        rate = (program.passes - passes) / (lab.now() - began)
        if fastest and rate <= FASTER * fastest:
            break
        fastest = max(fastest, rate)
    return waited


@attrs.define
class Pressed:
    """A program under some system."""

    lab: Lab
    system: System
    options: Sequence[str] = ()
    """Options of elastic.cu; the word BUDGET stands for the size of data that fits."""
    part: Part = PROGRAM
    """LIMITED where the system is told the budget."""

    @property
    def name(self) -> str:
        """Name of the system."""
        return self.system.name

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Measure; see runner.Subject."""
        data = BUDGET_MIB - self.lab.context_mib()
        options = [str(data) if one == "BUDGET" else one for one in self.options]
        for percent in PERCENTS:
            mib = BUDGET_MIB * percent // 100
            with self.system.enter() as stage, contextlib.ExitStack() as stack:
                try:
                    program = stack.enter_context(self.lab.elastic(stage.words(self.part), mib, PARTS, *options))
                except Unavailable as error:
                    raise Unavailable(f"at {percent} % of the budget {error}") from None
                stage.share([(self.part, program)])
                figures = {"settled_s": settled(self.lab, program)} if self.part.limit else {}
                yield {"percent": percent}, {"passes_per_s": speed(self.lab, program), **figures}


def subjects(lab: Lab) -> list[Pressed]:
    """Return the subjects that are compared."""
    return [
        Pressed(lab, Plain(RESIDENT)),
        Pressed(lab, Ggroupfs("ggroupfs", nothing), part=LIMITED),
        Pressed(lab, Plain("unified memory, page faults"), ["managed", "BUDGET", "faults"]),
        Pressed(lab, Plain("unified memory, prefetch"), ["managed", "BUDGET", "prefetch"]),
        Pressed(lab, Plain("unified memory, advice"), ["managed", "BUDGET", "advised"]),
        Pressed(lab, Mps("MPS, limit of 16 GiB"), part=LIMITED),
    ]


def make(lab: Lab, seed: int, compared: Sequence[Pressed] | None = None) -> Scenario:
    """Return the scenario."""
    fixed = {"budget_mib": BUDGET_MIB, "parts": PARTS, "window_s": WINDOW_S}
    return Scenario("pressure", RESIDENT, subjects(lab) if compared is None else compared, parameters=fixed)
