"""Changes since the last record: a new record compared with the committed one.

Two machines, or one machine on two days, are never equally fast. So the ratio of a system to the reference of its
scenario is compared, within one run, repetition by repetition. Such a ratio has moved if its median changed by more
than a tolerance, and by more than the spreads of both runs together: from the least to the greatest of one run's
repetitions, plus those of the other. A few repetitions may be close together by chance, so a spread counts as at least
what is usual for that figure in its scenario. Then runs that differ only by chance are seldom reported as changed
(t0_bench.py says how seldom). One repetition has no spread, so nothing is said about it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import attrs

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Case, Cell, Record, Run
from tests.bench.core.spread import Spread

TOLERANCE = 0.1
"""Relative change of a ratio below which it is never reported."""
ENOUGH = 2
"""Repetitions that both records must have of a ratio."""


@attrs.frozen
class Moved:
    """A ratio that changed."""

    scenario: str
    system: str
    case: Case
    figure: str
    before: Spread
    """Spread of the ratio to the reference in the committed record."""
    after: Spread
    """Spread of the ratio in the new record."""
    worse: bool

    def __str__(self) -> str:
        case = " ".join(f"{key}={value}" for key, value in self.case.items())
        return (
            f"{'worse ' if self.worse else 'better'} {self.scenario} {case}: {self.system}, {KINDS[self.figure].label} "
            f"{_told(self.before)} of the reference's, now {_told(self.after)}"
        )


@attrs.frozen
class Report:
    """Result of a comparison."""

    moved: tuple[Moved, ...]
    """Changed ratios, those that got worse first."""
    compared: int
    """Number of ratios with enough repetitions in both."""
    missing: tuple[str, ...]
    """Figures of scenarios in both records that only the committed one has."""

    @property
    def failed(self) -> bool:
        """Whether a figure is worse, or missing."""
        return any(one.worse for one in self.moved) or bool(self.missing)


def compare(before: Record, after: Record, tolerance: float = TOLERANCE) -> Report:
    """Compare the scenarios that both records have."""
    moved: list[Moved] = []
    missing: list[str] = []
    compared = 0
    for name in sorted(before.runs.keys() & after.runs.keys()):
        old, new = before.runs[name], after.runs[name]
        found: list[tuple[Cell, str, Spread, Spread]] = []
        for cell in old.cells:
            same = new.cell(cell.system, cell.case)
            if same is None:
                missing.append(f"{name}: {cell.system} {dict(cell.case)}")
                continue
            found += ((cell, *what) for what in _ratios(old, cell, new, same))
        compared += len(found)
        for cell, figure, was, now in found:
            usual = statistics.median(_width(one, other) for _, kind, one, other in found if kind == figure)
            least = max(math.log1p(tolerance), usual, _width(was, now))
            if abs(math.log(now.median / was.median)) > least:
                worse = (now.median > was.median) == bool(KINDS[figure].lower)
                moved.append(Moved(old.scenario, cell.system, cell.case, figure, was, now, worse))
    return Report(tuple(sorted(moved, key=lambda one: not one.worse)), compared, tuple(missing))


def _ratios(old: Run, was: Cell, new: Run, now: Cell) -> Iterator[tuple[str, Spread, Spread]]:
    """Yield the ratios of figures that can be better or worse, for all systems but the reference."""
    names = {name for sample in was.samples for name in sample.figures}
    for figure in sorted(names):
        if was.system == old.reference or KINDS[figure].lower is None:
            continue
        pair = [one for one in old.ratios(was, figure) if one > 0], [one for one in new.ratios(now, figure) if one > 0]
        if min(map(len, pair)) >= ENOUGH:
            yield figure, Spread.of(pair[0]), Spread.of(pair[1])


def _width(*spreads: Spread) -> float:
    """Return the width of some spreads together, of the logarithm."""
    return sum(math.log(one.most / one.least) for one in spreads)


def _told(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.least:.3g} to {spread.most:.3g})"
