"""``ggroupfs policy``: runs a policy as a program over a mounted tree, until it is ended.

These programs are not the policies of ``ggroupfs replay``. Those are objects that only decide
(:mod:`ggroupfs.policies.face`); these are programs that pull levers, with or without such an object.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType

import trio

from ggroupfs.client import Tree, require_tree
from ggroupfs.client.reading import require_our_pids
from ggroupfs.daemon.watchdog import notify
from ggroupfs.errors import UsageError
from ggroupfs.mounts import DEFAULT_MOUNTPOINT
from ggroupfs.policies.config import Table

log = logging.getLogger(__name__)

PROGRAMS = {
    "balance": "ggroupfs.policies.balance.program:run",
    "cooperative": "ggroupfs.policies.cooperative:run",
    "dynamic": "ggroupfs.policies.dynamic:run",
    "lanes": "ggroupfs.policies.lanes.program:run",
    "slo": "ggroupfs.policies.slo.program:run",
}
"""Policies with a short name, one per line."""

Program = Callable[[Tree, Table], Awaitable[None]]
"""A policy: runs until it is cancelled, then takes back what it set. It calls :meth:`Tree.ready` once it is at work."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", metavar="NAME|MODULE:NAME", help=", ".join([*PROGRAMS, "or one of your own"]))
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="TOML; keys are the policy's own")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    return run_program(arguments.name, arguments.config, arguments.mount)


def run_program(name: str, file: Path | None, mount: Path) -> int:
    """Run a policy, with an empty configuration if there is no file.

    SIGTERM and SIGINT end it; a second signal does not wait for what is being taken back.
    """
    try:
        program = _program(name)
        config = Table.load(file) if file is not None else Table({}, name)
        require_tree(mount)
        require_our_pids(mount, "policy")
        trio.run(_until_signal, program, Tree(mount), config)
    except BaseExceptionGroup as group:
        leaves = list(_leaves(group))
        if not all(isinstance(error, UsageError | OSError | RuntimeError) for error in leaves):
            raise  # a bug in the policy, for which the full traceback is best
        log.debug("%s ended", name, exc_info=group)
        if isinstance(leaves[0], UsageError):
            raise UsageError(f"policy: {leaves[0]}") from None
        raise leaves[0] from None
    except UsageError as error:
        raise UsageError(f"policy: {error}") from None
    return 0


async def _until_signal(program: Program, tree: Tree, config: Table) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel, signals, nursery.cancel_scope)
            await program(tree, config)
            nursery.cancel_scope.cancel()


async def _cancel(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for number in signals:
        log.debug("signal %d: ending", number)
        signal.signal(number, signal.SIG_DFL)
        notify("STOPPING=1")
        scope.cancel()
        return


def _program(name: str) -> Program:
    """Return the program of that name. UsageError if there is none."""
    module, colon, attribute = PROGRAMS.get(name, name).rpartition(":")
    if not (module and colon and attribute):
        known = f"there are {', '.join(PROGRAMS)}, and" if PROGRAMS else "there are"
        raise UsageError(f"there is no policy {name!r}; {known} those of your own as MODULE:NAME or FILE.py:NAME")
    try:
        found = getattr(
            _of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module), attribute
        )
    except (ImportError, AttributeError, OSError) as error:
        raise UsageError(f"{name}: {error}") from None
    if not callable(found):
        raise UsageError(f"{name} is no async function")
    program: Program = found
    return program


def _of_file(file: Path) -> ModuleType:
    """Load a module from its file, since the installed command searches for modules only in its own directory."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and the like look their module up there
    spec.loader.exec_module(module)
    return module


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
