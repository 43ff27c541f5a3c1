"""``ggroupfs account``: the total use of each slice, and since when, as a table, CSV or JSON."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.process.identity import ROOT_PATH, Slice
from ggroupfs.client import GONE, Branch, branches, require_tree
from ggroupfs.commands.set import directory_of
from ggroupfs.errors import UsageError
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.text.names import unescape
from ggroupfs.view import columns
from ggroupfs.view.accounts import FIELDS, FORMATS, ORDERS, Account, arranged
from ggroupfs.view.figures import figures_of, files_for

FILES = files_for(FIELDS)
"""Files of a slice that are read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="slices, each with those in it; else all")
    parser.add_argument("--format", choices=tuple(FORMATS), default="text")
    parser.add_argument("--sort", choices=tuple(ORDERS), default="busy", help="the largest first (default: busy)")
    parser.add_argument("--gpu", type=int, default=None, metavar="N", help="the only GPU; else all")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """Run the command. A slice that was named is listed even if it has used nothing."""
    mount = Path(os.path.abspath(arguments.mount))
    require_tree(mount)
    try:
        tops = outermost(top_of(mount, word) for word in arguments.names)
    except (RuntimeError, UsageError) as error:
        raise type(error)(f"account: {error}") from None
    found = [
        account
        for account in accounts(mount, tops)
        if arguments.gpu in (None, account.gpu) and (account.slice in tops or not account.is_idle)
    ]
    text = FORMATS[arguments.format](arranged(found, arguments.sort))
    sys.stdout.write(text if arguments.format != "text" else columns.printable(text, sys.stdout.encoding))
    return 0


def top_of(mount: Path, word: str) -> str:
    """Return the path of the slice that `word` names. RuntimeError if there is none, UsageError for a process."""
    directory, gpu = directory_of(mount, word)
    if gpu is not None:
        raise UsageError(f"{word}: name the slice, and the GPU by --gpu {gpu}")
    kind, *parts = directory.relative_to(mount).parts
    if kind != "slice":
        raise UsageError(f"{word}: accounts are of slices")
    if not directory.is_dir():
        raise RuntimeError(f"{word}: there is no such slice")
    return "/" + "/".join(unescape(part) for part in parts)


def outermost(paths: Iterator[str]) -> Sequence[str]:
    """Return the slices that are in none of the others, without duplicates."""
    found: list[str] = []
    # With a slash at the end of each path, a slice is followed by those in it, and not by one with a similar name.
    for path in sorted(set(paths), key=lambda path: f"{path}/"):
        if not (found and Slice(found[-1]).contains(Slice(path))):
            found.append(path)
    return found


def accounts(mount: Path, tops: Sequence[str]) -> Iterator[Account]:
    """Yield the accounts of slices and those in them; of all slices if none is given.

    A slice that vanishes is left out.
    """
    are_named = bool(tops) and ROOT_PATH not in tops
    for top in tops if are_named else [ROOT_PATH]:
        for branch in branches(mount, top):
            is_outermost = branch.slice == top if are_named else branch.slice.count("/") == 1
            try:
                yield _account(branch, is_outermost)
            except OSError as error:
                if error.errno not in GONE:
                    raise


def _account(branch: Branch, is_outermost: bool) -> Account:
    return Account(branch.slice, branch.gpu, figures_of(branch.path, FILES), is_outermost)
