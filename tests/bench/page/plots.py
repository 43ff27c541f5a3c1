"""Plots of a record, by matplotlib; imported only where they are drawn. Small SVG files, identical for the same
record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Run
from tests.bench.core.spread import Spread

LEGEND: Any = {"frameon": False, "fontsize": 7}
STYLE: Any = {
    "svg.hashsalt": "ggroupfs",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
FAMILIES: Mapping[str, Sequence[str]] = {
    "ggroupfs": ("#08519c", "#4292c6", "#9ecae1"),
    "MPS": ("#a50f15", "#ef3b2c", "#fc9272"),
    "unified memory": ("#006d2c", "#41ab5d", "#a1d99b"),
    "time slicing": ("#d97706",),
}
"""Shades by the beginning of a system's name, so that a system looks the same in all plots."""


def looks(run: Run) -> dict[str, dict[str, Any]]:
    """Return how each system is drawn. The reference, and ggroupfs, which is drawn below later ones, remain visible
    where others have the same values.
    """
    found: dict[str, dict[str, Any]] = {run.reference: {"color": "black", "linestyle": "--", "zorder": 3}}
    left = {name: iter(shades) for name, shades in FAMILIES.items()}
    for number, system in enumerate(run.systems()):
        if system != run.reference:
            family = next((name for name in FAMILIES if system.startswith(name)), "")
            found[system] = {"color": next(left.get(family, iter(())), f"C{number}")}
    if "ggroupfs" in found:
        found["ggroupfs"] |= {"linewidth": 2.8}
    return found


def draw(run: Run, plot: str, path: Path) -> bool:
    """Draw a plot; return whether there was anything to draw."""
    with matplotlib.rc_context(STYLE):
        figure = PLOTS[plot](run)
        if figure is None:
            return False
        figure.savefig(path, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
    return True


def latency(run: Run) -> Figure | None:
    """Plot p99 against load, one line per system, beside one program and beside several."""
    counts = sorted({int(cell.case["batch"]) for cell in run.cells if "batch" in cell.case})
    if not counts:
        return None
    figure, look = Figure(figsize=(8, 3.6), layout="constrained"), looks(run)
    for axes, count in zip(figure.subplots(1, len(counts), sharey=True, squeeze=False)[0], counts, strict=True):
        for system in run.systems():
            chosen = [c for c in run.cells if c.system == system and c.case.get("batch", count) == count]
            points = [(float(c.case["load"]) * 100, c) for c in chosen if "load" in c.case]
            found = [(x, Spread.of(cell.values("p99_ms"))) for x, cell in points if cell.values("p99_ms")]
            _errors(axes, found, system, look[system])
        axes.set(xlabel="load, %", yscale="log", title=f"beside {count} batch program{'s' if count > 1 else ''}")
        axes.yaxis.set_major_formatter("{x:,g}")
    figure.axes[0].set_ylabel("p99, ms")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, **LEGEND)
    return figure


def pressure(run: Run) -> Figure | None:
    """Plot the remaining speed against the footprint."""
    figure, look = Figure(figsize=(5.5, 3.2), layout="constrained"), looks(run)
    axes = figure.subplots()
    for system in run.systems():
        points = []
        for cell in run.cells:
            if cell.system == system != run.reference and (ratios := run.ratios(cell, "passes_per_s")):
                points.append((float(cell.case["percent"]), Spread.of(ratios)))
        _errors(axes, points, system, look[system])
    if not axes.has_data():
        return None
    axes.set(xlabel="footprint, % of the budget", ylabel="part of the speed", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(**LEGEND)
    return figure


def kept(run: Run) -> Figure | None:
    """Plot the remaining speed against the footprint, with and without turns, for each measured mix."""
    figure, look = Figure(figsize=(5.5, 3.2), layout="constrained"), looks(run)
    axes = figure.subplots()
    marks = iter("os^Dv")
    for mix in dict.fromkeys(_mix_of(cell.case) for cell in run.cells if cell.values("kept")):
        mark = next(marks, "x")
        for system in run.systems():
            cells = [cell for cell in run.cells if cell.system == system and _mix_of(cell.case) == mix]
            points = sorted(
                (float(c.case["percent"]), Spread.of(c.values("kept")).median) for c in cells if c.values("kept")
            )
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, marker=mark, label=f"{system} ({mix})", markersize=4, **look[system])
    if not axes.has_data():
        return None
    axes.set(xlabel="footprint, % of the room", ylabel="part of the speed with room for all", ylim=(0, 1.05))
    axes.legend(**LEGEND)
    return figure


def _mix_of(case: Mapping[str, object]) -> str:
    """Return the programs and the length of their turns, in words."""
    words = [f"{key} {value}" for key, value in case.items() if key not in ("mix", "percent")]
    return ", ".join([str(case.get("mix", "")), *words])


def pareto(run: Run) -> Figure | None:
    """Plot SLO attainment against the fraction of the batch throughput: Ghost's figure 14."""
    figure, look = Figure(figsize=(5.5, 3.6), layout="constrained"), looks(run)
    axes = figure.subplots()
    for system in run.systems():
        points = []
        for cell in run.cells:
            done, met = run.ratios(cell, "passes_per_s"), cell.values("attained")
            if cell.system == system and system != run.reference and done and met:
                points.append((Spread.of(done).median, Spread.of(met).median))
        if points:
            x, y = zip(*sorted(points), strict=True)
            axes.plot(x, y, "o" if len(points) == 1 else "o-", label=system, markersize=4, **look[system])
    if not axes.has_data():
        return None
    axes.set(xlabel="batch throughput, of that alone", ylabel="requests within the SLO", xlim=(0, None), ylim=(0, 1.03))
    axes.legend(**LEGEND)
    return figure


def files(run: Run) -> Figure | None:
    """Plot the cost of each access to a file, as bars."""
    names = [name for name in KINDS if name.endswith("_us") and any(cell.values(name) for cell in run.cells)]
    if not names:
        return None
    figure, look = Figure(figsize=(5.5, 2.8), layout="constrained"), looks(run)
    axes = figure.subplots()
    systems = run.systems()
    for number, system in enumerate(systems):
        cell = run.cell(system, {})
        found = {name: Spread.of(cell.values(name)).median for name in names if cell and cell.values(name)}
        places = [names.index(name) + (number - (len(systems) - 1) / 2) * 0.25 for name in found]
        axes.bar(places, list(found.values()), 0.22, label=system, color=look[system]["color"])
    axes.set(ylabel="us", yscale="log", xticks=range(len(names)))
    axes.set_xticklabels([KINDS[name].label for name in names])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(**LEGEND)
    return figure


def _errors(axes: Axes, points: Sequence[tuple[float, Spread]], label: str, look: Mapping[str, Any]) -> None:
    """Draw a line of medians with bars from the least to the greatest value."""
    if not points:
        return
    points = sorted(points, key=lambda point: point[0])
    x, found = [at for at, _ in points], [one for _, one in points]
    bars = [one.median - one.least for one in found], [one.most - one.median for one in found]
    axes.errorbar(x, [one.median for one in found], bars, marker="o", markersize=3, capsize=2, label=label, **look)


PLOTS: Mapping[str, Callable[[Run], Figure | None]] = {
    "latency": latency,
    "pressure": pressure,
    "pareto": pareto,
    "files": files,
    "kept": kept,
}
"""Plots by the names that sections use."""
