"""``ggroupfs balance``: short for ``ggroupfs policy balance``, which needs no configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from ggroupfs.commands.policy import run_program
from ggroupfs.mounts import DEFAULT_MOUNTPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What it is told."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML: bounds, and programs not to be moved")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """The subcommand."""
    return run_program("balance", arguments.config, arguments.mount)
