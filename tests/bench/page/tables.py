"""Tables of a record in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Case, Cell, Run, Sample
from tests.bench.core.spread import Spread

CASES: Mapping[str, Callable[[Any], str]] = {
    "load": lambda value: f"load {100 * value:.0f} %",
    "batch": lambda value: f"{value} batch",
    "percent": lambda value: f"{value} % of the budget",
    "timeslice_ms": lambda value: f"batch {value:g} ms",
    "limit_percent": lambda value: f"limit {value} %",
    "lever": str,
    "weights": str,
    "processes": lambda value: f"{value:,} processes",
    "trace": str,
    "others": lambda value: f"{value} beside",
    "mix": str,
    "programs": lambda value: f"{value} programs",
    "graphs": lambda value: "graphs" if value else "launches",
    "arrivals": lambda value: f"{value} arrivals",
    "low": lambda value: f"beside {value}",
    "memory": lambda value: f"{value} % of the memory of both",
    "duty": lambda value: f"the other for {value} % of the time",
    "table": lambda value: f"table {value}",
    "program": str,
    "models": lambda value: f"{value} models",
    "slices": lambda value: f"{value:,} slices",
    "gpus": lambda value: f"{value} GPUs",
    "own": lambda value: f"{value} % of its memory on the GPU",
    "beside": lambda value: f"beside {value}",
    "gangs": lambda value: f"{value} gangs",
    "turn_s": lambda value: f"turns of {value:g} s",
}
"""Text for a case, by the parameter that was varied."""
WIDTH = 120
"""Greatest width of a line of the page, in columns."""


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def spread(values: Sequence[float]) -> str:
    """Return the median, and the range if there are several values."""
    found = Spread.of(values)
    if found.count == 1 or number(found.least) == number(found.most):
        return number(found.median)
    return f"{number(found.median)} ({number(found.least)} to {number(found.most)})"


def case_of(case: Case) -> str:
    """Return a case in words."""
    return ", ".join(CASES[key](value) for key, value in case.items())


def heading(figure: str) -> str:
    """Return the heading of a column."""
    kind = KINDS[figure]
    return f"{kind.label}, {kind.unit}" if kind.unit else kind.label


def row(*words: str) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(words) + " |"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a whole table."""
    return "\n".join([row(*heads), row(*("---" for _ in heads)), *(row(*one) for one in rows)])


def cases(run: Run) -> list[Case]:
    """Return the cases in the order of measurement, those of the reference first."""
    found: dict[str, Case] = {}
    for cell in sorted(run.cells, key=lambda cell: cell.system != run.reference):
        found.setdefault(repr(sorted(cell.case.items())), cell.case)
    return list(found.values())


def only(run: Run, case: Case) -> Run:
    """Return one cell per system without a case, which combines the given case and those with fewer parameters. For a
    system alone, for example, the requests at a load and the speed of a batch program are two cases.
    """
    cells = []
    for system in run.systems():
        found = [cell for cell in run.cells if cell.system == system and cell.case.items() <= case.items()]
        samples: dict[int, Sample] = {}
        for cell in sorted(found, key=lambda cell: len(cell.case)):
            for sample in cell.samples:
                before = samples.get(sample.repetition, sample)
                samples[sample.repetition] = attrs.evolve(sample, figures={**before.figures, **sample.figures})
        if samples:
            cells.append(Cell(system, {}, [samples[repetition] for repetition in sorted(samples)]))
    return attrs.evolve(run, cells=cells)


def everything(run: Run, figures: Sequence[str], medians: bool = False) -> str:
    """Return a row per case and system, with a column for each figure that any cell has; without the spread for
    `medians`. A table that would be too wide is split into several, each with some of the figures.
    """
    there = [name for name in figures if any(cell.values(name) for cell in run.cells)]
    rows: list[list[str]] = []
    for case in cases(run):
        for system in run.systems():
            cell = run.cell(system, case)
            if cell is not None and any(cell.values(name) for name in there):
                rows.append([case_of(case), system, *(_told(run, cell, name, medians) for name in there)])
    heads, keys = ["", "system", *map(heading, there)], 2
    if not any(row[0] for row in rows):  # only one case
        heads, rows, keys = heads[1:], [row[1:] for row in rows], 1
    return "\n\n".join(_narrow(heads, rows, keys))


def _narrow(heads: Sequence[str], rows: Sequence[Sequence[str]], keys: int) -> Iterator[str]:
    """Yield tables that are not too wide, each with the first `keys` columns and as many others as fit."""
    first = keys
    while first < len(heads):
        last = first + 1
        while last < len(heads) and _width(_columns([heads, *rows], keys, first, last + 1)) <= WIDTH:
            last += 1
        some = _columns(rows, keys, first, last)
        yield table([*heads[:keys], *heads[first:last]], [one for one in some if any(one[keys:])])
        first = last


def _columns(rows: Sequence[Sequence[str]], keys: int, first: int, last: int) -> list[list[str]]:
    return [[*one[:keys], *one[first:last]] for one in rows]


def _width(rows: Sequence[Sequence[str]]) -> int:
    return max(len(row(*one)) for one in rows)


def _told(run: Run, cell: Cell, figure: str, medians: bool) -> str:
    """Return a figure, and its ratio to that of the reference."""
    values = cell.values(figure)
    if not values:
        return ""
    ratios = run.ratios(cell, figure) if cell.system != run.reference and KINDS[figure].lower is not None else []
    least = "≥ " if figure.startswith(("p99", "mean")) and any(cell.values("given_up")) else ""
    told = number(Spread.of(values).median) if medians else spread(values)
    return least + told + (f", {Spread.of(ratios).median:.4g} x" if ratios else "")


def machine(run: Run) -> str:
    """Return the machine of the measurement, in one line."""
    on: Mapping[str, object] = run.on
    words = []
    if "gpu" in on:
        words.append(f"{on['gpu']}, driver {on.get('driver', 'unknown')}")
    words.append(f"{on.get('cpus', '?')} CPUs ({on.get('cpu', 'unknown')}), Linux {on.get('kernel', 'unknown')}")
    words.append(
        f"Python {on.get('python', 'unknown')}, {on.get('date', 'no date')}, commit {on.get('commit', 'unknown')}"
    )
    return "; ".join(words)
