"""The papers' pairs as a page: pooled tables, what the papers published beside them, and the Pareto plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Record
from tests.bench.page import tables
from tests.bench.page.published import FIGURES
from tests.bench.papers import flyt, pairs
from tests.bench.papers.cells import Found

COLUMNS = (
    *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "attained", "steps_per_s"),
    *("requests", "given_up"),
)
TITLES = {
    "pairs": "An LLM server that comes first, beside another program",
    "salus-packing": "42 models on one GPU (Salus, figure 13)",
    "salus-trace": "A trace of 100 jobs (Salus, 5.1), scaled to minutes",
    "flyt": "Tables 4 to 8 of Flyt",
    "scale-gpu": "200 programs, and 1000 slices",
    "scale-balance": "GPUs of one host",
}
SLO = (
    "SLO: the P99 of the server alone, as in Ghost (6.4) and GVM (7.4); a request keeps it by its time to the first "
    "token and by the mean of its times between tokens. Percentiles are of the requests of all rounds together."
)


def point(figures: Mapping[str, float], alone: float) -> tuple[float, float] | None:
    """Throughput of the other program as a part of that alone, and SLO attainment; None where one is missing."""
    if "steps_per_s" not in figures or "attained" not in figures or not alone:
        return None
    return figures["steps_per_s"] / alone, figures["attained"]


def points(found: Sequence[Found], memory: int, low: str = "diffusion") -> dict[str, list[tuple[float, float]]]:
    """By system, the points of the plot, in order of the throughput."""
    pooled = pairs.pooled(found)
    alone = next(
        (told["steps_per_s"] for system, case, told in pooled if system == pairs.EXCLUSIVE and case.get("low") == low),
        0.0,
    )
    made: dict[str, list[tuple[float, float]]] = {}
    for system, case, told in pooled:
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
    return True


def _pooled(found: Sequence[Found]) -> str:
    rows = []
    for system, case, told in pairs.pooled(found):
        told_case = ", ".join(f"{key} {value}" for key, value in case.items())
        bound = "≥ " if told.get("given_up") else ""
        cells = [
            (bound if name.startswith("ttft") else "") + tables.number(told[name]) if name in told else ""
            for name in COLUMNS
        ]
        rows.append([told_case, system, *cells])
    return tables.table(["", "system", *map(tables.heading, COLUMNS)], rows)


def page(record: Record, found: Sequence[Found], drawn: Sequence[str]) -> str:
    """All of it, in Markdown."""
    parts = ["# The papers' pairs, on real programs\n"]
    for name, run in record.runs.items():
        on = run.on
        head = f"{on.get('gpu', 'no GPU')}, product {on.get('product')}, programs {on.get('programs')}"
        clocks = ", ".join(f"{key} {value}" for key, value in run.parameters["clocks"].items())
        parts.append(f"## {TITLES.get(name, name)}\n\n{head}; rounds {run.parameters['rounds']}; {clocks}.\n")
        parts += [f"![{one}]({one})\n" for one in drawn if one.startswith(name)]
        figures = [figure for figure in KINDS if any(cell.values(figure) for cell in run.cells)]
        if name == pairs.NAME:
            mine = [one for one in found if one.scenario == name]
            parts.append(f"{SLO}\n\n{_pooled(mine)}\n")
        elif run.cells:
            parts.append(tables.everything(run, figures) + "\n")
        if run.absences:
            parts.append(
                "Not measured:\n\n" + "\n".join(f"- {one.system}: {one.reason}" for one in run.absences) + "\n"
            )
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
