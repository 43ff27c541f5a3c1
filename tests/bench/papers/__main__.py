"""The papers' own pairs, cell by cell.

    python -m tests.bench.papers plan  [--scenario NAME]... [--cell KEY=VALUE]... [--rounds 0-4]
    python -m tests.bench.papers run   ... [--budget SECONDS] [--gpus N] [--out DIR]
    python -m tests.bench.papers merge [--out DIR] [--into FILE]    the record and the page; cells of one code only
    python -m tests.bench.papers check BEFORE AFTER                 two records: what moved; exit code 1 if it is worse

`plan` prints the seconds of each cell that is not there yet. `run` measures those that end within --budget, and goes on
another time where it stopped: each cell is a file in DIR (build/papers), with clocks, power, the GPU and digests of the
code. --small runs all programs on the CPU at small shapes, to see that they run: nothing of it is a measurement.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.core import check, record
from tests.bench.core.record import Record
from tests.bench.papers import cells, clocks, digest, flyt, page, pairs, salus, scale
from tests.bench.papers.cells import Cell, Found

OUT = machine.ROOT / "build" / "papers"
SEED = 9
SMALL = pairs.Size(rate=1.0, seconds=4.0, again=20.0, settle=0.5, scale=0.1)
SCENARIOS = ("pairs", "salus", "flyt", "scale")
REFERENCES = {
    pairs.NAME: pairs.EXCLUSIVE,
    salus.PACKING: salus.EXCLUSIVE,
    salus.TRACE: salus.FIFO,
    flyt.NAME: flyt.NATIVE,
    scale.NAME: scale.FEW,
    scale.SPREAD: scale.HAND,
}
"""The system that others are compared with, by scenario."""


def every(names: Sequence[str], gpus: int, seed: int, small: bool) -> Iterator[Cell]:
    """The cells of some scenarios."""
    from tests.bench.gpu.lab import GpuLab
    from tests.bench.papers.lab import PapersLab
    from tests.bench.papers.site import GpuSite

    lab = PapersLab("cpu", small=True) if small else PapersLab()
    made: Mapping[str, Any] = {
        "pairs": lambda: pairs.cells(lab, seed, SMALL if small else None),
        "salus": lambda: salus.cells(lab, seed),
        "flyt": lambda: flyt.cells(lab, GpuLab()),
        "scale": lambda: scale.cells(GpuSite(), gpus),
    }
    return itertools.chain.from_iterable(made[name]() for name in names or SCENARIOS)


def rounds(text: str) -> list[int]:
    """`3`, or `0-4`. ValueError for other words."""
    first, _, last = text.partition("-")
    found = list(range(int(first), int(last or first) + 1))
    if not found:
        raise ValueError(f"{text} is no range of rounds")
    return found


def where(small: bool) -> dict[str, Any]:
    """What is measured on, and of which code."""
    on = dict(machine.described(machine.command(), gpu=not small))
    on |= {"product": digest.digest(machine.ROOT)}
    on.setdefault("gpu", "none")
    return on


def measuring(cell: Cell) -> dict[str, str]:
    """The digest of what measures a cell."""
    return {"programs": digest.measuring(machine.ROOT, cell.scenario)}


def measure(options: argparse.Namespace) -> int:
    """Run cells; 0 if there are none left."""
    chosen = cells.chosen(
        every(options.scenario, options.gpus, options.seed, options.small), wanted(options), options.gpus
    )
    on = where(options.small)
    look = None if options.small else clocks.looker(0)

    def tell(line: str) -> None:
        print(line, flush=True)

    left = cells.run(
        *(chosen, options.rounds, options.out, on),
        more=measuring,
        budget=options.budget,
        watch=lambda: clocks.watched(look),
        tell=tell,
    )
    tell(f"{left} cells are left for another time" if left else "all cells are there")
    return 0


def wanted(options: argparse.Namespace) -> cells.Wanted:
    """What is asked for by --cell."""
    return cells.Wanted(options.cell)


def show(options: argparse.Namespace) -> int:
    """Print the plan."""
    chosen = cells.chosen(
        every(options.scenario, options.gpus, options.seed, options.small), wanted(options), options.gpus
    )
    # What is there already counts only where it is of the same code; of a machine without a GPU, on any.
    there = Path("/dev/nvidiactl").exists()
    on = {key: value for key, value in where(small=not there).items() if there or key != "gpu"}
    for line in cells.plan(chosen, options.rounds, options.out, on, measuring):
        print(line)
    return 0


def merge(options: argparse.Namespace) -> int:
    """Write the record, the page and its plots."""
    try:
        found = cells.read(options.out.glob("*--round=*.json"))
        made = cells.merged(found, REFERENCES, completed)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not found:
        raise SystemExit(f"{options.out}: there is no cell")
    options.into.write_text(record.dump(made))
    drawn = []
    mine = [one for one in found if one.scenario == pairs.NAME]
    for memory in (100, pairs.PRESSED):
        name = f"pairs-{memory}.svg"
        title = "memory for both" if memory == 100 else f"{memory} % of the memory of both"
        if mine and page.draw(page.points(mine, memory), options.into.with_name(name), title):
            drawn.append(name)
    options.into.with_suffix(".md").write_text(page.page(made, found, drawn))
    print(f"{options.into}: {len(found)} cells of {', '.join(made.runs)}; {', '.join(drawn) or 'no plots'}")
    return 0


def completed(found: Sequence[Found]) -> Sequence[Found]:
    """Cells with the figures that need several of them."""
    return pairs.complete(found) if found and found[0].scenario == pairs.NAME else found


def compare(options: argparse.Namespace) -> int:
    """Tell what moved between two records."""
    before, after = (_read(path) for path in (options.before, options.after))
    report = check.compare(before, after)
    for line in (*report.moved, *report.noisy, *(f"gone   {one}" for one in report.missing)):
        print(line)
    print(f"{report.compared} ratios, {len(report.moved)} moved, {len(report.noisy)} too noisy to tell")
    return int(report.failed)


def _read(path: Path) -> Record:
    try:
        return record.load(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, act in (("plan", show), ("run", measure)):
        one = commands.add_parser(name)
        one.add_argument("--scenario", action="append", default=[], choices=SCENARIOS)
        one.add_argument("--cell", action="append", default=[], metavar="KEY=VALUE")
        one.add_argument("--rounds", type=rounds, default=rounds("0-4"), metavar="N[-M]")
        one.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
        one.add_argument("--gpus", type=int, default=1, metavar="N")
        one.add_argument("--seed", type=int, default=SEED)
        one.add_argument("--out", type=Path, default=OUT, metavar="DIR")
        one.add_argument("--small", action="store_true")
        one.set_defaults(act=act)
    one = commands.add_parser("merge")
    one.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    one.add_argument("--into", type=Path, default=OUT / "papers.json", metavar="FILE")
    one.set_defaults(act=merge)
    one = commands.add_parser("check")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    one.set_defaults(act=compare)
    options = parser.parse_args(arguments)
    code: int = options.act(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
