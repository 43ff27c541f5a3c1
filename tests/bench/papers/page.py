"""A record of the papers' pairs as a page: pooled tables, Pareto plots, and what the papers published beside them.

All of it is made of a record, and of no cell, so that it can be made again of what is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Record, Run
from tests.bench.page import tables
from tests.bench.page.published import FIGURES
from tests.bench.papers import flyt, pairs

COLUMNS = (
    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "attained", "steps_per_s"),
    *("requests", "given_up"),
)
TITLES = {
    "pairs": "An LLM server that comes first, beside another program",
    "salus-packing": "42 models on one GPU (Salus, figure 13)",
    "salus-trace": "A trace of 100 jobs (Salus, 5.1), scaled to minutes",
    "flyt": "Tables 4, 5, 6 and 8 of Flyt",
    "flyt-actions": "Table 7 of Flyt",
    "scale-gpu": "200 programs, and 1000 slices",
    "scale-balance": "GPUs of one host",
    "scale-gangs": "Programs on all GPUs of one host",
}
SLO = (
    "SLO: the P99 of the server alone, as in Ghost (6.4) and GVM (7.4); a request keeps it by its time to the first "
    "token and by the mean of its times between tokens. Percentiles are of the requests of all rounds together."
)
MEMORIES = (100, pairs.PRESSED)
"""Percent of the memory of both programs, of which there is a plot each."""


Pooled = tuple[str, Mapping[str, Any], Mapping[str, float]]
"""A system, a case, and its figures over the requests of all rounds."""


def pooled(record: Record) -> list[Pooled]:
    """What a record has of pairs; nothing where it has none."""
    run = record.runs.get(pairs.NAME)
    return [] if run is None else [(one[0], dict(one[1]), one[2]) for one in run.parameters.get("pooled", [])]


def figures_of(record: Record, system: str, **case: object) -> Mapping[str, float]:
    """The pooled figures of a pair; nothing where it was not measured."""
    return next((told for name, at, told in pooled(record) if (name, at) == (system, case)), {})


def point(figures: Mapping[str, float], alone: float) -> tuple[float, float] | None:
    """Throughput of the other program as a part of that alone, and SLO attainment; None where one is missing."""
    if "steps_per_s" not in figures or "attained" not in figures or not alone:
        return None
    return figures["steps_per_s"] / alone, figures["attained"]


def points(record: Record, memory: int, low: str = "diffusion") -> dict[str, list[tuple[float, float]]]:
    """By system, the points of the plot, in order of the throughput."""
    alone = figures_of(record, pairs.EXCLUSIVE, low=low).get("steps_per_s", 0.0)
    made: dict[str, list[tuple[float, float]]] = {}
    for system, case, told in pooled(record):
        same = (case.get("low"), case.get("memory"), case.get("arrivals")) == (low, memory, "gamma")
        if same and (one := point(told, alone)):
            made.setdefault(system, []).append(one)
    return {system: sorted(several) for system, several in made.items()}


def frontier(every: Mapping[str, Sequence[tuple[float, float]]]) -> list[tuple[str, float, float]]:
    """The points that no other one is better than in both, in order of the throughput."""
    flat = [(system, x, y) for system, several in every.items() for x, y in several]
    return sorted(
        (one for one in flat if not any(x >= one[1] and y >= one[2] and (x, y) != one[1:] for _, x, y in flat)),
        key=lambda one: one[1],
    )


def draw(every: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str) -> bool:
    """The plot of figures 14 and 15; whether there was anything to draw."""
    if not every:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    from tests.bench.page.plots import LEGEND, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 3.6), layout="constrained")
        axes = figure.subplots()
        for system, several in every.items():
            x, y = zip(*several, strict=True)
            axes.plot(x, y, "o" if len(several) == 1 else "o-", label=system, markersize=4)
        best = frontier(every)
        axes.plot([one[1] for one in best], [one[2] for one in best], color="black", linestyle=":", zorder=0)
        axes.set(xlabel="throughput of the other, of that alone", ylabel="requests within the SLO", title=title)
        axes.set(xlim=(0, None), ylim=(0, 1.03))
        axes.legend(**LEGEND)
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return True


def cell(figures: Mapping[str, float], name: str) -> str:
    """A figure in a table: empty where there is none, and a bound where requests were given up."""
    bound = "≥ " if name.startswith("ttft") and figures.get("given_up") else ""
    return bound + tables.number(figures[name]) if name in figures else ""


def _pooled(record: Record) -> str:
    rows = []
    for system, case, told in pooled(record):
        there = ", ".join(f"{key} {value}" for key, value in case.items())
        rows.append([there, system, *(cell(told, name) for name in COLUMNS)])
    return tables.table(["", "system", *map(tables.heading, COLUMNS)], rows)


def timelines(run: Run) -> str:
    """What happened, beside what the paper has."""
    from tests.bench.papers.actions import TABLE

    parts = [
        "The paper's, with the percent of SMs of two GPUs that were occupied:\n\n"
        + tables.table(
            ["s", "action", "applications", "GPU 1", "GPU 2"],
            [[f"{row.at_s:g}", row.action, str(row.apps), *map(str, row.occupied)] for row in TABLE],
        )
    ]
    for count, rows in sorted(run.parameters.get("timelines", {}).items()):
        heads = ["s", "action", "applications", *(f"GPU {number + 1}" for number in range(int(count)))]
        told = [[str(one["at_s"]), one["action"], str(one["apps"]), *map(str, one["shares"])] for one in rows]
        parts.append(f"With {count} GPUs, and the percent of their time that applications were given:\n\n")
        parts[-1] += tables.table(heads, told)
    return "\n\n".join(parts)


def head(run: Run) -> str:
    """What a run is of, in a line."""
    on = run.on
    words = [f"{on.get('gpu', 'no GPU')}, driver {on.get('driver', 'unknown')}"]
    words += [f"{name} {on[name]}" for name in ("torch", "transformers") if name in on]
    words += [f"product {on.get('product')}, programs {on.get('programs')}", f"rounds {run.parameters['rounds']}"]
    clocks = ", ".join(f"{key} {value}" for key, value in run.parameters["clocks"].items())
    return "; ".join([*words, clocks])


def page(record: Record, drawn: Mapping[int, str]) -> str:
    """All of it, in Markdown; `drawn` has the names of plots, by the percent of memory."""
    parts = ["# The papers' pairs, on real programs\n"]
    for name, run in record.runs.items():
        parts.append(f"## {TITLES.get(name, name)}\n\n{head(run)}.\n")
        if name == pairs.NAME:
            parts += [f"![{memory} % of the memory of both]({plot})\n" for memory, plot in drawn.items()]
            parts.append(f"{SLO}\n\n{_pooled(record)}\n")
        elif run.cells:
            figures = [figure for figure in KINDS if any(cell.values(figure) for cell in run.cells)]
            parts.append(tables.everything(run, figures) + "\n")
        if "timelines" in run.parameters:
            parts.append(timelines(run) + "\n")
        for title, lines in (
            ("Not measured", [f"{one.system}: {one.reason}" for one in run.absences]),
            ("Logged, or ended behind a cell", run.parameters.get("findings", [])),
        ):
            if lines:
                parts.append(f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines) + "\n")
    rows = [[one.system, one.what, one.value, one.source] for one in FIGURES]
    rows += [
        ["Flyt", what, value, f"Flyt, table {number}"]
        for number, all_ in flyt.PUBLISHED.items()
        for what, value in all_
    ]
    parts.append(
        "## Published, not measured here\n\n" + tables.table(["system", "what", "as published", "source"], rows) + "\n"
    )
    return "\n".join(parts)
