"""What runs of `space_gpu.py` found, in lines, with what is asked of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tests.experiments.spaced.cells import (
    ACTS_MS,
    KINDS,
    OF_MPS,
    OF_SLICES,
    SHARE,
    SHARE_NEAR,
    SMS_NEAR,
    TAILS,
    VARIES,
)
from tests.experiments.timed.results import Row, ratios

ASKED = {str(one): one.ratio for one in TAILS}
"""p99 by that alone, at most, of the requests of each name."""


def verdict(holds: bool, asked: str) -> str:
    """Return what is to be said of a figure and what is asked of it."""
    return f"{'ok' if holds else 'NOT'} {asked}"


def rate(rows: Sequence[Row]) -> float:
    """Return what all programs did a second, of all rows."""
    return statistics.fmean(sum(row["rates"]) for row in rows)


def line(kind: str, cell: str, rows: Sequence[Row]) -> str:
    """Return a line of what rows of a cell found together."""
    if kind == "failed":
        return f"{cell}: FAILED: {'; '.join(row['why'] for row in rows)}"
    if kind == "eight":
        each = [one for row in rows for one in row["rates"]]
        return f"{cell}: {rate(rows):.1f}/s in all, {min(each):.1f} to {max(each):.1f} each"
    if kind == "tail":
        found, count = ratios(rows)[0], sum(len(one) for row in rows for one in row["ms"])
        text, what = f"{cell}: p99 {found:.3f} of that alone; {count} requests", cell.rpartition("/")[2]
        if "/space-" not in cell:
            return text
        return f"{text}; {verdict(found <= ASKED[what], f'{ASKED[what]:g} at most')}"
    if kind == "share":
        each = [row["share"] for row in rows]
        kept = statistics.fmean(row["kept"] for row in rows)
        near = all(abs(one / SHARE - 1) <= SHARE_NEAR for one in each)
        text = f"{cell}: {' '.join(f'{one:.4f}' for one in each)} of the time; the slice does {kept:.3f} of that alone"
        return f"{text}; {verdict(near, f'{SHARE:g} within {SHARE_NEAR:.0%}')}"
    if kind == "sms":
        off = [row["done"] / row["wanted"] - 1 for row in rows]
        text = " ".join(f"{row['done']:.4f} on {row['seen']}" for row in rows)
        near = all(abs(one) <= SMS_NEAR for one in off)
        return f"{cell}: {text} of {rows[0]['wanted']:.4f} SMs; {verdict(near, f'within {SMS_NEAR:.0%}')}"
    if kind == "critical":
        each = [row["rates"] for row in rows]
        apart = max(max(one) / min(one) - 1 for one in each)
        text = f"{cell}: {' '.join(f'{one:.1f}' for one in each[0])}/s beside 0 to {len(each[0]) - 1} others"
        return f"{text}; {verdict(apart <= VARIES, f'varies by {VARIES:.0%} at most')}"
    assert kind == "change", kind
    ms = sorted(one for row in rows for one in row["ms"])
    text = f"{cell}: {len(ms)} changes, {statistics.median(ms):.2f} ms, longest {ms[-1]:.2f}"
    lost = sum(row["lost"] for row in rows)
    return f"{text}, {lost} kernels lost; {verdict(ms[-1] <= ACTS_MS and not lost, f'{ACTS_MS:g} ms, none lost')}"


def compared(each: Mapping[tuple[str, str], Sequence[Row]]) -> list[str]:
    """Return a line for each kind of small programs: what they do in a spatial slice, by the other ways."""
    found = []
    for kind in KINDS:
        way = {name: each.get(("eight", f"{kind}/{name}-{kind}/rate")) for name in ("space", "mps", "slices")}
        if not way["space"]:
            continue
        parts = [f"{kind}: eight in a spatial slice do"]
        for name, least in (("mps", OF_MPS), ("slices", OF_SLICES)):
            if rows := way[name]:
                ratio = rate(way["space"]) / max(1e-9, rate(rows))
                parts.append(f"{ratio:.3f} of {name}, {verdict(ratio >= least, f'{least:g} at least')};")
        if len(parts) > 1:
            found.append(" ".join(parts).rstrip(";"))
    return found


def told(each: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    """Return a line for each cell, and those that compare them."""
    return "\n".join([*(line(kind, cell, rows) for (kind, cell), rows in sorted(each.items())), *compared(each)])
