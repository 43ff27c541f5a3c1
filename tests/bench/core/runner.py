"""Measurement of a scenario: its systems in turn, again and again, for as long as there is time.

In repetition n the nth system begins, so that none is always first, and drift (clocks, temperature) affects all. A
system that is unavailable says why, once, and the others go on; so does one that fails.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs

from tests.bench.core.record import Absence, Case, Cell, Figures, Run, Sample, Value


class Unavailable(Exception):
    """A system cannot be measured here; the message says why."""


class Subject(Protocol):
    """A system in a scenario."""

    @property
    def name(self) -> str:
        """Name of the system."""
        ...

    def measure(self, repetition: int) -> Iterator[tuple[Case, Figures]]:
        """Set up, measure each case once, and take down. Unavailable where that is impossible."""
        ...


@attrs.frozen
class Scenario:
    """A scenario to measure."""

    name: str
    reference: str
    """Name of the system that others are compared with."""
    subjects: Sequence[Subject]
    prepare: Callable[[], Mapping[str, Any]] = dict
    """Called first; its result is among the parameters of the run."""
    parameters: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.define
class _Plan:
    """The rest of a scenario's measurement."""

    cells: dict[tuple[str, str], Cell] = attrs.field(factory=dict)
    absences: list[Absence] = attrs.field(factory=list)
    longest: dict[str, float] = attrs.field(factory=dict)
    """Longest time in seconds that each system took."""

    def takes(self, system: str) -> float:
        """Return the seconds that a system takes, as far as is known."""
        return self.longest.get(system, 0.0)

    def add(self, system: str, case: Case, sample: Sample) -> None:
        key = (system, repr(sorted(case.items())))
        cell = self.cells.get(key) or Cell(system, dict(case), [])
        self.cells[key] = attrs.evolve(cell, samples=[*cell.samples, sample])


def run(
    scenario: Scenario,
    on: Mapping[str, Value],
    *,
    repetitions: int,
    budget: float,
    clock: Callable[[], float] = time.monotonic,
    save: Callable[[Run], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Run:
    """Measure a scenario. There are at most so many repetitions, and none that would end more than `budget` seconds
    after the start, judging by the system's former time; nor one that would leave no time for the reference, without
    which it says nothing. `save` is called after each system, with what there is by then."""
    start, plan = clock(), _Plan()
    parameters = {**scenario.parameters, **scenario.prepare(), "repetitions": repetitions, "budget_s": budget}
    gone: set[str] = set()

    def so_far() -> Run:
        return Run(
            scenario.name,
            scenario.reference,
            on,
            parameters,
            round(clock() - start, 3),
            list(plan.cells.values()),
            list(plan.absences),
        )

    for repetition in range(repetitions):
        turn = repetition % max(1, len(scenario.subjects))
        reserve = 0.0 if scenario.reference in gone else plan.takes(scenario.reference)
        for subject in (*scenario.subjects[turn:], *scenario.subjects[:turn]):
            if subject.name in gone:
                continue
            if subject.name == scenario.reference:
                reserve = 0.0
            left, began = start + budget - reserve - clock(), clock()
            if left <= plan.takes(subject.name):
                plan.absences.append(Absence(subject.name, f"no time was left for repetition {repetition + 1}"))
                gone.add(subject.name)
                continue
            try:
                for case, figures in subject.measure(repetition):
                    plan.add(subject.name, case, Sample(repetition, round(clock() - start, 3), dict(figures)))
                    tell(f"{subject.name} {dict(case)}: {_brief(figures)}")
            except Unavailable as error:
                plan.absences.append(Absence(subject.name, str(error)))
                gone.add(subject.name)
            except Exception as error:
                tell(traceback.format_exc())
                plan.absences.append(Absence(subject.name, f"failed: {type(error).__name__}: {error}"[:300]))
                gone.add(subject.name)
            plan.longest[subject.name] = max(plan.takes(subject.name), clock() - began)
            save(so_far())
    return so_far()


def _brief(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
