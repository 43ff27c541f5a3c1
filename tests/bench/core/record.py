"""A record of measurements, in one JSON file: every repetition of every figure, and the machine it was measured on.

Scenarios are measured one at a time, maybe on different machines. So each carries its machine with it, and merging two
records replaces whole scenarios: figures of two runs never stand side by side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

SCHEMA = 1
"""Version of the file's format. Files with another one are refused."""

Value = str | float | int
Case = Mapping[str, Value]
"""Varied parameters, such as {"load": 0.35, "batch": 3}."""
Figures = Mapping[str, float]
"""Values by their names in core.figures."""


@attrs.frozen
class Sample:
    """One repetition."""

    repetition: int
    """Number from 0; the same number had the same requests."""
    at: float
    """Seconds from the scenario's start to the end of this repetition."""
    figures: Figures
    """Measured values."""


def _samples(found: Iterable[Sample]) -> Sequence[Sample]:
    return tuple(found)


@attrs.frozen
class Cell:
    """One system in one case."""

    system: str
    case: Case
    samples: Sequence[Sample] = attrs.field(converter=_samples)
    """Samples in the order in which they were measured."""

    def values(self, figure: str) -> list[float]:
        """Return the values of one figure, by repetition."""
        return [sample.figures[figure] for sample in self.samples if figure in sample.figures]


@attrs.frozen
class Absence:
    """A system that is missing from a scenario, wholly or in part."""

    system: str
    reason: str


def _cells(found: Iterable[Cell]) -> Sequence[Cell]:
    return tuple(found)


def _absences(found: Iterable[Absence]) -> Sequence[Absence]:
    return tuple(found)


@attrs.frozen
class Run:
    """A measured scenario."""

    scenario: str
    """Name of the scenario."""
    reference: str
    """System that others are compared with."""
    on: Mapping[str, Value]
    """Machine, driver, versions, date, commit, command."""
    parameters: Mapping[str, Any]
    """Fixed parameters: seeds, windows, and values that were measured before everything else."""
    seconds: float
    """Seconds that it took."""
    cells: Sequence[Cell] = attrs.field(default=(), converter=_cells)
    absences: Sequence[Absence] = attrs.field(default=(), converter=_absences)

    def cell(self, system: str, case: Case) -> Cell | None:
        """Return a system's cell of a case; None if that was not measured."""
        return next((cell for cell in self.cells if cell.system == system and dict(cell.case) == dict(case)), None)

    def systems(self) -> list[str]:
        """Return the measured systems, the reference first, then in the order in which they came."""
        names = dict.fromkeys(cell.system for cell in self.cells)
        return sorted(names, key=lambda name: name != self.reference)

    def compared(self, cell: Cell, figure: str) -> Cell | None:
        """Return the reference's cell of the same case, or of the nearest one with fewer parameters: alone on a GPU
        there is no number of others. None if it lacks the figure."""
        found = [
            other
            for other in self.cells
            if other.system == self.reference and other.case.items() <= cell.case.items() and other.values(figure)
        ]
        return max(found, key=lambda other: len(other.case), default=None)

    def ratios(self, cell: Cell, figure: str) -> list[float]:
        """Return the figure over the reference's, for each repetition that both have."""
        other = self.compared(cell, figure)
        if other is None:
            return []
        theirs = {sample.repetition: sample.figures.get(figure) for sample in other.samples}
        found = []
        for sample in cell.samples:
            mine, base = sample.figures.get(figure), theirs.get(sample.repetition)
            if mine is not None and base:
                found.append(mine / base)
        return found


@attrs.frozen
class Record:
    """All scenarios, each measured at most once."""

    runs: Mapping[str, Run]
    """Runs by the scenario's name."""


def merge(base: Record, newer: Record) -> Record:
    """Merge two records: scenarios of the newer one replace those of the other."""
    return Record({**base.runs, **newer.runs})


def dump(record: Record) -> str:
    """Return JSON with a line for each sample, so that a diff shows what changed."""
    runs = []
    for name, run in sorted(record.runs.items()):
        head = {key: value for key, value in attrs.asdict(run).items() if key not in ("cells", "absences")}
        lines = [json.dumps(head, indent=1, sort_keys=True)[:-2] + ',\n "absences": [']
        lines.append(",\n".join(f"  {json.dumps(attrs.asdict(one))}" for one in run.absences))
        lines.append(' ],\n "cells": [')
        lines.append(",\n".join(_cell(cell) for cell in run.cells))
        runs.append(f"{json.dumps(name)}: " + "\n".join(lines) + "\n ]\n}")
    return f'{{"schema": {SCHEMA}, "runs": {{\n' + ",\n".join(runs) + "\n}}\n"


def _cell(cell: Cell) -> str:
    samples = ",\n".join(f"    {json.dumps(attrs.asdict(sample))}" for sample in cell.samples)
    head = f'  {{"system": {json.dumps(cell.system)}, "case": {json.dumps(dict(cell.case))}, "samples": ['
    return f"{head}\n{samples}\n  ]}}"


def load(text: str) -> Record:
    """Parse a record. ValueError for anything else, or another schema."""
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"this is no record of schema {SCHEMA}")
    try:
        return Record({name: _run(run) for name, run in found["runs"].items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a record that is not whole: {error!r}") from None


def _run(found: Mapping[str, Any]) -> Run:
    cells = [
        Cell(cell["system"], cell["case"], [Sample(**sample) for sample in cell["samples"]]) for cell in found["cells"]
    ]
    absences = [Absence(**one) for one in found["absences"]]
    return Run(**{**found, "cells": cells, "absences": absences})
