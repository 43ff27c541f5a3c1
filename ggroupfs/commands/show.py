"""``ggroupfs show``: prints the use of each process, as a table, a tree, or JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

from ggroupfs.client.reading import say_if_strangers
from ggroupfs.client.slices import AWAITED, Made, made
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.text import spans
from ggroupfs.view import columns, outline, snapshot

IN_TREE = (
    *(columns.CURRENT, columns.HIGH, columns.SWAP),
    *(columns.TIMESLICE, columns.FROZEN, columns.OFF, columns.FINISHED),
)

HIDDEN = "/proc is mounted with hidepid, and tells this user nothing of others' (proc(5))"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--tree", action="store_true", help="GPUs, their slices, and in those the processes")
    form.add_argument("--json", action="store_true")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    say_if_strangers(arguments.mount)
    fields = columns.fields(IN_TREE if arguments.tree else columns.SHOWN)
    taken = snapshot.take(arguments.mount, fields, slices=arguments.tree)
    if arguments.json:
        print(json.dumps([columns.as_json(node, columns.SHOWN) for node in processes(taken)], indent=2))
    else:
        text = tree(taken, awaited(arguments.mount)) if arguments.tree else table(taken)
        print(columns.printable(text, sys.stdout.encoding))
    if taken.hidden:
        missing = "1 process is" if taken.hidden == 1 else f"{taken.hidden} processes are"
        print(f"ggroupfs: show: {missing} missing: {HIDDEN}", file=sys.stderr)
    return 0


def processes(taken: snapshot.Snapshot) -> Iterator[outline.Node]:
    """Yield the processes of a snapshot."""
    for line in outline.lines(outline.build(taken, {}), "pid", flat=True):
        yield line.node


def table(taken: snapshot.Snapshot) -> str:
    """Return a table with a line for each process and GPU."""
    return columns.table(processes(taken))


def tree(taken: snapshot.Snapshot, waiting: Mapping[str, Made]) -> str:
    """Return a tree with a line for each GPU, slice and process. Slices in `waiting`, by path, are marked."""
    return columns.tree([_noted(line, waiting) for line in outline.lines(outline.build(taken, {}), "pid")], IN_TREE)


def awaited(mount: Path) -> Mapping[str, Made]:
    """Return the slices whose cgroups never came, by path."""
    with contextlib.suppress(OSError):  # the daemon has ended
        return {one.path: one for one in made(mount) if one.state == AWAITED}
    return {}


def _noted(line: outline.Line, waiting: Mapping[str, Made]) -> outline.Line:
    use = line.node.use
    one = waiting.get(use.path) if isinstance(use, snapshot.SliceUse) else None
    if one is None:
        return line
    end = "" if one.left_s is None else f", {spans.shown(one.left_s)} left"
    note = f"{line.node.label} (no cgroup yet, made {spans.shown(one.age_s)} ago{end})"
    return attrs.evolve(line, node=attrs.evolve(line.node, label=note))
