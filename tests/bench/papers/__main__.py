"""The papers' own pairs, cell by cell.

    python -m tests.bench.papers plan    [--scenario NAME]... [--cell KEY=VALUE]... [--rounds 0-4] [--budget SECONDS]
    python -m tests.bench.papers prepare ... [--host-gib N]     compile, import, say what is missing; `run` does it, too
    python -m tests.bench.papers run     ... [--budget SECONDS] [--gpus N] [--out DIR] [--again]
    python -m tests.bench.papers merge   [--out DIR] [--into FILE]      a record and its page; cells of one code only
    python -m tests.bench.papers keep    [FILE]      put that record among those that are committed, by its GPU
    python -m tests.bench.papers render              pages and plots of those, and what README and docs say of them
    python -m tests.bench.papers check   [BEFORE] [AFTER]     two records: what moved; exit code 1 if it is worse

`plan` prints the cells that are not there yet, in the order in which `run` measures them, and when each begins. `run`
measures those that end within --budget, and goes on another time where it stopped: each cell is a file in DIR
(build/papers), with clocks, power, the GPU and digests of the code. A cell that fails is a finding, which --again
measures once more. --small runs all programs on the CPU at small shapes, to see that they run: nothing of it is a
measurement.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.core import check, record
from tests.bench.core.record import Record
from tests.bench.papers import (
    actions,
    bounds,
    cells,
    clocks,
    digest,
    flyt,
    gangs,
    kept,
    merging,
    pairs,
    prepare,
    salus,
    scale,
)
from tests.bench.papers.cells import Cell
from tests.bench.papers.merging import Found

OUT = machine.ROOT / "build" / "papers"
SEED = 9
SMALL = pairs.Size(rate=1.0, seconds=4.0, again=20.0, settle=0.5, scale=0.1)
SCENARIOS = ("pairs", "salus", "flyt", "scale")
REFERENCES = {
    pairs.NAME: pairs.EXCLUSIVE,
    salus.PACKING: salus.EXCLUSIVE,
    salus.TRACE: salus.FIFO,
    flyt.NAME: flyt.NATIVE,
    actions.NAME: actions.REFERENCE,
    scale.NAME: scale.FEW,
    scale.SPREAD: scale.HAND,
    gangs.NAME: gangs.ALONE,
}
"""The system that others are compared with, by scenario."""
MOST_GPUS = 4
"""GPUs that cells are planned for, whether or not there are as many."""


def every(names: Sequence[str], gpus: int, seed: int, small: bool) -> Iterator[Cell]:
    """The cells of some scenarios, those that need more GPUs than there are among them."""
    from tests.bench.gpu.lab import GpuLab
    from tests.bench.papers import apps, bands
    from tests.bench.papers.lab import PapersLab
    from tests.bench.papers.site import GpuSite

    lab, gpu = PapersLab("cpu", small=True) if small else PapersLab(), GpuLab()
    several = gpus if gpus > 1 else MOST_GPUS
    made: Mapping[str, Any] = {
        "pairs": lambda: pairs.cells(lab, seed, SMALL if small else None),
        "salus": lambda: salus.cells(lab, seed),
        "flyt": lambda: itertools.chain(
            flyt.cells(lab, gpu), actions.cells([apps.Sliced(gpu), apps.Managed(gpu)], seed)
        ),
        "scale": lambda: itertools.chain(scale.cells(GpuSite(), several), gangs.cells(gpu, bands.ways(gpu), several)),
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
    on |= {"product": digest.digest(machine.ROOT), **prepare.versions()}
    on.setdefault("gpu", "none")
    return on


def measuring(cell: Cell) -> dict[str, str]:
    """The digest of what measures a cell."""
    return {"programs": digest.measuring(machine.ROOT, cell.scenario)}


def wanted(options: argparse.Namespace) -> list[Cell]:
    """The cells that are asked for; those that need more GPUs than there are are named."""
    found = every(options.scenario, options.gpus, options.seed, options.small)
    chosen, left = cells.chosen(found, cells.Wanted(options.cell), options.gpus)
    for cell in left:
        print(f"left out: {cell.name}: it needs {cell.gpus} GPUs, and there is {options.gpus}")
    return chosen


def tell(line: str) -> None:
    """Say it at once, since a session may be cut."""
    print(line, flush=True)


def ready(options: argparse.Namespace) -> None:
    """Have all there that cells use."""
    device = "cpu" if options.small else "cuda"
    for line in prepare.prepared(options.scenario or SCENARIOS, device, options.host_gib):
        tell(line)


def measure(options: argparse.Namespace) -> int:
    """Run cells; 0 if there are none left."""
    start = time.monotonic()
    bounds.on_terminate()
    bounds.adopt()
    chosen, on = wanted(options), where(options.small)
    ready(options)
    lookers = [] if options.small else [clocks.looker(gpu) for gpu in range(options.gpus)]
    with bounds.swept() as behind:
        left = cells.run(
            *(chosen, options.rounds, options.out, on),
            more=measuring,
            budget=options.budget,
            again=options.again,
            watch=lambda cell: clocks.watched(lookers[: cell.gpus]),
            bound=bounds.bounded,
            start=start,
            tell=tell,
        )
    for line in behind:
        tell(line)
    tell(f"{left} cells are left for another time" if left else "all cells are there")
    return 0


def only_ready(options: argparse.Namespace) -> int:
    """Prepare, and no more."""
    ready(options)
    return 0


def show(options: argparse.Namespace) -> int:
    """Print the plan."""
    chosen = wanted(options)
    # What is there already counts only where it is of the same code; of a machine without a GPU, on any.
    there = Path("/dev/nvidiactl").exists()
    on = {key: value for key, value in where(small=not there).items() if there or key != "gpu"}
    for line in cells.plan(chosen, options.rounds, options.out, on, measuring, options.budget, options.again):
        print(line)
    return 0


def merge(options: argparse.Namespace) -> int:
    """Write the record, the page and its plots."""
    try:
        found = merging.read(options.out.glob("*--round=*.json"))
        made = merging.merged(found, REFERENCES, completed, told)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if not found:
        raise SystemExit(f"{options.out}: there is no cell")
    options.into.write_text(record.dump(made))
    drawn = kept.write_page(made, options.into)
    print(f"{options.into}: {len(found)} cells of {', '.join(made.runs)}; {', '.join(drawn) or 'no plots'}")
    return 0


def completed(found: Sequence[Found]) -> Sequence[Found]:
    """Cells with the figures that need several of them."""
    return pairs.complete(found) if found and found[0].scenario == pairs.NAME else found


def told(found: Sequence[Found]) -> Mapping[str, Any]:
    """What a record has of cells besides their figures: what is pooled over rounds, and what happened in one."""
    if found[0].scenario == pairs.NAME:
        return {"pooled": [[system, list(case.items()), figures] for system, case, figures in pairs.pooled(found)]}
    if found[0].scenario == actions.NAME:
        mine = [one for one in found if one.absent is None and one.system == actions.OURS]
        return {"timelines": {str(one.case["gpus"]): one.raw["timeline"] for one in sorted(mine, key=_last_first)}}
    return {}


def _last_first(one: Found) -> int:
    return -one.round


def keep(options: argparse.Namespace) -> int:
    """Put a record among those that are committed."""
    try:
        print(kept.keep(_read(options.file), machine.ROOT).relative_to(machine.ROOT))
    except ValueError as error:
        raise SystemExit(f"{options.file}: {error}") from None
    return render(options)


def render(options: argparse.Namespace) -> int:
    """Write what is made of records that are committed."""
    for path in kept.render(machine.ROOT):
        print(path.relative_to(machine.ROOT))
    return 0


def compare(options: argparse.Namespace) -> int:
    """Tell what moved between two records."""
    after = _read(options.after)
    committed = options.before or kept.path_of(after, machine.ROOT)
    if not committed.exists():
        print(f"{committed}: there is no record of that GPU to compare with")
        return 0
    report = check.compare(_read(committed), after)
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
    for name, act in (("plan", show), ("prepare", only_ready), ("run", measure)):
        one = commands.add_parser(name)
        one.add_argument("--scenario", action="append", default=[], choices=SCENARIOS)
        one.add_argument("--cell", action="append", default=[], metavar="KEY=VALUE")
        one.add_argument("--rounds", type=rounds, default=rounds("0-4"), metavar="N[-M]")
        one.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
        one.add_argument("--gpus", type=int, default=1, metavar="N")
        one.add_argument("--seed", type=int, default=SEED)
        one.add_argument("--out", type=Path, default=OUT, metavar="DIR")
        one.add_argument("--again", action="store_true", help="cells that failed, too")
        one.add_argument("--host-gib", type=int, default=0, metavar="N", help="use so much host memory once before")
        one.add_argument("--small", action="store_true")
        one.set_defaults(act=act)
    one = commands.add_parser("merge")
    one.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    one.add_argument("--into", type=Path, default=OUT / "papers.json", metavar="FILE")
    one.set_defaults(act=merge)
    one = commands.add_parser("keep")
    one.add_argument("file", type=Path, nargs="?", default=OUT / "papers.json")
    one.set_defaults(act=keep)
    commands.add_parser("render").set_defaults(act=render)
    one = commands.add_parser("check")
    one.add_argument("before", type=Path, nargs="?")
    one.add_argument("after", type=Path, nargs="?", default=OUT / "papers.json")
    one.set_defaults(act=compare)
    options = parser.parse_args(arguments)
    code: int = options.act(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
