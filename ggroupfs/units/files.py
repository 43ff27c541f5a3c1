"""The files themselves: those of a unit, and ``slices.d`` for cgroups that are no units."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from backend.common.errors import SHORT
from backend.common.regular import read_regular
from backend.process.identity import ROOT, Slice, slice_at
from ggroupfs.units.settings import Mistake, Settings, merge
from ggroupfs.units.unitfile import Assignment, Place, assignments

SECTION = "X-GGroup"
"""Of unit files: systemd ignores what begins with X-."""

PATTERN = re.compile(r"[*?[]")

SLICES_D = Path("/etc/ggroupfs/slices.d")


@attrs.frozen
class Table:
    """What a ``slices.d`` says."""

    assignments: Sequence[tuple[tuple[str, ...], Assignment]] = ()
    """The components of a path, which may be patterns, and what is said of the cgroups that they match; in order."""
    mistakes: Sequence[Mistake] = ()
    """What does not act."""

    def of(self, slice_: Slice) -> Settings:
        """What is asked for a cgroup."""
        parts = slice_.path.split("/")[1:]
        settings, _ = merge(one for pattern, one in self.assignments if _matches(pattern, parts))
        return settings


NOTHING = Table()


def of_unit(paths: Iterable[Path]) -> tuple[Settings, Sequence[Mistake]]:
    """What the files of a unit ask for, the fragment first, then the drop-ins in systemd's order. OSError where they
    cannot be read just now, for want of descriptors or memory (:data:`backend.common.errors.SHORT`)."""
    found: list[Assignment] = []
    mistakes: list[Mistake] = []
    for path in paths:
        found += [one for one in _read(path, mistakes) if one.section == SECTION]
    settings, more = merge(found)
    return settings, [*mistakes, *more]


def of_directory(directory: Path, former: Table = NOTHING) -> Table:
    """What ``*.conf`` in a directory say, in the order of their names; nothing where there is no directory.

    Where it, or one of them for want of descriptors or memory, cannot be read, what the `former` table says counts on:
    a limit is not to go because nobody could look whether it is still asked for.
    """
    try:
        return _of_files(_listed(directory))
    except OSError as error:
        place = Place(Path(error.filename or directory), 0)
        return Table(former.assignments, [Mistake(place, "", f"{error.strerror}: as it was before")])


def _listed(directory: Path) -> Sequence[Path]:
    """The files of a directory that count. OSError."""
    try:
        return [directory / name for name in sorted(os.listdir(directory)) if name.endswith(".conf")]
    except (FileNotFoundError, NotADirectoryError):
        return ()


def _of_files(paths: Iterable[Path]) -> Table:
    found: list[tuple[tuple[str, ...], Assignment]] = []
    mistakes: list[Mistake] = []
    for path in paths:
        told: set[str] = set()
        for one in _read(path, mistakes):
            slice_ = slice_at(one.section) if one.section.startswith("/") else None
            if slice_ is None or slice_ == ROOT:
                where = f"[{one.section}] is not the path of a cgroup" if one.section else "before the first section"
                mistakes.append(Mistake(one.place, one.key, where))
            else:
                pattern = tuple(slice_.path.split("/")[1:])
                found.append((pattern, one))
                if (meant := _meant(pattern)) and one.section not in told:
                    told.add(one.section)
                    mistakes.append(Mistake(one.place, "", f"[{one.section}] is likely to match nothing: {meant}"))
    _, more = merge(one for _, one in found)
    return Table(found, [*mistakes, *more])


HIERARCHY = ("sys", "fs", "cgroup")
"""Where cgroups are mounted, usually: no part of their paths."""


def _meant(pattern: Sequence[str]) -> str:
    """Of a section that matches no cgroup of systemd's, what its author is likely to have meant; empty for another."""
    if tuple(pattern[: len(HIERARCHY)]) == HIERARCHY:
        return f"a path of a cgroup begins at the root of the hierarchy: [/{'/'.join(pattern[len(HIERARCHY) :])}]?"
    for depth, name in enumerate(pattern):
        parts = name.removesuffix(".slice").split("-")
        if not name.endswith(".slice") or PATTERN.search(name) or len(parts) == 1 or not all(parts):
            continue
        above = ["-".join(parts[:count]) + ".slice" for count in range(1, len(parts))]  # systemd.slice(5)
        if depth and fnmatch.fnmatchcase(above[-1], pattern[depth - 1]):
            continue
        top = depth  # what is above that, and no slice
        while top and pattern[top - 1].endswith(".slice"):
            top -= 1
        place = "/".join(("", *pattern[:top], *above, *pattern[depth:]))
        return f"systemd has {name} in {above[-1]}: [{place}]?"
    return ""


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    return len(pattern) == len(parts) and all(map(fnmatch.fnmatchcase, parts, pattern))


def _read(path: Path, mistakes: list[Mistake]) -> Iterator[Assignment]:
    """The assignments of a file; one that cannot be read is a mistake. OSError for want of descriptors or memory."""
    try:
        text = read_regular(path).decode("utf-8", "backslashreplace")
    except OSError as error:
        if error.errno in SHORT:
            raise
        mistakes.append(Mistake(Place(path, 0), "", error.strerror or str(error)))
        return
    yield from assignments(text, path)
