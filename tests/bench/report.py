"""Figures that a benchmark found, each with what it may be at most."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """One line of the report."""

    name: str
    value: float
    unit: str
    budget: float | None = None
    """The most it may be; None for a figure that is only reported."""
    note: str = ""

    @property
    def verdict(self) -> str:
        return "" if self.budget is None else "PASS" if self.value <= self.budget else "FAIL"

    def __str__(self) -> str:
        budget = "" if self.budget is None else f"<= {self.budget:g}"
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
