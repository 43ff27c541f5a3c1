"""The page, its plots and the README's part, written from a record."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.bench.core.record import Record, Run
from tests.bench.page import tables
from tests.bench.page.published import FIGURES
from tests.bench.page.sections import SECTIONS, Section

BEGIN, END = "<!-- benchmarks: by `make bench-render` -->", "<!-- end of benchmarks -->"
SHOWN = ("latency-decode", "pareto")
"""Scenarios of which the README shows the plots."""
TABLE = "latency-decode"
"""Scenario whose table the README shows: a row a system, at one case."""
TABLE_CASE = {"load": 0.35, "batch": 3}
TABLE_TEXT = """A program that decodes, at 35 % load, beside three batch programs that would fill the GPU: medians, with
the least and the most; `x` is of what each has alone. {}."""
COMMANDS = """```
make bench            # what needs no GPU; into build/bench.json
make bench-gpu        # the rest, on a machine with an NVIDIA GPU, offline; ONLY=pareto for one scenario
make bench-check      # what moved since docs/benchmarks.json, by ratios within one run
```"""

HEAD = """# Benchmarks

Written by `make bench-render` from [benchmarks.json](benchmarks.json), which has every repetition, the machines, seeds
and commands. `make bench` measures what needs no GPU, `make bench-gpu` the rest, and `make bench-keep` puts it there.

Systems take turns within a run, and another one begins in each repetition. A figure is the median of the repetitions,
with the least and the most of them; `x` is the median of each repetition's ratio to the reference, which is the first
system of each table. `make bench-check` compares such ratios with another run's, and says which moved by more
than their spread.
"""


def render(record: Record, root: Path) -> Iterator[Path]:
    """Writes everything; the files that it wrote. Plots of scenarios that are not in the record are removed."""
    docs, drawn = root / "docs", set()
    for name, path in _plots(record, docs):
        drawn.add(name)
        yield path
    for name, section in SECTIONS.items():
        if section.plot and name not in drawn:
            picture(docs, name).unlink(missing_ok=True)
    (docs / "benchmarks.md").write_text(page(record, drawn))
    yield docs / "benchmarks.md"
    readme = root / "README.md"
    if readme.exists() and BEGIN in (text := readme.read_text()):
        head, _, rest = text.partition(BEGIN)
        readme.write_text(f"{head}{BEGIN}\n{summary(record, drawn)}{END}{rest.partition(END)[2]}")
        yield readme


def picture(docs: Path, name: str) -> Path:
    """Where a scenario's plot is."""
    return docs / f"benchmarks-{name}.svg"


def _plots(record: Record, docs: Path) -> Iterator[tuple[str, Path]]:
    from tests.bench.page import plots

    for name, run in record.runs.items():
        section = SECTIONS[name]
        if section.plot and plots.draw(run, section.plot, path := picture(docs, name)):
            yield name, path


def page(record: Record, drawn: set[str]) -> str:
    """docs/benchmarks.md"""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        if name in record.runs:
            parts.append(_section(name, section, record.runs[name], name in drawn))
    missing = [section.title for name, section in SECTIONS.items() if name not in record.runs]
    if missing:
        parts.append("## Not measured yet\n\n" + "\n".join(f"- {title}" for title in missing) + "\n")
    rows = [[one.system, one.what, one.value, one.source] for one in FIGURES]
    parts.append(
        "## Published by others\n\nNot measured here, on other GPUs and with other programs: MIG is a setting of the "
        "card, which these benchmarks leave as it is, and GVM and Ghost need a driver of their own.\n\n"
        + tables.table(["system", "what", "as published", "source"], rows)
        + "\n"
    )
    return "\n".join(parts)


def _section(name: str, section: Section, run: Run, drawn: bool) -> str:
    fixed = {"twice": 2 * float(run.parameters.get("seconds", 0)), **run.parameters}
    lines = [f"## {section.title}", "", section.text.format(**fixed), ""]
    lines += [tables.machine(run) + f". `{run.on.get('command', '')}`, {run.seconds:.0f} s.", ""]
    if drawn:
        lines += [f"![{section.title}](benchmarks-{name}.svg)", ""]
    if run.cells:
        lines += [tables.everything(run, section.figures), ""]
    if run.absences:
        lines += ["Not measured, or not in full:", ""]
        lines += [f"- {one.system}: {one.reason}" for one in run.absences] + [""]
    return "\n".join(lines)


def summary(record: Record, drawn: set[str]) -> str:
    """The README's part: the best of it as far as it is there, and the commands."""
    parts = [COMMANDS, ""]
    for name in SHOWN:
        if name in drawn:
            parts += [f"![{SECTIONS[name].title}](docs/benchmarks-{name}.svg)", ""]
    run = record.runs.get(TABLE)
    if run is not None:
        parts += [textwrap.fill(TABLE_TEXT.format(tables.machine(run)), 120), ""]
        parts += [tables.everything(tables.only(run, TABLE_CASE), SECTIONS[TABLE].figures), ""]
    there = sum(name in record.runs for name in SECTIONS)
    parts += [f"{there} of {len(SECTIONS)} scenarios are measured: [benchmarks.md](docs/benchmarks.md).", ""]
    return "\n".join(parts)
