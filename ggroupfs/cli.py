"""The command ``ggroupfs``: one subcommand a module, one line for an error, the exit codes of ggroupfs(8)."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from backend import choose
from ggroupfs import daemon, demo, doctor, show, tenant, umount
from ggroupfs.options import DEFAULT_MOUNTPOINT, UsageError

OK, FAILED, USAGE = 0, 1, 2

COMMANDS = ("mount", "umount", "show", "doctor", "tenant", "demo")


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    # mount(8) calls its helper `PROGRAM SOURCE MOUNTPOINT -o LIST`, mount.fuse3 runs us just so.
    if Path(sys.argv[0]).name.startswith("mount.") or (
        len(argv) >= 2 and argv[0] not in COMMANDS and argv[0][0] != "-"
    ):
        argv.insert(0, "mount")
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, format="ggroupfs: %(message)s")
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # here, where a reader that left is expected, and not when the interpreter ends
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ggroupfs", description="Control groups for GPUs, as files.")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more on standard error")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    mount = commands.add_parser("mount", help="mount the tree; returns when it answers")
    mount.add_argument("-f", "--foreground", action="store_true", help="stay, and print `ready` when it answers")
    mount.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    mount.add_argument("--gpu", choices=choose.GPUS, default="auto")
    mount.add_argument("--ledger", choices=choose.LEDGERS, default="auto")
    mount.add_argument("-o", dest="options", action="append", default=[], metavar="LIST")
    mount.add_argument("-n", "-s", dest="ignored", action="store_true", help=argparse.SUPPRESS)  # from mount(8)
    mount.add_argument("places", nargs="*", metavar="[SOURCE] MOUNTPOINT")
    mount.set_defaults(run=daemon.mount)

    command = commands.add_parser("umount", help="thaw everything and unmount")
    command.add_argument("mountpoint", nargs="?", type=Path, default=DEFAULT_MOUNTPOINT)
    command.set_defaults(run=umount.run)

    command = commands.add_parser("show", help="who uses what")
    command.add_argument("--json", action="store_true")
    command.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)
    command.set_defaults(run=show.run)

    command = commands.add_parser("doctor", help="what this machine can enforce, and why")
    command.add_argument("--json", action="store_true")
    command.set_defaults(run=doctor.run)

    tenant.add_parser(commands)
    demo.add_parser(commands)
    return parser
