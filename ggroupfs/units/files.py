"""The files themselves: those of a unit, and ``slices.d`` for cgroups by their paths and for units by their names."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import attrs

from backend.common.errors import SHORT
from backend.common.regular import read_regular
from backend.process.identity import Slice
from ggroupfs.units.naming import ByName, ByPath, doubt_of_path, section, told
from ggroupfs.units.settings import Mistake, Settings, merge
from ggroupfs.units.unitfile import Assignment, Place, assignments

SECTION = "X-GGroup"
"""Of unit files: systemd ignores what begins with X-."""


@attrs.frozen
class Table:
    """What a ``slices.d`` says."""

    assignments: Sequence[tuple[ByPath | ByName, Assignment]] = ()
    """Sections, each with one thing that is said of the cgroups that it is for; in order."""
    mistakes: Sequence[Mistake] = ()
    """What does not act."""

    def of(self, slice_: Slice) -> Settings:
        """What is asked for a cgroup."""
        settings, _ = merge(one for cgroups, one in self.assignments if cgroups.matches(slice_))
        return settings

    def of_name(self, unit: str) -> Settings:
        """What sections that are names ask for the unit of that name, wherever it is."""
        named = (one for cgroups, one in self.assignments if isinstance(cgroups, ByName) and cgroups.has(unit))
        settings, _ = merge(named)
        return settings


NOTHING = Table()


def of_unit(paths: Iterable[Path]) -> tuple[Settings, Sequence[Mistake]]:
    """What the files of a unit ask for, the fragment first, then the drop-ins in systemd's order. OSError where they
    cannot be read just now, for want of descriptors or memory (:data:`backend.common.errors.SHORT`)."""
    found: list[Assignment] = []
    mistakes: list[Mistake] = []
    for path in paths:
        found += [one for one in _read(path, mistakes) if one.section == SECTION]
    settings, more = merge(found, of_unit=True)
    return settings, [*mistakes, *more]


def of_directory(directory: Path, former: Table = NOTHING) -> Table:
    """What ``*.conf`` in a directory say, in the order of their names; nothing where there is no directory.

    Where it, or one of them for want of descriptors or memory, cannot be read, what the `former` table says counts on:
    a limit is not to go because the file that may still ask for it could not be read.
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
    found: list[tuple[ByPath | ByName, Assignment]] = []
    mistakes: list[Mistake] = []
    for path in paths:
        in_doubt: set[str] = set()
        for one in _read(path, mistakes):
            try:
                cgroups = section(one.section)
            except ValueError as error:
                mistakes.append(Mistake(one.place, one.key, str(error)))
                continue
            found.append((cgroups, one))
            doubt = doubt_of_path(cgroups.pattern) if isinstance(cgroups, ByPath) else None
            if doubt is not None and one.section not in in_doubt:
                in_doubt.add(one.section)
                mistakes.append(Mistake(one.place, "", told(f"[{one.section}]", doubt, brackets=True)))
    _, more = merge(one for _, one in found)
    return Table(found, [*mistakes, *more])


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
