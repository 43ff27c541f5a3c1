"""The names that the command line knows, read from the code, for tests of other lists of them."""

from __future__ import annotations

import argparse
import ast
import inspect

from ggroupfs import cli
from ggroupfs.daemon import options


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each subcommand."""
    (action,) = (a for a in cli._parser(tuple(cli.COMMANDS))._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def flags(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser, without the hidden ones."""
    return {flag for a in parser._actions if a.help != argparse.SUPPRESS for flag in a.option_strings}


def mount_options() -> set[str]:
    """Return the names that `mount -o` knows: those that ggroupfs.daemon.options compares a key with."""
    compared = (node for node in ast.walk(ast.parse(inspect.getsource(options))) if isinstance(node, ast.Compare))
    named = {
        node.comparators[0].value
        for node in compared
        if isinstance(node.left, ast.Name) and node.left.id == "key" and isinstance(node.comparators[0], ast.Constant)
    }
    assert {"gpu", "nopoll", "soft.gmem"} <= named, "options.py is written another way: this has to be, too"
    ours = {name.removeprefix("no") for name in named if name.startswith("no")} & options.IGNORED
    return {str(name) for name in named} | ours | options.PASSED
