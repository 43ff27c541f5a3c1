"""The measured comparison, by a command.

    python -m tests.bench host [--only NAME]...    measure what needs no GPU
    python -m tests.bench gpu [--only NAME]...     measure on the GPU 0 of this machine; --cell percent=300 for some
                                                   cases of `oversubscribed`, which is run by name alone
    python -m tests.bench keep [FILE]              put what was measured into the record that is committed
    python -m tests.bench render                   benchmarks/README.md, its plots, and the part of the README
    python -m tests.bench check [FILE]             what moved since the committed record; exit code 1 if it is worse

What is measured goes into build/bench.json, scenario by scenario: one that is measured again replaces what was there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import machine
from tests.bench.core import check, record, runner
from tests.bench.core.record import Record, Run

COMMITTED = machine.ROOT / "benchmarks" / "record.json"
MEASURED = machine.ROOT / "build" / "bench.json"
SEED = 9


def read(path: Path) -> Record:
    """Return the record in a file; an empty one if there is no file. SystemExit if the file is not a record."""
    try:
        return record.load(path.read_text())
    except FileNotFoundError:
        return Record({})
    except ValueError as error:
        raise SystemExit(f"{path}: {error}") from None


def write(path: Path, what: Record) -> None:
    """Write a record to a file, in whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(record.dump(what))
    fresh.replace(path)


def measure(scenarios: Mapping[str, tuple[runner.Scenario, float, int]], on: Mapping[str, Any], out: Path) -> None:
    """Measure scenarios, each with a budget in seconds and a number of repetitions. The file is written after every
    system.
    """

    def save(run: Run) -> None:
        write(out, record.merge(read(out), Record({run.scenario: run})))

    for name, (scenario, budget, repetitions) in scenarios.items():
        start = time.monotonic()
        print(f"== {name}", flush=True)

        def tell(line: str, start: float = start) -> None:
            print(f"{time.monotonic() - start:6.1f} s  {line}", flush=True)

        run = runner.run(scenario, on, repetitions=repetitions, budget=budget, save=save, tell=tell)
        save(run)
        for one in run.absences:
            print(f"        not measured: {one.system}: {one.reason}")
        print(f"== {name}: {run.seconds:.0f} s", flush=True)


def chosen(options: argparse.Namespace, known: Mapping[str, Any]) -> list[str]:
    """Return the names that were requested, or that begin with a requested name and a dash. SystemExit for an unknown
    name.
    """
    found: list[str] = []
    for name in options.only:
        named = [one for one in known if one == name or one.startswith(f"{name}-")]
        if not named:
            raise SystemExit(f"there is no scenario {name}; there are {', '.join(known)}")
        found += named
    return found or [name for name, entry in known.items() if getattr(entry, "by_default", True)]


def cells(options: argparse.Namespace) -> dict[str, str]:
    """Return the values that restrict the cases. SystemExit for a word that is not KEY=VALUE."""
    pairs = [word.partition("=") for word in options.cell]
    if not all(key and sign and value for key, sign, value in pairs):
        raise SystemExit("--cell is KEY=VALUE, such as percent=300")
    return {key: value for key, _, value in pairs}


def host(options: argparse.Namespace) -> int:
    """Measure the scenarios that need no GPU."""
    from tests.bench.host import SCENARIOS

    names = chosen(options, SCENARIOS)
    plans = {name: (SCENARIOS[name].make(options.seed), *limits(options, SCENARIOS[name])) for name in names}
    measure(plans, machine.described(machine.command(), gpu=False), options.out)
    return 0


def gpu(options: argparse.Namespace) -> int:
    """Measure the scenarios that need a GPU."""
    from tests.bench.gpu.lab import GpuLab
    from tests.bench.gpu.scenarios import SCENARIOS

    names, lab = chosen(options, SCENARIOS), GpuLab(cells(options))
    plans = {name: (SCENARIOS[name].make(lab, options.seed), *limits(options, SCENARIOS[name])) for name in names}
    measure(plans, machine.described(machine.command(), gpu=True), options.out)
    return 0


def limits(options: argparse.Namespace, entry: Any) -> tuple[float, int]:
    """Return the budget in seconds, and the repetitions."""
    budget = entry.budget if options.budget is None else options.budget
    return budget, entry.repetitions if options.repetitions is None else options.repetitions


def keep(options: argparse.Namespace) -> int:
    """Merge what was measured into the committed record."""
    fresh = read(options.file)
    if not fresh.runs:
        raise SystemExit(f"{options.file}: there is nothing in it")
    write(COMMITTED, record.merge(read(COMMITTED), fresh))
    print(f"{COMMITTED}: {', '.join(fresh.runs)}")
    return 0


def render(options: argparse.Namespace) -> int:
    """Render the page and its plots."""
    from tests.bench.page import documents

    for path in documents.render(read(COMMITTED), machine.ROOT):
        print(path.relative_to(machine.ROOT))
    return 0


def compare(options: argparse.Namespace) -> int:
    """Compare what was measured with the committed record."""
    before, after = read(COMMITTED), read(options.file)
    both = before.runs.keys() & after.runs.keys()
    if not both:
        raise SystemExit(f"{options.file} and {COMMITTED} have no scenario in common")
    report = check.compare(before, after)
    for line in (*report.moved, *report.noisy, *(f"gone   {one}" for one in report.missing)):
        print(line)
    count = sum(one.worse for one in report.moved)
    print(
        f"{report.compared} ratios compared in {', '.join(sorted(both))}: {count} worse, "
        f"{len(report.moved) - count} better, {len(report.missing)} gone, {len(report.noisy)} too noisy to tell"
    )
    return int(report.failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, act in (("host", host), ("gpu", gpu)):
        one = commands.add_parser(name)
        one.add_argument("--only", action="append", default=[], metavar="NAME", help="only this (may be repeated)")
        one.add_argument("--cell", action="append", default=[], metavar="KEY=VALUE", help="only such cases")
        one.add_argument("--out", type=Path, default=MEASURED, metavar="FILE", help="the record that it goes into")
        one.add_argument("--budget", type=float, metavar="SECONDS", help="for each scenario")
        one.add_argument("--repetitions", type=int, metavar="N", help="at most")
        one.add_argument("--seed", type=int, default=SEED)
        one.set_defaults(act=act)
    for name, act in (("keep", keep), ("check", compare)):
        one = commands.add_parser(name)
        one.add_argument("file", type=Path, nargs="?", default=MEASURED)
        one.set_defaults(act=act)
    commands.add_parser("render").set_defaults(act=render)
    options = parser.parse_args(arguments)
    code: int = options.act(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
