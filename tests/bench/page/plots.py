"""Pictures of a record, by matplotlib: nothing else imports this module. Small SVG, the same for the same record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Cell, Run
from tests.bench.core.spread import Spread

STYLE: Any = {
    "svg.hashsalt": "ggroupfs",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(run: Run, plot: str, path: Path) -> bool:
    """Whether there was anything to draw."""
    with matplotlib.rc_context(STYLE):
        figure = PLOTS[plot](run)
        if figure is None:
            return False
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return True


def latency(run: Run) -> Figure | None:
    """p99 against load, a line a system, beside one and beside several."""
    counts = sorted({int(cell.case["batch"]) for cell in run.cells if "batch" in cell.case})
    if not counts:
        return None
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, count in zip(figure.subplots(1, len(counts), sharey=True, squeeze=False)[0], counts, strict=True):
        for number, system in enumerate(run.systems()):
            chosen = [c for c in run.cells if c.system == system and c.case.get("batch", count) == count]
            points = [(float(c.case["load"]) * 100, c) for c in chosen if "load" in c.case]
            _line(axes, points, "p99_ms", system, number)
        axes.set(xlabel="load, %", yscale="log", title=f"beside {count} batch program{'s' if count > 1 else ''}")
    figure.axes[0].set_ylabel("p99, ms")
    figure.axes[-1].legend(frameon=False, fontsize=7)
    return figure


def pressure(run: Run) -> Figure | None:
    """What is left of the speed against the footprint."""
    figure = Figure(figsize=(5.5, 3.2), layout="constrained")
    axes = figure.subplots()
    others = [system for system in run.systems() if system != run.reference]
    for number, system in enumerate(others, 1):
        points = []
        for cell in run.cells:
            if cell.system == system and (ratios := run.ratios(cell, "passes_per_s")):
                points.append((float(cell.case["percent"]), Spread.of(ratios)))
        _errors(axes, sorted(points, key=lambda point: point[0]), system, number)
    if not axes.has_data():
        return None
    axes.set(xlabel="footprint, % of the budget", ylabel="part of the speed", yscale="log")
    axes.legend(frameon=False, fontsize=7)
    return figure


def pareto(run: Run) -> Figure | None:
    """SLO attainment against the part of the batch throughput: Ghost's figure 14."""
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, system in enumerate(run.systems()):
        points = []
        for cell in run.cells:
            done, met = run.ratios(cell, "passes_per_s"), cell.values("attained")
            if cell.system == system and system != run.reference and done and met:
                points.append((Spread.of(done).median, Spread.of(met).median))
        if points:
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, y, "o" if len(points) == 1 else "o-", color=f"C{number}", label=system, markersize=4)
    if not axes.has_data():
        return None
    axes.set(xlabel="batch throughput, of that alone", ylabel="requests within the SLO", xlim=(0, None), ylim=(0, 1.03))
    axes.legend(frameon=False, fontsize=7)
    return figure


def files(run: Run) -> Figure | None:
    """Bars: what each access costs."""
    names = [name for name in KINDS if name.endswith("_us") and any(cell.values(name) for cell in run.cells)]
    if not names:
        return None
    figure = Figure(figsize=(5.5, 2.8), layout="constrained")
    axes = figure.subplots()
    systems = run.systems()
    for number, system in enumerate(systems):
        cell = run.cell(system, {})
        found = {name: Spread.of(cell.values(name)).median for name in names if cell and cell.values(name)}
        places = [names.index(name) + (number - (len(systems) - 1) / 2) * 0.25 for name in found]
        axes.bar(places, list(found.values()), 0.22, label=system, color=f"C{number}")
    axes.set(ylabel="us", yscale="log", xticks=range(len(names)))
    axes.set_xticklabels([KINDS[name].label for name in names])
    axes.legend(frameon=False, fontsize=7)
    return figure


def _line(axes: Axes, cells: Sequence[tuple[float, Cell]], figure: str, label: str, number: int) -> None:
    points = [(x, Spread.of(cell.values(figure))) for x, cell in cells if cell.values(figure)]
    _errors(axes, sorted(points, key=lambda point: point[0]), label, number)


def _errors(axes: Axes, points: Sequence[tuple[float, Spread]], label: str, number: int) -> None:
    """A line of medians, with bars from least to most."""
    if not points:
        return
    middles = [one.median for _, one in points]
    below = [one.median - one.least for _, one in points]
    above = [one.most - one.median for _, one in points]
    x = [at for at, _ in points]
    # The reference, which is the first, is seen where others are the same.
    look = {"color": f"C{number}"} if number else {"color": "black", "linestyle": "--", "zorder": 3}
    axes.errorbar(x, middles, [below, above], marker="o", markersize=3, capsize=2, label=label, **look)


PLOTS: Mapping[str, Callable[[Run], Figure | None]] = {
    "latency": latency,
    "pressure": pressure,
    "pareto": pareto,
    "files": files,
}
"""By the name that a section has."""
