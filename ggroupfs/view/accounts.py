"""Accounts: the total GPU use of slices, as a table for people and for programs. Pure.

The figures of a slice include those of the slices in it, so the total adds up the outermost slices only.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from ggroupfs.text.origins import WORDS, origin
from ggroupfs.view.columns import NOT_TOLD, human, readable
from ggroupfs.view.figures import Figures

TOTAL = "total"
"""Name of the line of totals. It cannot be the path of a slice, which begins with a slash."""


@attrs.frozen
class Account:
    """A slice on one GPU."""

    slice: str
    """Path of the cgroup."""
    gpu: int
    """Index of the GPU."""
    figures: Figures
    """Figures of its use."""
    outermost: bool
    """Whether no slice above it is in the list; only such slices enter the total."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing was ever used."""
        return not any(figure.of(self.figures) for figure in FIGURES)


@attrs.frozen
class Figure:
    """A column of figures."""

    name: str
    """Name in CSV and JSON, with the unit."""
    heading: str
    """Heading in the table for people."""
    fields: tuple[str, ...]
    """Fields of :class:`Figures`; the first known one counts."""
    text: Callable[[float], str]
    """Formats a value for people."""
    unit: float = 1
    """Factor from the unit of the field to that of the column."""
    adds_up: bool = True
    """Whether the figures of two slices can be added; peaks cannot, as they were reached at different times."""

    def of(self, figures: Figures) -> float | None:
        """Return the figure of a slice; None if the machine cannot tell it."""
        known = [value for field in self.fields if (value := getattr(figures, field)) is not None]
        return known[0] * self.unit if known else None

    def total(self, accounts: Iterable[Account]) -> float | None:
        """Return the sum of the known figures of the outermost slices; None if there is none."""
        each = [self.of(account.figures) for account in accounts if account.outermost and self.adds_up]
        known = [value for value in each if value is not None]
        return sum(known) if known else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}"


_US = 1e-6
BUSY = Figure("busy_seconds", "BUSY s", ("busy_usec",), _seconds, _US)
RESIDENT = Figure("gpu_seconds", "GPU s", ("gpu_usec",), _seconds, _US)
ESTIMATED = Figure("gpu_estimated_seconds", "EST. s", ("gpu_usec_estimate",), _seconds, _US)
HELD = Figure("resident_byte_seconds", "BYTE-s", ("byte_seconds",), human)
PEAK = Figure("peak_bytes", "PEAK", ("peak",), human, adds_up=False)
SWAP_PEAK = Figure("swap_peak_bytes", "SWAP PEAK", ("swap_peak",), human, adds_up=False)

FIGURES = (BUSY, RESIDENT, ESTIMATED, HELD, PEAK, SWAP_PEAK)
"""Columns of figures, in order."""

FIELDS = frozenset(("since", *(field for figure in FIGURES for field in figure.fields)))
"""Fields of :class:`Figures` that the accounts need."""

ORDERS: Mapping[str, Figure | None] = {"busy": BUSY, "gpu": RESIDENT, "memory": HELD, "peak": PEAK, "name": None}
"""Sort orders: a figure, largest first, or the path."""


def arranged(accounts: Iterable[Account], order: str) -> Sequence[Account]:
    """Return accounts in one of ORDERS. Unknown figures come last, and equal ones are ordered by path and GPU."""
    figure = ORDERS[order]

    def key(account: Account) -> tuple[Any, ...]:
        value = None if figure is None else figure.of(account.figures)
        return value is None, 0 if value is None else -value, account.slice, account.gpu

    return sorted(accounts, key=key)


def as_text(accounts: Sequence[Account]) -> str:
    """Return a table for people. A column without any known figure is left out."""
    figures = [one for one in FIGURES if any(one.of(account.figures) is not None for account in accounts)]
    rows = [["SLICE", "GPU", "SINCE", *(figure.heading for figure in figures)]]
    for account in accounts:
        cells = [_cell(figure, figure.of(account.figures)) for figure in figures]
        rows.append([readable(account.slice), str(account.gpu), _local(account.figures.since), *cells])
    rows.append([TOTAL, "", "", *(_cell(figure, figure.total(accounts)) for figure in figures)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *numbers]).rstrip())
    return "\n".join(lines) + "\n"


def _local(since: int | None) -> str:
    """Format a time for people: local time, to the minute."""
    return NOT_TOLD if since is None else f"{datetime.datetime.fromtimestamp(since):%Y-%m-%d %H:%M}"


def _utc(since: int | None) -> str | None:
    """Format a time for programs (RFC 3339)."""
    return None if since is None else f"{datetime.datetime.fromtimestamp(since, datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def _cell(figure: Figure, value: float | None) -> str:
    return NOT_TOLD if value is None else figure.text(value)


def as_csv(accounts: Sequence[Account]) -> str:
    """Return CSV with a header line and, at the end, a line of totals (RFC 4180). Unknown figures are empty."""
    names = ("slice", "gpu", "outermost", *WORDS, "since", *(figure.name for figure in FIGURES))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="")
    writer.writeheader()
    for account in accounts:
        writer.writerow({**_record(account), "outermost": int(account.outermost)})
    writer.writerow({"slice": TOTAL, **_totals(accounts)})
    return text.getvalue()


def as_json(accounts: Sequence[Account]) -> str:
    """Return a JSON object with the slices and the totals. Unknown figures are null."""
    found = {"slices": [_record(account) for account in accounts], TOTAL: _totals(accounts)}
    return json.dumps(found, indent=2) + "\n"


FORMATS: Mapping[str, Callable[[Sequence[Account]], str]] = {"text": as_text, "csv": as_csv, "json": as_json}
"""Output formats by name."""


def _record(account: Account) -> Mapping[str, Any]:
    """Return the record of a slice, for programs."""
    path = account.slice.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    found: dict[str, Any] = {"slice": path, "gpu": account.gpu, "outermost": account.outermost}
    found |= {**origin(account.slice), "since": _utc(account.figures.since)}
    return {**found, **{figure.name: _rounded(figure.of(account.figures)) for figure in FIGURES}}


def _totals(accounts: Sequence[Account]) -> Mapping[str, float | None]:
    return {figure.name: _rounded(figure.total(accounts)) for figure in FIGURES if figure.adds_up}


def _rounded(value: float | None) -> float | None:
    return round(value, 6) if isinstance(value, float) else value
