"""Finds the cgroup that a word of a command line means: a path, or a unit of systemd, wherever that is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.process import procfs
from backend.process.cgroups import ids
from backend.process.identity import Slice
from ggroupfs.errors import UsageError
from ggroupfs.text.names import slice_directory
from ggroupfs.units.manager import SLICE, unit_of
from ggroupfs.units.naming import doubt_of_name, doubt_of_path, is_unit, place_of, told

ANSWER_S = 5.0
"""Seconds that systemd has to answer where a unit is."""


def path_meant(mount: Path, word: str) -> str:
    """Return the path of the cgroup that a word means.

    A word with a slash is a path, and any other a unit or a top-level cgroup.

    UsageError for a word for which systemd has no cgroup, unless there is one all the same; RuntimeError for a unit
    that cannot be found.
    """
    parts = [part for part in word.split("/") if part]
    literal, bare = f"/{'/'.join(parts)}", "/" not in word
    doubt = doubt_of_name(word) if bare else doubt_of_path(parts)
    if doubt is not None:
        if not is_there(mount, literal):
            raise UsageError(told(word, doubt))
        return literal
    return _unit(mount, word) if bare and is_unit(word) else literal


def is_there(mount: Path, path: str) -> bool:
    """Whether the tree has a slice of that path, or there is such a cgroup."""
    return (mount / slice_directory(path)).is_dir() or bool(ids(Slice(path)))


def hierarchies() -> Sequence[Path]:
    """Return the hierarchies to which /proc refers: the cgroup2 tree and, on a hybrid host, systemd's own.

    A hierarchy of which only a part is visible, as in a container, is left out.
    """
    found = (procfs.cgroup2(), procfs.cgroup1("name=systemd"))
    return [Path(mount.point) for mount in found if mount is not None and mount.root == "/"]


def _unit(mount: Path, name: str) -> str:
    if name.endswith(SLICE):
        place, literal = place_of(name), f"/{name}"
        # A top-level cgroup of that name which another program than systemd made is what its user means.
        return literal if is_there(mount, literal) and not is_there(mount, place) else place
    cgroups = {path for place in hierarchies() for path in _found(place, name)}
    if len(cgroups) == 1:
        return cgroups.pop()
    if asked := _asked(name):
        return asked
    known = sorted(cgroups or set(_found(mount / "slice", name)))
    if len(known) > 1:
        raise UsageError(f"{name} is {' and '.join(known)}: name one of them")
    if not known:
        raise RuntimeError(f"{name} is not known here: name the path of its cgroup, such as system.slice/{name}")
    return known[0]


def _found(top: Path, name: str) -> Iterator[str]:
    """Yield the paths of cgroups below `top` that belong to the system manager's unit of that name."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        with contextlib.suppress(OSError):  # gone since
            for entry in os.scandir(f"{top}{above}"):
                path = f"{above}/{entry.name}"
                if unit_of(Slice(path)) == name and entry.is_dir(follow_symlinks=False):
                    yield path
                elif entry.name.endswith(SLICE) and entry.is_dir(follow_symlinks=False):
                    waiting.append(path)


def _asked(name: str, address: str = "SYSTEM") -> str:
    """Ask systemd where a unit is, or will be; empty if it does not know, or cannot be asked."""
    try:
        import trio

        from ggroupfs.units.systemd import Systemd  # needs jeepney, which may be missing
    except ImportError:
        return ""

    async def ask() -> str:
        path = ""
        with trio.move_on_after(ANSWER_S):
            connection = await Systemd(address).connect()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(connection.run, lambda news: None)
                with contextlib.suppress(ConnectionError):
                    path = await connection.home(name)
                nursery.cancel_scope.cancel()
        return path

    try:
        return trio.run(ask)
    except OSError:
        return ""
