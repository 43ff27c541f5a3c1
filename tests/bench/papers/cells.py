"""A measurement cut into cells: one system in one case, once. Each is a file, so that sessions of minutes add up.

In round n each cell is measured once, the n-th of its rank first: what drifts falls on all. Cells of a better rank come
first, in all rounds. A cell that is there already, of the same code, is not measured again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import attrs

from tests.bench.core.record import Case, Value
from tests.bench.core.runner import Unavailable
from tests.bench.papers.bounds import Overdue

SCHEMA = 2
SAME = ("product", "programs", "gpu")
"""What of `on` is to be the same in all that is merged; `programs` within a scenario."""
FAILED = "failed: "
"""How the reason of a cell begins that failed, other than one that cannot be measured here."""
FAILURES = "failures.log"
"""Where the stacks of cells that failed are, and the logs of their programs: a session's own output may be short."""
PATIENCE, PATIENCE_S = 2.5, 60.0
"""A cell may take so many times what is planned for it, and so many seconds besides."""
FIRST, SECOND, LATER = 0, 1, 2
"""Ranks: what the first table needs, then one of each thing that is compared, then all else."""


@attrs.frozen
class Measured:
    """What came of a cell."""

    figures: Mapping[str, float]
    """By their names in core.figures."""
    raw: Mapping[str, Any] = attrs.field(factory=dict)
    """What figures are made of that need other cells, too."""
    said: Sequence[str] = ()
    """Lines that daemons and policies logged meanwhile: they mean trouble, and the figures are there all the same."""


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
    rank: int = LATER

    @property
    def name(self) -> str:
        """The name of its files, without the round."""
        words = [self.scenario, self.system, *(f"{key}={value}" for key, value in self.case.items())]
        return "--".join(re.sub(r"[^\w.=]+", "-", word).strip("-") for word in words)


@attrs.frozen
class Wanted:
    """Which cells are asked for."""

    words: Sequence[str] = ()
    """KEY=VALUE of the case, `system=NAME`, `scenario=NAME` or `rank=N`; values of one key are alternatives. All where
    there is none."""

    def takes(self, cell: Cell) -> bool:
        """Whether a cell is one of them."""
        told = {"system": cell.system, "scenario": cell.scenario, "rank": str(cell.rank)}
        told |= {key: str(one) for key, one in cell.case.items()}
        keys: dict[str, list[str]] = {}
        for word in self.words:
            key, sign, value = word.partition("=")
            if not sign or not key:
                raise ValueError(f"a cell is asked for by KEY=VALUE, and not by {word}")
            keys.setdefault(key, []).append(value)
        return all(told.get(key) in values for key, values in keys.items())


