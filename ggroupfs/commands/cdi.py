"""``ggroupfs cdi generate``: describes the devices ``ggroup.io/gpu=N`` and ``=all`` for container engines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from backend.door.client import facts_of
from ggroupfs.client.reading import content, numbers, require_tree
from ggroupfs.commands.run import library
from ggroupfs.containers.cdi import Gpu, Host, nodes_of, spec
from ggroupfs.installed import CONTAINER_HOOK
from ggroupfs.mounts import DEFAULT_MOUNTPOINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("action", choices=("generate",), help="write the devices of a mounted tree")
    parser.add_argument("--output", type=Path, default=None, metavar="FILE", help="else on standard output")
    parser.add_argument("--hook", type=Path, default=CONTAINER_HOOK, metavar="PROGRAM", help="the hook, elsewhere")
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    mount = Path(os.path.abspath(arguments.mount))
    require_tree(mount)
    try:
        text = json.dumps(spec(host_of(mount, Path(os.path.abspath(arguments.hook)))), indent=2) + "\n"
    except (LookupError, ValueError) as error:
        raise RuntimeError(f"cdi: {error.args[0]}") from None
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        replace(arguments.output, text)
    return 0


def host_of(mount: Path, hook: Path) -> Host:
    """Return the parts of this machine that a container with the GPUs of a tree needs.

    RuntimeError, LookupError, OSError.
    """
    facts = facts_of(mount)
    if "socket" not in facts:
        raise LookupError(f"{mount} has no socket")
    if not os.access(hook, os.X_OK):
        raise LookupError(f"{hook}: no such program: install ggroupfs-container, or name it by --hook")
    is_nvidia = facts.get("gpu") == "nvidia"
    gpus = [
        Gpu(number, nodes_of(content(mount / "gpus" / str(number) / "uuid")) if is_nvidia else ())
        for number in sorted(numbers(mount / "gpus"))
    ]
    return Host(Path(facts["socket"]), library(), hook, mount, gpus)


def replace(path: Path, text: str) -> None:
    """Replace the content of a file atomically, as an engine may read it at any moment. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
