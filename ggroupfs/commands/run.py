"""``ggroupfs run``: becomes a program that is in the tree, with its limits, before it does anything.

The process makes its own directory, writes its limits there, and then executes the program, so pid, exit code and
signals are the program's own. Limits in its environment (`GGROUP_GMEM_HIGH` and the like) apply to it and its children
together, and need no privileges. On NVIDIA GPUs a library is preloaded (LD_PRELOAD) that moves the program's memory.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import attrs

from backend.core.records import MAX
from backend.door.client import facts_of
from backend.door.environment import Refused, families, is_lenient, refusal
from backend.door.limiting import limit_self
from ggroupfs.commands import scope
from ggroupfs.errors import UsageError
from ggroupfs.installed import CUDA_LIBRARY, TOP
from ggroupfs.mounts import DEFAULT_MOUNTPOINT, cgroup2
from ggroupfs.serving import require_trusted
from ggroupfs.text.properties import BY_NAME, text_of

PLACES = (CUDA_LIBRARY, TOP / "build" / "cuda" / CUDA_LIBRARY.name)
"""Possible places of the library: next to the package, or in a checkout where it was built."""


@attrs.frozen
class Setting:
    """A `-p KEY=VALUE`."""

    name: str
    """Name of a property or a control file."""
    value: str
    """Value as given."""

    def __str__(self) -> str:
        return f"-p {self.name}={self.value}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = "ggroupfs run [--mount M] [-p KEY=VALUE ...] [--slice NAME] [--gpu N] -- COMMAND..."
    parser.add_argument("--mount", type=Path, default=DEFAULT_MOUNTPOINT)
    parser.add_argument("-p", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="GMemHigh=8G")
    parser.add_argument("--slice", default=None, metavar="NAME", help="slice or cgroup to move to first")
    parser.add_argument("--gpu", type=int, default=None, metavar="N", help="the only GPU that -p is for")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; it returns only with an error."""
    command: list[str] = arguments.command
    if not command:
        raise UsageError("run: `-- COMMAND` is missing")
    settings = [_setting(word) for word in arguments.settings]
    mount = Path(os.path.abspath(arguments.mount))
    require_trusted(mount)
    facts = _facts(mount, bool(settings))
    environment = dict(os.environ)
    if facts.get("gpu") == "nvidia":
        if "socket" not in facts:
            raise RuntimeError(f"run: {mount} has no socket")
        environment["LD_PRELOAD"] = ":".join(filter(None, (os.fspath(library()), environment.get("LD_PRELOAD"))))
        environment["GGROUP_SOCKET"] = facts["socket"]
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if arguments.slice is not None and scope.is_for(arguments.slice):
        scope.enter(arguments.slice, command)
    elif arguments.slice is not None:
        enter(arguments.slice)
    if settings:  # first, since the family takes over what the process has by then
        apply(mount, settings, arguments.gpu)
    limit(facts.get("socket"), environment)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec(2) would keep that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, command, environment)
    except OSError as error:
        raise OSError(error.errno, error.strerror, program) from None


def _facts(mount: Path, needs_tree: bool) -> Mapping[str, str]:
    """Return the facts of a tree, or without a tree those that follow from GGROUP_SOCKET.

    A container may have been given just the socket.

    FileNotFoundError if there is neither.
    """
    try:
        return facts_of(mount)
    except FileNotFoundError:
        named = os.environ.get("GGROUP_SOCKET")
        if needs_tree or not named:
            raise
    return {"socket": named, **({"gpu": "nvidia"} if any(place.is_file() for place in _places()) else {})}


def _setting(word: str) -> Setting:
    name, equals, value = word.partition("=")
    if not (name and equals and (value or name in BY_NAME)) or "/" in name:
        raise UsageError(f"run: -p {word}: not KEY=VALUE")
    try:
        text_of(name, value, MAX)
    except ValueError as error:
        raise UsageError(f"run: -p {word}: {error}") from None
    return Setting(name, value)


def library() -> Path:
    """Return the library to preload into CUDA programs; GGROUP_CUDA_LIBRARY names another."""
    places = _places()
    for place in places:
        if place.is_file():
            return place.resolve()
    raise RuntimeError(f"run: there is no {places[-1]}: `make -C backend/cuda/library` builds it")


def _places() -> Sequence[Path]:
    """Return the places where the library may be."""
    named = os.environ.get("GGROUP_CUDA_LIBRARY")
    return (Path(named),) if named else PLACES


def apply(mount: Path, settings: list[Setting], gpu: int | None) -> None:
    """Make a directory in the tree for this very process, and write the settings there. OSError."""
    # Use the daemon's pid of this process: in another pid namespace our own means another process there.
    try:
        own = mount / os.readlink(mount / "self")
        own.mkdir()
    except FileExistsError:
        pass
    except PermissionError:
        raise RuntimeError(f"run: no right to make a directory in {mount}") from None
    except FileNotFoundError:
        raise RuntimeError(
            f"run: the daemon of {mount} does not see this process: it is in another pid namespace, not below its own"
        ) from None
    gpus = sorted(int(name) for name in os.listdir(own)) if gpu is None else [gpu]
    for number in gpus:
        group = own / str(number)
        if not group.is_dir():
            raise RuntimeError(f"run: there is no GPU {number}")
        capacity = int((mount / "gpus" / str(number) / "gmem.capacity").read_text())
        for setting in settings:
            control, text = text_of(setting.name, setting.value, capacity)
            path = group / control
            try:
                path.write_text(f"{text}\n")
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EACCES) and not path.exists():
                    raise UsageError(f"run: -p {setting.name}: there is no such control") from None
                raise RuntimeError(f"run: {setting}: {error.strerror}") from None


def limit(path: str | None, environment: MutableMapping[str, str]) -> None:
    """Put this very process into the families that an environment asks for, and note them there for its children.

    RuntimeError for a value that is invalid or refused; with `GGROUP_LENIENT` only a message.
    """
    levels, complaints = families(environment)
    try:
        if levels and path is None:
            complaints = [*complaints, "this tree has no socket to ask for limits at"]
        elif levels and path is not None and not limit_self(path, levels):
            complaints = [*complaints, "the daemon is of an earlier version: no program limits itself"]
    except OSError as error:
        if not is_lenient(environment):
            raise Refused(f"run: {refusal(levels, error)}") from None
        complaints = [*complaints, refusal(levels, error)]
    for complaint in complaints:
        print(f"ggroupfs: run: {complaint}: ignored", file=sys.stderr)


def enter(name: str) -> None:
    """Move this process into a cgroup, which is made if missing. RuntimeError."""
    parts = [part for part in name.split("/") if part]
    if not parts or any(part in (".", "..") for part in parts):
        raise UsageError(f"run: --slice {name}: no name of a cgroup")
    top = cgroup2()
    if top is None:
        raise RuntimeError("run: --slice: this machine has no cgroup2 tree")
    place = top.joinpath(*parts)
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / "cgroup.procs").write_text(f"{os.getpid()}\n")
    except OSError as error:
        raise RuntimeError(f"run: --slice {name}: {place}: {error.strerror}") from None