def chosen(cells: Iterable[Cell], wanted: Wanted, gpus: int) -> tuple[list[Cell], list[Cell]]:
    """Those that are asked for: that so many GPUs are enough for, and others. ValueError for two of one name."""
    found = [cell for cell in cells if wanted.takes(cell)]
    names = [cell.name for cell in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two cells are called {', '.join(sorted(twice))}")
    return [cell for cell in found if cell.gpus <= gpus], [cell for cell in found if cell.gpus > gpus]


def order(cells: Sequence[Cell], rounds: Sequence[int]) -> Iterator[tuple[int, Cell]]:
    """Ranks one after the other, in each of them rounds, each begun by another cell."""
    for rank in sorted({cell.rank for cell in cells}):
        mine = [cell for cell in cells if cell.rank == rank]
        for number in rounds:
            turn = number % len(mine)
            yield from ((number, cell) for cell in (*mine[turn:], *mine[:turn]))


def path_of(out: Path, cell: Cell, number: int) -> Path:
    """Its file of a round."""
    return out / f"{cell.name}--round={number}.json"


def there(path: Path, on: Mapping[str, Value], again: bool = False) -> bool:
    """Whether a cell was measured, of the same code on such a GPU; with `again`, and has not failed."""
    try:
        found = json.loads(path.read_text())
        same = all(found["on"].get(key) == on[key] for key in SAME if key in on)
    except (FileNotFoundError, ValueError, KeyError):
        return False
    return same and not (again and str(found.get("absent") or "").startswith(FAILED))


def takes(cell: Cell, out: Path) -> float:
    """Seconds of a cell: the longest that it took in any round that was measured, else what it says."""
    took = []
    for path in out.glob(f"{cell.name}--round=*.json"):
        with contextlib.suppress(ValueError, KeyError, OSError):
            found = json.loads(path.read_text())
            took += [] if found["absent"] else [float(found["seconds"])]
    return max(took, default=cell.seconds)


@contextlib.contextmanager
def unbounded(seconds: float) -> Iterator[list[str]]:
    """No bounds: nothing is ended, and nothing is left."""
    yield []


def run(
    cells: Sequence[Cell],
    rounds: Sequence[int],
    out: Path,
    on: Mapping[str, Value],
    *,
    more: Callable[[Cell], Mapping[str, Value]] = lambda _: {},
    budget: float = float("inf"),
    again: bool = False,
    watch: Callable[[Cell], AbstractContextManager[Mapping[str, Any]]],
    bound: Callable[[float], AbstractContextManager[list[str]]] = unbounded,
    start: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], None] = lambda _: None,
) -> int:
    """Measure what is not there yet; the number of cells that were left for want of time.

    A cell is not begun that would end more than `budget` seconds after `start` (now), by what it took before or by its
    plan. `watch` is entered while a cell is measured, and what it yields is written beside it. `bound` is entered with
    the seconds that the cell may take, and yields what was ended behind it. What fails is written with its reason; not
    so what was broken off because the budget was over.
    """
    begin, left = clock() if start is None else start, 0
    took: dict[str, float] = {}
    out.mkdir(parents=True, exist_ok=True)
    for number, cell in order(cells, rounds):
        path, mine = path_of(out, cell, number), {**on, **more(cell)}
        if there(path, mine, again):
            continue
        expected = max(takes(cell, out), took.get(cell.name, 0.0))
        spare = begin + budget - clock()
        if expected > spare:
            left += 1
            continue
        began, may = clock(), PATIENCE * expected + PATIENCE_S
        found = _measured(cell, number, min(may, spare), watch, bound)
        trace = found.pop("trace")
        if found["absent"]:
            with (out / FAILURES).open("a") as file:
                file.write(f"== {cell.name} round {number}: {found['absent']}\n{trace}\n")
        took[cell.name] = clock() - began
        if found.pop("overdue") and spare < may:
            left += 1
            tell(f"{clock() - begin:6.1f} s  {cell.name} round {number}: broken off, as the time of all is over")
            continue
        head = {"schema": SCHEMA, "scenario": cell.scenario, "system": cell.system, "case": dict(cell.case)}
        whole = {**head, "round": number, "seconds": round(took[cell.name], 3), "on": mine, **found}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(whole))
        os.replace(fresh, path)
        brief = found["absent"] or ", ".join(f"{name} {value:.4g}" for name, value in found["figures"].items())
        tell(f"{clock() - begin:6.1f} s  {cell.name} round {number} ({took[cell.name]:.0f} s): {brief}")
        for line in (*found["said"], *found["left"]):
            tell(f"          {line}")
    return left


def _measured(
    cell: Cell,
    number: int,
    seconds: float,
    watch: Callable[[Cell], AbstractContextManager[Mapping[str, Any]]],
    bound: Callable[[float], AbstractContextManager[list[str]]],
) -> dict[str, Any]:
    """What is written of a cell; nothing that happens in it gets out, but for what ends this process."""
    told: dict[str, Any] = {"figures": {}, "raw": {}, "said": [], "absent": None, "overdue": False, "trace": ""}
    clocks: Mapping[str, Any] = {}
    left: list[str] = []
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), bound(seconds) as left, watch(cell) as clocks:
            measured = cell.measure(number)
            told |= {"figures": dict(measured.figures), "raw": dict(measured.raw), "said": list(measured.said)}
    except Unavailable as error:
        told["absent"] = str(error)
    except Overdue as error:
        told |= {"absent": f"{FAILED}{error}", "overdue": True, "trace": traceback.format_exc()}
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # pytest's own, of what is shared with tests, are no Exceptions
        told |= {"absent": f"{FAILED}{type(error).__name__}: {error}"[:300], "trace": traceback.format_exc()}
    if told["absent"]:
        told |= {"figures": {}, "raw": {}, "trace": printed.getvalue() + told["trace"]}
    return {**told, "clocks": dict(clocks), "left": list(left)}


def plan(
    cells: Sequence[Cell],
    rounds: Sequence[int],
    out: Path,
    on: Mapping[str, Value],
    more: Callable[[Cell], Mapping[str, Value]] = lambda _: {},
    budget: float = float("inf"),
    again: bool = False,
) -> Iterator[str]:
    """Lines that say what `run` would measure, in its order, and when each begins. What `on` does not say may be
    anything."""
    total, count, left, left_s = 0.0, 0, 0, 0.0
    for number, cell in order(cells, rounds):
        if there(path_of(out, cell, number), {**on, **more(cell)}, again):
            continue
        seconds = takes(cell, out)
        if total + seconds > budget:
            left, left_s = left + 1, left_s + seconds
            continue
        yield f"{total:6.0f} s  {seconds:4.0f} s  {cell.name} round {number}"
        total, count = total + seconds, count + 1
    yield f"{total:6.0f} s  in all, for {count} cells ({total / 60:.0f} min)"
    if left:
        yield f"{left_s:6.0f} s  more, for {left} cells that are left for another time"
