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
FOLDER = "benchmarks"
"""Folder of the record, the page and the plots, below the top."""
RECORD = "record.json"
"""Name of the record in FOLDER."""
SHOWN = "latency-decode"
"""Scenario of which the README shows the plot, and a table of one case: a row a system."""
SHOWN_CASE = {"load": 0.35, "batch": 3}
SHOWN_TEXT = """A program that decodes, at 35 % load, beside three batch programs that would fill the GPU: medians of
the repetitions; `x` is of what each has alone. {}."""

HEAD = """# Benchmarks

Written by `make bench-render` from [record.json](record.json), which has every repetition, the machines, seeds and
commands.

```
make bench            # measure what needs no GPU; into build/bench.json
make bench-gpu        # the rest, on a machine with an NVIDIA GPU, offline; ONLY=pareto for one scenario
make bench-check      # what moved since benchmarks/record.json, by ratios within one run
make bench-keep       # put build/bench.json into benchmarks/record.json
make bench-render     # write this page, its plots, and the part of the README
```

Systems take turns within a run, and another one begins in each repetition. A figure is the median of the repetitions,
with the least and the most of them; `x` is the median of each repetition's ratio to the reference, which is the first
system of each table. `make bench-check` compares such ratios with another run's, and says which moved by more
than their spread.
"""
PUBLISHED = """Not measured here, on other GPUs and with other programs: MIG is a setting of the card, which these
benchmarks leave as it is, and GVM and Ghost need a driver of their own."""


def render(record: Record, root: Path) -> Iterator[Path]:
    """Write everything; yield the files that were written. Plots of scenarios that the record lacks are removed."""
    folder, drawn = root / FOLDER, set()
    for name, path in _plots(record, folder):
        drawn.add(name)
        yield path
    for name, section in SECTIONS.items():
        if section.plot and name not in drawn:
            picture(folder, name).unlink(missing_ok=True)
    (folder / "README.md").write_text(page(record, drawn))
    yield folder / "README.md"
    readme = root / "README.md"
    if readme.exists() and BEGIN in (text := readme.read_text()):
        head, _, rest = text.partition(BEGIN)
        readme.write_text(f"{head}{BEGIN}\n{summary(record, drawn)}{END}{rest.partition(END)[2]}")
        yield readme


def picture(folder: Path, name: str) -> Path:
    """Return the path of a scenario's plot."""
    return folder / f"{name}.svg"


def _plots(record: Record, folder: Path) -> Iterator[tuple[str, Path]]:
    from tests.bench.page import plots

    for name, run in record.runs.items():
        section = SECTIONS[name]
        if section.plot and plots.draw(run, section.plot, path := picture(folder, name)):
            yield name, path


def page(record: Record, drawn: set[str]) -> str:
    """Return the text of benchmarks/README.md."""
    parts = [HEAD]
    for name, section in SECTIONS.items():
        if name in record.runs:
            parts.append(_section(name, section, record.runs[name], name in drawn))
    missing = [section.title for name, section in SECTIONS.items() if name not in record.runs]
    if missing:
        parts.append("## Not measured yet\n\n" + "\n".join(f"- {title}" for title in missing) + "\n")
    published = "\n".join(_item(f"**{one.system}**, {one.what}: {one.value} ({one.source})") for one in FIGURES)
    parts.append(f"## Published by others\n\n{_filled(PUBLISHED)}\n\n{published}\n")
    return "\n".join(parts)


def _filled(text: str, behind: str = "") -> str:
    """Return a paragraph in lines that are not too long; words and names are not divided."""
    return textwrap.fill(text, tables.WIDTH, subsequent_indent=behind, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return _filled(f"- {text}", "  ")


def _section(name: str, section: Section, run: Run, drawn: bool) -> str:
    fixed = {"twice": 2 * float(run.parameters.get("seconds", 0)), **run.parameters}
    lines = [f"## {section.title}", "", _filled(section.text.format(**fixed)), ""]
    lines += [_filled(tables.machine(run) + f". `{run.on.get('command', '')}`, {run.seconds:.0f} s."), ""]
    if drawn:
        lines += [f"![{section.title}]({name}.svg)", ""]
    if run.cells:
        lines += [tables.everything(run, section.figures), ""]
    if run.absences:
        lines += ["Not measured, or not in full:", ""]
        lines += [_item(f"{one.system}: {one.reason}") for one in run.absences] + [""]
    return "\n".join(lines)


def summary(record: Record, drawn: set[str]) -> str:
    """Return the README's part: one plot and one table, as far as they are there, and where the rest is."""
    parts = [""]
    if SHOWN in drawn:
        parts += [f"![{SECTIONS[SHOWN].title}]({FOLDER}/{SHOWN}.svg)", ""]
    run = record.runs.get(SHOWN)
    if run is not None:
        parts += [_filled(SHOWN_TEXT.format(tables.machine(run))), ""]
        parts += [tables.everything(tables.only(run, SHOWN_CASE), SECTIONS[SHOWN].figures, medians=True), ""]
    there = sum(name in record.runs for name in SECTIONS)
    parts += [f"{there} of {len(SECTIONS)} scenarios are measured: [benchmarks]({FOLDER}/README.md).", ""]
    return "\n".join(parts)
