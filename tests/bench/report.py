"""Figures of a benchmark, each with its budget."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path


class BenchError(Exception):
    """Measuring failed; this says nothing about the budgets."""


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    value: float
    unit: str
    budget: float | None = None
    """Largest allowed value; None for a figure that is only reported."""
    note: str = ""
    least: float | None = None
    """Smallest allowed value, for a figure without a budget."""

    @property
    def judged(self) -> bool:
        return self.budget is not None or self.least is not None

    @property
    def verdict(self) -> str:
        if not self.judged:
            return ""
        above = self.least is None or self.value >= self.least
        below = self.budget is None or self.value <= self.budget
        return "PASS" if above and below else "FAIL"

    def __str__(self) -> str:
        budget = f"<= {self.budget:.3g}" if self.budget is not None else f">= {self.least:g}" if self.judged else ""
        return f"{self.name:34} {self.value:10.2f} {self.unit:9} {budget:8} {self.verdict:4}  {self.note}".rstrip()


@dataclass
class Report:
    figures: list[Figure] = field(default_factory=list)

    def add(self, *args: object, **kwargs: object) -> None:
        self.figures.append(Figure(*args, **kwargs))  # type: ignore[arg-type]
        print(self.figures[-1], flush=True)

    @property
    def failed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.verdict == "FAIL"]

    def fill(self, measure: Callable[["Report"], None], file: Path | None) -> int:
        """Measure, and write what was found by then, also to a file. Return the exit status: 0 all budgets hold, 1 one
        does not, 2 measuring failed."""
        try:
            measure(self)
        except (BenchError, OSError, subprocess.CalledProcessError) as error:
            print(f"could not measure: {error}", file=sys.stderr)
            return 2
        finally:
            if file:
                rows = [{**asdict(figure), "verdict": figure.verdict} for figure in self.figures]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{len(self.failed)} of {sum(figure.judged for figure in self.figures)} budgets fail")
        return 1 if self.failed else 0
