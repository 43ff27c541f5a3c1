"""A measurement cut into cells: one system in one case, once. Each is a file, so that sessions of minutes add up.

In round n each cell is measured once, the n-th first: what drifts falls on all. A cell that is there already, of the
same code, is not measured again. Cells are merged into a record (core.record) only where the product's code, the
programs and the kind of GPU are the same.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.bench.core.record import Absence, Case, Record, Run, Sample, Value
from tests.bench.core.record import Cell as Recorded
from tests.bench.core.runner import Unavailable

SCHEMA = 1
SAME = ("product", "programs", "gpu")
"""What of `on` is to be the same in all that is merged; `programs` within a scenario."""


@attrs.frozen
class Measured:
    """What came of a cell."""

    figures: Mapping[str, float]
    """By their names in core.figures."""
    raw: Mapping[str, Any] = attrs.field(factory=dict)
    """What figures are made of that need other cells, too."""


@attrs.frozen
class Cell:
    """One system in one case."""

    scenario: str
    system: str
    case: Case
    seconds: float
    """About as long it takes, starts of programs included: for the plan."""
    measure: Callable[[int], Measured]
    """Of a round's number. Unavailable where it cannot be."""
    gpus: int = 1
    """GPUs that it needs."""

    @property
    def name(self) -> str:
        """The name of its files, without the round."""
        words = [self.scenario, self.system, *(f"{key}={value}" for key, value in self.case.items())]
        return "--".join(re.sub(r"[^\w.=]+", "-", word).strip("-") for word in words)


@attrs.frozen
class Wanted:
    """Which cells are asked for."""

    words: Sequence[str] = ()
    """KEY=VALUE of the case, `system=NAME` or `scenario=NAME`; values of one key are alternatives. All without one."""

    def takes(self, cell: Cell) -> bool:
        """Whether a cell is one of them."""
        told = {"system": cell.system, "scenario": cell.scenario, **{key: str(one) for key, one in cell.case.items()}}
        keys: dict[str, list[str]] = {}
        for word in self.words:
            key, sign, value = word.partition("=")
            if not sign or not key:
                raise ValueError(f"a cell is asked for by KEY=VALUE, and not by {word}")
            keys.setdefault(key, []).append(value)
        return all(told.get(key) in values for key, values in keys.items())


def chosen(cells: Iterable[Cell], wanted: Wanted, gpus: int) -> list[Cell]:
    """Those that are asked for and that so many GPUs are enough for. ValueError for two of one name."""
    found = [cell for cell in cells if wanted.takes(cell) and cell.gpus <= gpus]
    names = [cell.name for cell in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two cells are called {', '.join(sorted(twice))}")
    return found


def order(cells: Sequence[Cell], rounds: Iterable[int]) -> Iterator[tuple[int, Cell]]:
    """Rounds one after the other, each begun by another cell."""
    for number in rounds:
        turn = number % max(1, len(cells))
        yield from ((number, cell) for cell in (*cells[turn:], *cells[:turn]))


def path_of(out: Path, cell: Cell, number: int) -> Path:
    """Its file of a round."""
    return out / f"{cell.name}--round={number}.json"


def there(path: Path, on: Mapping[str, Value]) -> bool:
    """Whether a cell was measured, of the same code on such a GPU."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return False
    return all(found["on"].get(key) == on[key] for key in SAME if key in on)


def run(
    cells: Sequence[Cell],
    rounds: Iterable[int],
    out: Path,
    on: Mapping[str, Value],
    *,
    more: Callable[[Cell], Mapping[str, Value]] = lambda _: {},
    budget: float = float("inf"),
    watch: Callable[[], Any],
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Measure what is not there yet; the number of cells that were left for want of time.

    A cell is not begun that would end after `budget` seconds, by its plan or by what it took before. `watch` is entered
    while a cell is measured, and what it yields is written beside it. What fails is written with its reason.
    """
    start, left = clock(), 0
    took: dict[str, float] = {}
    out.mkdir(parents=True, exist_ok=True)
    for number, cell in order(cells, rounds):
        path, mine = path_of(out, cell, number), {**on, **more(cell)}
        if there(path, mine):
            continue
        if clock() - start + max(cell.seconds, took.get(cell.name, 0.0)) > budget:
            left += 1
            continue
        began = clock()
        told: dict[str, Any] = {"figures": {}, "raw": {}, "absent": None}
        with watch() as clocks:
            try:
                measured = cell.measure(number)
                told |= {"figures": dict(measured.figures), "raw": dict(measured.raw)}
            except Unavailable as error:
                told["absent"] = str(error)
            except Exception as error:
                tell(traceback.format_exc())
                told["absent"] = f"failed: {type(error).__name__}: {error}"[:300]
        took[cell.name] = clock() - began
        head = {"schema": SCHEMA, "scenario": cell.scenario, "system": cell.system, "case": dict(cell.case)}
        whole = {**head, "round": number, "seconds": round(took[cell.name], 3), "on": mine, "clocks": dict(clocks)}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({**whole, **told}))
        os.replace(fresh, path)
        brief = told["absent"] or ", ".join(f"{name} {value:.4g}" for name, value in told["figures"].items())
        tell(f"{clock() - start:6.1f} s  {cell.name} round {number} ({took[cell.name]:.0f} s): {brief}")
    return left


def plan(
    cells: Sequence[Cell],
    rounds: Sequence[int],
    out: Path,
    on: Mapping[str, Value],
    more: Callable[[Cell], Mapping[str, Value]] = lambda _: {},
) -> Iterator[str]:
    """Lines that say what would be measured, and how long it takes. What `on` does not say may be anything."""
    total, count = 0.0, 0
    for cell in cells:
        missing = [number for number in rounds if not there(path_of(out, cell, number), {**on, **more(cell)})]
        total, count = total + cell.seconds * len(missing), count + len(missing)
        yield f"{cell.seconds:5.0f} s  x {len(missing)}  {cell.name}"
    yield f"{total:5.0f} s  in all, for {count} cells ({total / 60:.0f} min)"


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
) -> Record:
    """One record of cells. `references` has the system that others are compared with, by scenario; `complete` adds
    figures that need several cells, such as what attains an SLO. Mixed as `same` says."""
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
        more = {"rounds": rounds, "clocks": _clocks(mine)}
        seconds = round(sum(one.seconds for one in mine), 3)
        runs[name] = Run(name, references[name], on, more, seconds, recorded, absences)
    return Record(runs)


def _clocks(found: Sequence[Found]) -> dict[str, Any]:
    """Least and most of the medians of all cells, and the part of cells in which something slowed the GPU."""
    told: dict[str, Any] = {}
    for name in ("sm_mhz", "memory_mhz", "power_w", "celsius"):
        medians = [one.clocks[name]["median"] for one in found if name in one.clocks]
        if medians:
            told[name] = [min(medians), max(medians)]
    slowed = [one for one in found if one.clocks.get("slowed")]
    told["slowed_cells"] = len(slowed) / len(found)
    return told
