"""Reads the files of a unit, and those of ``slices.d``, which name cgroups by path and units by name."""

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
"""Section of unit files; systemd ignores sections that begin with X-."""


@attrs.frozen
class Table:
    """The contents of a ``slices.d``."""

    assignments: Sequence[tuple[ByPath | ByName, Assignment]] = ()
    """Sections with one assignment each, and the cgroups that they apply to; in order."""
    mistakes: Sequence[Mistake] = ()
    """Entries that have no effect."""

    def of(self, slice_: Slice) -> Settings:
        """Return the settings of a cgroup."""
        settings, _ = merge(one for cgroups, one in self.assignments if cgroups.matches(slice_))
        return settings

    def of_name(self, unit: str) -> Settings:
        """Return the settings that sections with names give the unit of this name, wherever it is."""
        named = (one for cgroups, one in self.assignments if isinstance(cgroups, ByName) and cgroups.has(unit))
        settings, _ = merge(named)
        return settings


NOTHING = Table()


def of_unit(paths: Iterable[Path]) -> tuple[Settings, Sequence[Mistake]]:
    """Return the settings from the files of a unit: first the fragment, then the drop-ins in systemd's order.

    OSError if a file cannot be read at the moment, for lack of descriptors or memory
    (:data:`backend.common.errors.SHORT`).
    """
    found: list[Assignment] = []
    mistakes: list[Mistake] = []
    for path in paths:
        found += [one for one in _read(path, mistakes) if one.section == SECTION]
    settings, more = merge(found, of_unit=True)
    return settings, [*mistakes, *more]


def of_directory(directory: Path, former: Table = NOTHING) -> Table:
    """Return the settings from ``*.conf`` in a directory, in order of their names; none if there is no directory.

    If the directory cannot be read, or a file for lack of descriptors or memory, the `former` table remains in force: a
    limit must not vanish because the file that may still contain it could not be read.
    """
    try:
        return _of_files(_listed(directory))
    except OSError as error:
        place = Place(Path(error.filename or directory), 0)
        return Table(former.assignments, [Mistake(place, "", f"{error.strerror}: as it was before")])


def _listed(directory: Path) -> Sequence[Path]:
    """Return the files of a directory that count. OSError."""
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
    """Yield the assignments of a file; an unreadable file is a mistake. OSError for lack of descriptors or memory."""
    try:
        text = read_regular(path).decode("utf-8", "backslashreplace")
    except OSError as error:
        if error.errno in SHORT:
            raise
        mistakes.append(Mistake(Place(path, 0), "", error.strerror or str(error)))
        return
    yield from assignments(text, path)
