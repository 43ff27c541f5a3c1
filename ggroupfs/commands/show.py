"""``ggroupfs show``: what each process uses, as a table or as a tree."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ggroupfs.client.reading import say_if_strangers
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.view import columns, outline, snapshot

IN_TREE = (
    *(columns.CURRENT, columns.HIGH, columns.SWAP),
    *(columns.TIMESLICE, columns.FROZEN, columns.OFF, columns.FINISHED),
)

HIDDEN = "/proc is mounted with hidepid, and tells this user nothing of others' (proc(5))"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it is told."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--tree", action="store_true", help="GPUs, their slices, and in those the processes")
    form.add_argument("--json", action="store_true")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    say_if_strangers(arguments.mount)
    fields = columns.fields(IN_TREE if arguments.tree else columns.SHOWN)
    taken = snapshot.take(arguments.mount, fields, slices=arguments.tree)
    if arguments.json:
        print(json.dumps([columns.as_json(node, columns.SHOWN) for node in processes(taken)], indent=2))
    else:
        text = tree(taken) if arguments.tree else table(taken)
        print(columns.printable(text, sys.stdout.encoding))
    if taken.hidden:
        missing = "1 process is" if taken.hidden == 1 else f"{taken.hidden} processes are"
        print(f"ggroupfs: show: {missing} missing: {HIDDEN}", file=sys.stderr)
    return 0


def processes(taken: snapshot.Snapshot) -> Iterator[outline.Node]:
    """The processes of a tree."""
    for line in outline.lines(outline.build(taken, {}), "pid", flat=True):
        yield line.node


def table(taken: snapshot.Snapshot) -> str:
    """A line a process and GPU."""
    return columns.table(processes(taken))


def tree(taken: snapshot.Snapshot) -> str:
    """A line a GPU, slice and process."""
    return columns.tree(outline.lines(outline.build(taken, {}), "pid"), IN_TREE)
