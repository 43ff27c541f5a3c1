"""``ggroupfs mount``: serves a tree in the foreground, or starts a daemon and waits until it answers."""

from __future__ import annotations

import argparse
import logging
import logging.handlers
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from backend import choose
from backend.common import interpreter
from ggroupfs.daemon import mount as mounting
from ggroupfs.daemon import options
from ggroupfs.daemon.options import MountOptions
from ggroupfs.errors import UsageError
from ggroupfs.mounts import DEFAULT_MOUNTPOINT

READY = "ready"
SYSLOG = "/dev/log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("-f", "--foreground", action="store_true", help="stay, and print `ready` when it answers")
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", choices=choose.GPUS, default="auto")
    parser.add_argument("--ledger", choices=choose.LEDGERS, default="auto")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="LIST")
    for flag in "nsv":  # from mount(8), as is the next one
        parser.add_argument(f"-{flag}", dest="ignored", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-t", dest="ignored", help=argparse.SUPPRESS)
    parser.add_argument("--fake", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("places", nargs="*", metavar="[SOURCE] MOUNTPOINT")


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if len(arguments.places) > 2:
        raise UsageError("at most a source and a mountpoint")
    place = Path(arguments.places[-1]) if arguments.places else DEFAULT_MOUNTPOINT
    parsed = options.parse(place, arguments.gpu, arguments.ledger, arguments.options)
    if arguments.fake:
        return 0
    if os.geteuid() != 0:
        raise RuntimeError("mount: only root may: it acts on every process of the machine")
    if not os.path.exists("/dev/fuse"):
        raise RuntimeError("mount: there is no /dev/fuse: load the kernel module fuse")
    if place == DEFAULT_MOUNTPOINT and not os.path.lexists(place):
        place.mkdir(mode=0o755)
    if arguments.foreground:
        return _serve(parsed, detach=arguments.background)
    return _start(parsed, arguments)


def _serve(parsed: MountOptions, *, detach: bool) -> int:
    def ready() -> None:
        print(READY, flush=True)
        if detach:
            _leave_terminal()

    try:
        mounting.run(parsed, ready)
    except mounting.MountError as error:
        raise RuntimeError(f"mount: {error}") from None
    return 0


def _start(parsed: MountOptions, arguments: argparse.Namespace) -> int:
    """Start the daemon. Return when it answers; if it fails, print its messages and return its exit code."""
    child = subprocess.Popen(
        [sys.executable, "-m", "ggroupfs", *_again(parsed, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd="/",
        env=interpreter.environment(),
    )
    assert child.stdout is not None
    assert child.stderr is not None
    if child.stdout.readline().strip() == READY:
        return 0
    sys.stderr.write(child.stderr.read())
    return child.wait()


def _again(parsed: MountOptions, arguments: argparse.Namespace) -> Sequence[str]:
    words = ["mount", "-f", "--background", "--gpu", arguments.gpu, "--ledger", arguments.ledger]
    for option in arguments.options:
        words += ["-o", option]
    return [*words, os.path.abspath(parsed.mountpoint)]


def _leave_terminal() -> None:
    """Detach from the terminal, where output is no longer read: messages go to the system log."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    os.close(null)
    if os.path.exists(SYSLOG):
        handler = logging.handlers.SysLogHandler(SYSLOG, logging.handlers.SysLogHandler.LOG_DAEMON)
        handler.setFormatter(logging.Formatter(f"ggroupfs[{os.getpid()}]: %(message)s"))
        logging.getLogger().addHandler(handler)
