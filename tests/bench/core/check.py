"""Changes since the last record: a new record compared with the committed one.

Two machines, or one machine on two days, are never equally fast. So the ratio of a system to the reference of its
scenario is compared, within one run, repetition by repetition. Such a ratio has moved if its median changed by more
than a tolerance, and by more than the spreads of both runs together: from the least to the greatest of one run's
repetitions, plus those of the other. A few repetitions may be close together by chance, so a spread counts as at least
what is usual for that figure in its scenario. Then runs that differ only by chance are seldom reported as changed
(t0_bench.py says how seldom). One repetition has no spread, so nothing is said about it.

Where both records have verdict.ENOUGH repetitions, core.verdict compares them instead: it finds a change of 15 % on a
quiet machine, and says of a ratio where it could not that it is too noisy to tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import attrs

from tests.bench.core.figures import KINDS
from tests.bench.core.record import Case, Cell, Record, Run
from tests.bench.core.spread import Spread
from tests.bench.core.verdict import ENOUGH as INTERVAL
from tests.bench.core.verdict import Verdict, judged

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
class Noisy:
    """A ratio that is too noisy to tell."""

    scenario: str
    system: str
    case: Case
    figure: str
    least_found: float
    """The smallest change that would be found, as a part of 1."""

    def __str__(self) -> str:
        case = " ".join(f"{key}={value}" for key, value in self.case.items())
        return (
            f"noisy  {self.scenario} {case}: {self.system}, {KINDS[self.figure].label}: too noisy to tell, a change of "
            f"{self.least_found:.0%} would be found"
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
    noisy: tuple[Noisy, ...] = ()
    """Ratios that are too noisy to tell, and why."""

    @property
    def failed(self) -> bool:
        """Whether a figure is worse, or missing."""
        return any(one.worse for one in self.moved) or bool(self.missing)


def compare(before: Record, after: Record, tolerance: float = TOLERANCE) -> Report:
    """Compare the scenarios that both records have."""
    moved: list[Moved] = []
    missing: list[str] = []
    noisy: list[Noisy] = []
    compared = 0
    for name in sorted(before.runs.keys() & after.runs.keys()):
        old, new = before.runs[name], after.runs[name]
        found: list[tuple[Cell, str, Spread, Spread]] = []
        exact = 0
        for cell in old.cells:
            same = new.cell(cell.system, cell.case)
            if same is None:
                missing.append(f"{name}: {cell.system} {dict(cell.case)}")
                continue
            for figure, was, now in _ratios(old, cell, new, same):
                if min(map(len, (was, now))) < INTERVAL:
                    found.append((cell, figure, Spread.of(was), Spread.of(now)))
                    continue
                exact += 1
                change = judged(was, now, bool(KINDS[figure].lower))
                if change.verdict in (Verdict.WORSE, Verdict.BETTER):
                    worse = change.verdict is Verdict.WORSE
                    told = (Spread.of(was), Spread.of(now))
                    moved.append(Moved(old.scenario, cell.system, cell.case, figure, *told, worse))
                elif change.verdict is Verdict.NOISY:
                    noisy.append(Noisy(old.scenario, cell.system, cell.case, figure, change.least_found))
        compared += len(found) + exact
        for cell, figure, before_it, after_it in found:
            usual = statistics.median(_width(one, other) for _, kind, one, other in found if kind == figure)
            least = max(math.log1p(tolerance), usual, _width(before_it, after_it))
            if abs(math.log(after_it.median / before_it.median)) > least:
                worse = (after_it.median > before_it.median) == bool(KINDS[figure].lower)
                moved.append(Moved(old.scenario, cell.system, cell.case, figure, before_it, after_it, worse))
    return Report(tuple(sorted(moved, key=lambda one: not one.worse)), compared, tuple(missing), tuple(noisy))


def _ratios(old: Run, was: Cell, new: Run, now: Cell) -> Iterator[tuple[str, list[float], list[float]]]:
    """Yield the ratios of figures that can be better or worse, for all systems but the reference."""
    names = {name for sample in was.samples for name in sample.figures}
    for figure in sorted(names):
        if was.system == old.reference or KINDS[figure].lower is None:
            continue
        pair = [one for one in old.ratios(was, figure) if one > 0], [one for one in new.ratios(now, figure) if one > 0]
        if min(map(len, pair)) >= ENOUGH:
            yield figure, *pair


def _width(*spreads: Spread) -> float:
    """Return the width of some spreads together, of the logarithm."""
    return sum(math.log(one.most / one.least) for one in spreads)


def _told(spread: Spread) -> str:
    return f"{spread.median:.3g} ({spread.least:.3g} to {spread.most:.3g})"
