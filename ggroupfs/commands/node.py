"""``ggroupfs node``: prints the capacity of this node, in the format of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.view.capacity import FORMS, capacity


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument("--format", choices=list(FORMS), default="json", help="json; what Ray, Dask or HTCondor take")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    print(FORMS[arguments.format](capacity(arguments.mount)))
    return 0
