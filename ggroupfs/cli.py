"""The command ``ggroupfs``: one subcommand per module, errors in one line, and the exit codes of ggroupfs(8)."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ggroupfs import VERSION
from ggroupfs.errors import UsageError

OK, FAILED, USAGE = 0, 1, 2

COMMANDS = {
    "mount": "mount the tree; returns when it answers",
    "umount": "thaw everything and unmount",
    "upgrade": "what is installed now takes over a mounted tree",
    "run": "start a program, with limits from its first allocation on",
    "show": "what each program uses",
    "top": "what each program uses, live",
    "set": "limits of a process or a slice, by name",
    "doctor": "what this machine can enforce, and why; or all that is known of a process",
    "cdi": "devices for container engines: the library, the socket and limits",
    "account": "what each slice has used, and since when",
    "metrics": "what the tree says, for Prometheus",
    "node": "what this node has to give, as engines of many nodes take it",
    "policy": "a policy at work on a tree",
    "balance": "programs go from GPUs that are overloaded to others",
    "replay": "what a policy makes of a trace of jobs, in virtual time",
    "tenant": "a program of the software GPU, to try things on",
    "demo": "mount, start tenants on the software GPU, and walk a live tour",
}
"""Subcommands with their help. The module of that name in `commands` has `add_arguments` and `run`."""


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # mount(8) calls its helper as `PROGRAM SOURCE MOUNTPOINT -o LIST`, and mount.fuse3 runs this command in the same
    # way.
    helper = Path(sys.argv[0]).name.startswith("mount.")
    if helper:
        argv = ["--fake" if word == "-f" else word for word in argv]  # `mount -f`: everything but the mount
    if helper or (len(argv) >= 2 and argv[0] not in COMMANDS and argv[0][0] != "-"):
        argv.insert(0, "mount")
    own, command = argv, []
    if next((word for word in argv if word[0:1] != "-"), "") == "run" and "--" in argv:
        end = argv.index("--")  # the rest is the command line of another program
        own, command = argv[:end], argv[end + 1 :]
    arguments = _parser(own).parse_args(own)
    arguments.command = command
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="ggroupfs: %(message)s")
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # here, where a closed pipe is handled, rather than at the exit of the interpreter
        return code
    except UsageError as error:
        print(f"ggroupfs: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (OSError, RuntimeError, LookupError) as error:
        print(f"ggroupfs: {_words(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


class _Version(argparse.Action):
    """The option that prints the installed version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"ggroupfs {VERSION}")
        parser.exit()


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ggroupfs", description="Control groups for GPUs, as files.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more on standard error")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, words in COMMANDS.items():
        command = commands.add_parser(name, help=words)
        if name in argv:  # importing all of them would take most of the time of a short command
            loaded = importlib.import_module(f"ggroupfs.commands.{name}")
            loaded.add_arguments(command)
            command.set_defaults(run=loaded.run)
    return parser
