"""Records of the papers' pairs that are committed, one for each GPU, and what pages say of them.

benchmarks/papers-GPU.json has a page and plots beside it; README.md has the first table of each, and docs/comparison.md
a row for each headline of a paper. All of it is made of the records: no figure is typed by hand.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.core import record
from tests.bench.core.record import Record
from tests.bench.page import tables
from tests.bench.page.documents import FOLDER, RECORD
from tests.bench.papers import headlines, page, pairs

PREFIX = "papers-"
README, COMPARISON = "README.md", "docs/comparison.md"
BEGIN, END = "<!-- papers: by `make bench-render` -->", "<!-- end of papers -->"
COLUMNS = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "attained")
HOW = "tests/bench/papers/README.md"
WIDTH = tables.WIDTH


def name_of(made: Record) -> str:
    """The name of a record's file, by its GPU. ValueError for one of several, or none."""
    return f"{PREFIX}{re.sub(r'[^a-z0-9]+', '-', headlines.gpu_of(made).lower()).strip('-')}.json"


def path_of(made: Record, root: Path) -> Path:
    """Where a record is committed. ValueError as name_of."""
    return root / FOLDER / name_of(made)


def keep(made: Record, root: Path) -> Path:
    """Commit a record: scenarios of it replace those that were there. ValueError for one of several GPUs, or where the
    product was another."""
    path = path_of(made, root)
    before = record.load(path.read_text()) if path.exists() else Record({})
    whole = record.merge(before, made)
    products = {str(run.on.get("product")) for run in whole.runs.values()}
    if len(products) > 1:
        told = ", ".join(sorted(products))
        raise ValueError(f"{path.name} would be of products {told}: measure all of it again, or remove it first")
    path.write_text(record.dump(whole))
    return path


def records(root: Path) -> dict[Path, Record]:
    """Those that are committed, by their files."""
    found = sorted((root / FOLDER).glob(f"{PREFIX}*.json"))
    return {path: record.load(path.read_text()) for path in found}


def plots(path: Path) -> dict[int, Path]:
    """The plots of a record's file, by the percent of memory."""
    return {memory: path.with_name(f"{path.stem}-{memory}.svg") for memory in page.MEMORIES}


def write_page(made: Record, path: Path) -> list[str]:
    """Write a record's page and plots beside its file; the names of the plots."""
    drawn = {}
    for memory, plot in plots(path).items():
        title = "memory for both" if memory == 100 else f"{memory} % of the memory of both"
        if page.draw(page.points(made, memory), plot, title):
            drawn[memory] = plot.name
        else:
            plot.unlink(missing_ok=True)
    path.with_suffix(".md").write_text(page.page(made, drawn))
    return list(drawn.values())


def render(root: Path) -> Iterator[Path]:
    """Write all pages; yield the files that were written."""
    found = records(root)
    for path, made in found.items():
        write_page(made, path)
        yield path.with_suffix(".md")
    bench = root / FOLDER / RECORD
    rest = record.load(bench.read_text()) if bench.exists() else Record({})
    for name, text in ((README, summary(found)), (COMPARISON, compared([*found.values()], rest))):
        page_ = root / name
        if page_.exists() and BEGIN in (before := page_.read_text()):
            page_.write_text(put(before, text))
            yield page_


def put(before: str, text: str) -> str:
    """A page with another text between the marks."""
    head, _, rest = before.partition(BEGIN)
    return f"{head}{BEGIN}\n{text}{END}{rest.partition(END)[2]}"


def part(page_: str) -> str:
    """The text between the marks."""
    return page_.partition(BEGIN)[2].partition(END)[0].removeprefix("\n")


def _filled(text: str, first: str = "", behind: str = "") -> str:
    more = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=behind, **more)  # type: ignore[arg-type]


def summary(found: dict[Path, Record]) -> str:
    """The part of README.md: of each GPU a table, and of the first one two plots."""
    what = (
        "the pairs of the papers that ggroupfs implements: an LLM server (the shape of Llama-3-8B) that comes first, "
        "beside a diffusion model (the UNet of SDXL)"
    )
    tables_ = [(path, made, rows) for path, made in found.items() if (rows := _rows(made))]
    if not tables_:
        return _filled(f"Not measured yet on real programs: {what}. [How they will be]({HOW}).") + "\n"
    text = (
        f"On real programs, {what}. Percentiles are of the requests of all rounds; a request is within the SLO where "
        f"it is not slower than the P99 of the server alone. [How they are measured]({HOW})."
    )
    parts = [_filled(text)]
    drawn = next(
        (there for path, _, _ in tables_ if (there := [one for one in plots(path).values() if one.exists()])), []
    )
    parts += [f"![{_alt(one)}]({FOLDER}/{one.name})" for one in drawn]
    for path, made, rows in tables_:
        link = f"[all of it]({FOLDER}/{path.stem}.md)"
        parts.append(_filled(f"{headlines.gpu_of(made)}, commit {made.runs[pairs.NAME].on.get('commit')}: {link}."))
        heads = ["system", "memory of both", *map(tables.heading, COLUMNS), "the other, of that alone"]
        parts.append(tables.table(heads, rows))
    return "\n\n".join(parts) + "\n"


def _alt(plot: Path) -> str:
    memory = plot.stem.rpartition("-")[2]
    return f"SLO attainment against the throughput of the other program, with {memory} % of the memory of both"


def _rows(made: Record) -> list[list[str]]:
    """Rows of the first table: the server alone, and each system beside diffusion."""
    alone, rows = page.figures_of(made, pairs.EXCLUSIVE, low="diffusion").get("steps_per_s", 0.0), []
    for system, case, told in page.pooled(made):
        mine = (case.get("low"), case.get("arrivals"), case.get("duty")) == ("diffusion", "gamma", None)
        if mine or (system == pairs.EXCLUSIVE and dict(case) == {"arrivals": "gamma"}):
            memory = f"{case['memory']} %" if mine else ""
            part = tables.number(told["steps_per_s"] / alone) if mine and alone and "steps_per_s" in told else ""
            rows.append([system, memory, *(page.cell(told, name) for name in COLUMNS), part])
    return sorted(rows, key=lambda row: (row[1] != "", row[1] != "100 %"))


def compared(found: Sequence[Record], bench: Record) -> str:
    """The part of docs/comparison.md: each headline of a paper, and ours."""
    lines = []
    for row, ours in headlines.told(headlines.ROWS, found, bench):
        lines.append(_filled(f"**{row.paper}**: {row.what}", "- ", "  "))
        lines.append(_filled(f"theirs: {row.theirs}", "  - ", "    "))
        lines.append(_filled(f"ours: {ours}", "  - ", "    "))
        lines.append(_filled(f"conditions: {row.conditions}", "  - ", "    "))
    return "\n".join(lines) + "\n"
