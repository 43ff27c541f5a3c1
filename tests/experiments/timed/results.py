"""What runs of `time_gpu.py` found, in files of JSON, and the same of several runs of one product together."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.experiments.timed.cells import HOLD, HOLDS, NEAR, TAILS, TWO_MOST, hold_text

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("backend", "ggroupfs")
"""Folders of what is measured."""
PART = 0.99
"""Quantile of latencies that is told."""

Row = Mapping[str, Any]
"""What a cell found once: `cell`, `kind` ("tail", "two", "quota"), and figures."""
Line = Callable[[str, str, Sequence[Row]], str]
"""Says what rows of a kind and cell found together."""


def digest() -> str:
    """Return a name for the product as it is in this tree: of a run on another one nothing is pooled with it."""
    found = hashlib.sha256()
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in (".py", ".c", ".h", ".def"):
                found.update(f"{path.relative_to(ROOT)}\n".encode())
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Found:
    """The rows of one run, written down after each."""

    def __init__(self, directory: Path, name: str = "time", say: Line | None = None) -> None:
        """`name` is what the file's begins with, and `say` has the line that tells of a row."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"{name}-{os.getpid()}.json"
        self._say = say or line
        self._rows: list[Row] = []
        self._digest = digest()

    def add(self, kind: str, cell: str, **figures: Any) -> None:
        """Take a row, and tell of it in a line."""
        row = {"kind": kind, "cell": cell, **figures}
        self._rows.append(row)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"digest": self._digest, "rows": self._rows}))
        new.replace(self._path)
        print(self._say(kind, cell, [row]), flush=True)


def quantile(values: Iterable[float]) -> float:
    """Return the p99."""
    each = sorted(values)
    return each[int(PART * len(each))]


def ratios(rows: Sequence[Row]) -> list[float]:
    """Return p99 beside others by that alone, of all rows together, for each that serves."""
    sides = range(len(rows[0]["ms"]))
    pooled = [[[one for row in rows for one in row[key][side]] for key in ("ms", "alone_ms")] for side in sides]
    return [quantile(beside) / quantile(without) for beside, without in pooled]


def left(rows: Sequence[Row]) -> float:
    """Return the speed of what fills by what requests leave it, of all rows together: what it did, by what it does in
    the time in which they were served, without what they take alone (`tests.t7_nvidia.requested.share`)."""
    done = sum(row["passes"] / row["full"] for row in rows)
    return done / max(0.01, sum(row["took_s"] - sum(map(len, row["ms"])) * row["service_s"] for row in rows))


def line(kind: str, cell: str, rows: Sequence[Row]) -> str:
    """Return a line of what rows of a cell found together, and what is asked of it."""
    if kind == "quota":
        each = [row["done"] / row["wanted"] - 1 for row in rows]
        near, text = NEAR[rows[0]["period_us"]], " ".join(f"{row['done']:.4f}" for row in rows)
        verdict = "ok" if all(abs(one) <= near for one in each) else "NOT WITHIN"
        if rows[0].get("reaches", True) is False:
            verdict = "ok" if all(one <= near for one in each) else "OVER"
            text += f" (its own work is {rows[0]['own']:.3f})"
        return f"{cell}: {text} of {rows[0]['wanted']:g}; {verdict} {near:.0%}"
    found, count = ratios(rows), sum(len(one) for row in rows for one in row["ms"])
    text = f"{cell}: p99 {' '.join(f'{one:.3f}' for one in found)} of that alone, {left(rows):.3f} of what is left"
    text += f"; {count} requests"
    if kind == "two":
        return text + f"; {'ok' if max(found) <= TWO_MOST else 'OVER'} {TWO_MOST}"
    asked = {f"{one} hold={HOLD}": one for one in TAILS}.get(cell)
    if asked is None:
        return text
    tail = "ok" if found[0] <= asked.ratio else "OVER"
    share = "ok" if left(rows) >= asked.share else "UNDER"
    enough = "" if count >= asked.requests else f", of {asked.requests} that are asked for"
    return f"{text}{enough}; {tail} {asked.ratio}, {share} {asked.share}"


def merged(paths: Iterable[Path], product: str | None = None) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of these files by kind and cell, of one product: that of the last file, where none is named."""
    files = [json.loads(path.read_text()) for path in sorted(paths, key=lambda one: one.stat().st_mtime)]
    wanted = product or files[-1]["digest"]
    each: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for file in files:
        for row in file["rows"] if file["digest"] == wanted else ():
            each[row["kind"], row["cell"]].append(row)
    return dict(each)


def told(each: Mapping[tuple[str, str], Sequence[Row]]) -> str:
    """Return a line for each cell."""
    return "\n".join(line(kind, cell, rows) for (kind, cell), rows in sorted(each.items()))


def knob(each: Mapping[tuple[str, str], Sequence[Row]], cell: str) -> list[tuple[int, float, float]]:
    """Return (value of the knob, p99 by that alone, share of what fills) of a cell; 0 for hold=no."""
    found = []
    for hold_us in HOLDS:
        if rows := each.get(("tail", f"{cell} hold={hold_text(hold_us)}")):
            found.append((hold_us or 0, ratios(rows)[0], left(rows)))
    return found


def plot(each: Mapping[tuple[str, str], Sequence[Row]], cells: Sequence[str], path: Path) -> bool:
    """Draw the tail, and what fills keeps, over the knob; False where matplotlib is not there."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(6, 6))
    for cell in cells:
        if found := knob(each, cell):
            holds, tails, shares = zip(*found, strict=True)
            above.plot(holds, tails, "o-", label=cell)
            below.plot(holds, shares, "o-", label=cell)
    above.set_ylabel("p99 by that alone")
    above.legend()
    below.set_ylabel("speed of what fills by what is left")
    below.set_xlabel("hold, microseconds (0: hold=no)")
    figure.savefig(path)
    return True
