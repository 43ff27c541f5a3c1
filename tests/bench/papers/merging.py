"""Cells that were measured, read and merged into a record where they are of the same code, on the same kind of GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.bench.core.record import Absence, Case, Record, Run, Sample
from tests.bench.core.record import Cell as Recorded
from tests.bench.papers.cells import SAME, SCHEMA
from tests.bench.papers.clocks import NAMES


@attrs.frozen
class Found:
    """A cell's file, read."""

    scenario: str
    system: str
    case: Case
    round: int
    seconds: float
    on: Mapping[str, Any]
    clocks: Mapping[str, Any]
    figures: Mapping[str, float]
    raw: Mapping[str, Any]
    absent: str | None
    said: Sequence[str] = ()
    """Lines that daemons and policies logged."""
    left: Sequence[str] = ()
    """What was ended behind it."""


class Mixed(ValueError):
    """Cells that are not of the same code, or GPU."""


def read(paths: Iterable[Path]) -> list[Found]:
    """Files of cells. ValueError for one that is none."""
    found = []
    for path in sorted(paths):
        whole = json.loads(path.read_text())
        if not isinstance(whole, dict) or whole.pop("schema", None) != SCHEMA:
            raise ValueError(f"{path}: this is no cell of schema {SCHEMA}")
        found.append(Found(**whole))
    return found


def same(found: Sequence[Found]) -> None:
    """Mixed where cells differ in what is to be the same; it names both and how many there are of each."""
    for key in SAME:
        counts: dict[str, dict[str, int]] = {}
        for one in found:
            mine = counts.setdefault(one.scenario if key == "programs" else "", {})
            mine[str(one.on.get(key))] = mine.get(str(one.on.get(key)), 0) + 1
        for scenario, values in counts.items():
            if len(values) > 1:
                told = ", ".join(f"{count} with {value}" for value, count in sorted(values.items()))
                raise Mixed(f"these cells{scenario and f' of {scenario}'} are not of one {key}: {told}")


def merged(
    found: Sequence[Found],
    references: Mapping[str, str],
    complete: Callable[[Sequence[Found]], Sequence[Found]] = lambda cells: cells,
    more: Callable[[Sequence[Found]], Mapping[str, Any]] = lambda cells: {},
) -> Record:
    """One record of cells. `references` has the system that others are compared with, by scenario; `complete` adds
    figures that need several cells, such as what attains an SLO; `more` has parameters of a run that are made of its
    cells. Mixed as `same` says."""
    same(found)
    runs = {}
    for name in dict.fromkeys(one.scenario for one in found):
        mine = complete([one for one in found if one.scenario == name])
        grouped: dict[tuple[str, str], list[Found]] = {}
        for one in mine:
            grouped.setdefault((one.system, json.dumps(one.case, sort_keys=True)), []).append(one)
        recorded, absences = [], []
        for (system, _), several in grouped.items():
            several = sorted(several, key=lambda one: one.round)
            samples = [Sample(one.round, one.seconds, dict(one.figures)) for one in several if one.absent is None]
            if samples:
                recorded.append(Recorded(system, several[0].case, samples))
            reasons = dict.fromkeys(one.absent for one in several if one.absent is not None)
            told = " ".join(f"{key}={value}" for key, value in several[0].case.items())
            absences += [Absence(system, f"{told}: {reason}" if told else reason) for reason in reasons]
        rounds = sorted({one.round for one in mine})
        on = {**mine[0].on, "date": min(str(one.on.get("date", "")) for one in mine)}
        parameters = {"rounds": rounds, "clocks": _clocks(mine), "findings": _findings(mine), **more(mine)}
        seconds = round(sum(one.seconds for one in mine), 3)
        runs[name] = Run(name, references[name], on, parameters, seconds, recorded, absences)
    return Record(runs)


def _clocks(found: Sequence[Found]) -> dict[str, Any]:
    """Least and most of the medians of all cells, and the part of cells in which something slowed the GPU."""
    told: dict[str, Any] = {}
    for name in NAMES:
        medians = [one.clocks[name]["median"] for one in found if name in one.clocks]
        if medians:
            told[name] = [min(medians), max(medians)]
    slowed = [one for one in found if one.clocks.get("slowed")]
    told["slowed_cells"] = len(slowed) / len(found)
    return told


def _findings(found: Sequence[Found]) -> list[str]:
    """What daemons and policies logged beside figures, and what had to be ended behind cells."""
    return [
        f"{', '.join([one.system, *(f'{key} {value}' for key, value in one.case.items())])}, round {one.round}: {line}"
        for one in found
        for line in (*one.said, *one.left)
    ]
