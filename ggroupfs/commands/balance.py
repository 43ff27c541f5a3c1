"""``ggroupfs balance``: a short form of ``ggroupfs policy balance``, which needs no configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from ggroupfs.commands.policy import run_program
from ggroupfs.mounts import DEFAULT_MOUNTPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML: bounds, and programs not to be moved")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run_program("balance", arguments.config, arguments.mount)
