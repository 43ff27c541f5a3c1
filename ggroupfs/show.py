"""``ggroupfs show``: who uses what, as a table or as a tree."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ggroupfs import columns, outline, snapshot
from ggroupfs.client.reading import say_if_strangers
from ggroupfs.mounts import DEFAULT_MOUNTPOINT

IN_TREE = (columns.CURRENT, columns.HIGH, columns.SWAP, columns.TIMESLICE, columns.FROZEN, columns.FINISHED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it is told."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--tree", action="store_true", help="GPUs, their slices, and in those the processes")
    form.add_argument("--json", action="store_true")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    say_if_strangers(arguments.mount)
    if arguments.json:
        rows = [columns.as_json(node, columns.SHOWN) for node in processes(arguments.mount)]
        print(json.dumps(rows, indent=2))
    else:
        text = tree(arguments.mount) if arguments.tree else table(arguments.mount)
        print(columns.printable(text, sys.stdout.encoding))
    return 0


def processes(mount: Path) -> Iterator[outline.Node]:
    """The processes of a tree."""
    taken = snapshot.take(mount, columns.fields(columns.SHOWN), slices=False)
    for line in outline.lines(outline.build(taken, {}), "pid", flat=True):
        yield line.node


def table(mount: Path) -> str:
    """A line a process and GPU."""
    return columns.table(processes(mount))


def tree(mount: Path) -> str:
    """A line a GPU, slice and process."""
    taken = snapshot.take(mount, columns.fields(IN_TREE))
    return columns.tree(outline.lines(outline.build(taken, {}), "pid"), IN_TREE)
