"""Plots of a replay, by matplotlib; it is imported only by code that draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ggroupfs.replay.records import Result, S, Span

MINUTE = 60 * S
INSTANTS = 2000
"""Number of instants in the plot of memory."""
COLOURS = [f"C{number}" for number in range(10)]


def draw(result: Result, directory: Path) -> None:
    """Draw timeline.png, memory.png and completion.png into an existing directory."""
    for name, paint, height in (("timeline", timeline, 8.0), ("memory", memory, 5.0), ("completion", completion, 4.0)):
        figure = Figure(figsize=(10.0, height), layout="constrained")
        paint(result, figure.add_subplot())
        figure.savefig(directory / f"{name}.png", dpi=120)


def timeline(result: Result, axes: Axes) -> None:
    """Plot when jobs ran: one row per job, by arrival, with a thin line from its arrival to its end."""
    rows = {outcome.trace.job: row for row, outcome in enumerate(result.outcomes)}
    for row, outcome in enumerate(result.outcomes):
        if outcome.finished is not None:
            axes.hlines(row, outcome.arrived / MINUTE, outcome.finished / MINUTE, colors="0.8", linewidth=1)
    for row, spans in _by_row(result.ran, rows).items():
        bars = [(span.start / MINUTE, (span.end - span.start) / MINUTE) for span in spans]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=[COLOURS[span.lane % 10] for span in spans])
    axes.set(xlabel="minutes", ylabel="job, by arrival; the colour is its lane", ylim=(len(rows), -1))


def memory(result: Result, axes: Axes) -> None:
    """Plot the memory of all jobs, stacked, at INSTANTS instants: persistent memory, and ephemeral memory while a job
    runs.
    """
    traces = {outcome.trace.job: outcome.trace for outcome in result.outcomes}
    changes = [(change.time, change.job, change.nbytes) for change in result.changes]
    for span in result.resident:
        amount = traces[span.job].persistent
        changes += [(span.start, span.job, amount), (span.end, span.job, -amount)]
    for span in () if result.changes else result.ran:
        amount = traces[span.job].ephemeral
        changes += [(span.start, span.job, amount), (span.end, span.job, -amount)]
    changes.sort(key=lambda change: change[0], reverse=True)
    times = [changes[0][0] * instant // INSTANTS for instant in range(INSTANTS + 1)]
    used = dict.fromkeys(traces, 0)
    rows: dict[str, list[float]] = {job: [] for job in traces}
    for time in times:
        while changes and changes[-1][0] <= time:
            _, job, amount = changes.pop()
            used[job] += amount
        for job, row in rows.items():
            row.append(used[job] / (1 << 30))
    axes.stackplot([time / MINUTE for time in times], list(rows.values()), step="post")
    axes.axhline(result.capacity / (1 << 30), color="black", linewidth=1)
    axes.set(xlabel="minutes", ylabel="GiB, one colour a job; the line is the capacity")


def completion(result: Result, axes: Axes) -> None:
    """Plot the CDF of completion times: figure 8 of the paper."""
    done = sorted(outcome.completion / MINUTE for outcome in result.outcomes if outcome.finished is not None)
    axes.step([0.0, *done], [number / len(done) for number in range(len(done) + 1)], where="post")
    axes.set(xlabel="completion time, minutes", ylabel="part of the jobs", ylim=(0, 1))


def _by_row(spans: Sequence[Span], rows: Mapping[str, int]) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for span in spans:
        found.setdefault(rows[span.job], []).append(span)
    return found
