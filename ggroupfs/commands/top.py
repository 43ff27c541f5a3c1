"""``ggroupfs top``: shows the use of each program, live or once."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from ggroupfs.client import require_tree
from ggroupfs.client.reading import say_if_strangers
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.view import columns
from ggroupfs.view.commandlines import CommandLines
from ggroupfs.view.frame import Wishes, as_json, look, plain

DELAY_S = 1.0
"""Default seconds between two passes."""
DELAY_LEAST_S = 0.1
"""Shortest time between two passes, seconds: rates over less are noise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("-d", "--delay", type=_delay, default=DELAY_S, metavar="SECONDS", help="between two frames; 1")
    parser.add_argument("-c", "--command", dest="full", action="store_true", help="full command lines")
    parser.add_argument("-a", "--all", action="store_true", help="processes on GPUs, too, that they do not use")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print one frame as text; also where there is no terminal")
    form.add_argument("--json", action="store_true", help="print one frame as a JSON object")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def _delay(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not DELAY_LEAST_S <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{word!r} is no time of {DELAY_LEAST_S:g} s or more")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Run the command. Rates need two passes, so a single frame takes as long as the delay."""
    mount = Path(os.path.abspath(arguments.mount))
    wishes = Wishes(CommandLines() if arguments.full else None, arguments.all)
    if not (arguments.once or arguments.json) and sys.stdin.isatty() and sys.stdout.isatty():
        require_tree(mount)
        from ggroupfs.commands.screen import Top  # imported here: textual takes half a second

        return Top(mount, arguments.delay, wishes).run() or 0
    say_if_strangers(mount)
    first = look(mount)
    time.sleep(arguments.delay)
    frame = look(mount, first.snapshot, wishes)
    text = json.dumps(as_json(frame), indent=2) if arguments.json else plain(frame)
    print(columns.printable(text, sys.stdout.encoding))
    return 0
