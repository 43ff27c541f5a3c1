"""Names of units and paths of cgroups: which cgroup a word is for, and which words can be for none. Pure.

Words come from sections of ``slices.d`` and from command lines. A path begins with a slash; a name is that of a unit of
the system manager, wherever its cgroup is.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

import attrs

from backend.process.identity import ROOT, ROOT_PATH, Slice, slice_at
from ggroupfs.units.manager import KINDS, SLICE, unit_of

HIERARCHY = ("sys", "fs", "cgroup")
"""Components of the place where cgroups are mounted, usually: no part of their paths."""
HYBRID = ("unified", "systemd")
"""Names of directories in that place which are hierarchies, on a hybrid host: no part of paths, either."""

PATTERN = re.compile(r"[*?[]")
"""Sign that a component of a section is a pattern (fnmatch(3))."""

UNIT_NAME = re.compile(r"[0-9A-Za-z:_.@\\-]{1,255}", re.ASCII)
"""Name that a unit can have (unit_name_is_valid() in src/basic/unit-name.c of systemd)."""
UNIT_PATTERN = re.compile(r"[0-9A-Za-z:_.@\\*?\[\]!-]{1,255}", re.ASCII)
"""Name or pattern of names of units."""

BARE = (".target", ".timer", ".path", ".device", ".automount")
"""Kinds of units that have no cgroup."""
STARTERS = (".timer", ".path")
"""Those of them that start a service of their own name."""
FIRST = "init.scope"
"""Unit of systemd itself, the only one at the root besides slices."""

RESERVED = frozenset(("notify_on_release", "release_agent", "tasks"))
CONTROLLERS = frozenset(
    (
        *("cgroup", "cpu", "cpuacct", "cpuset", "io", "blkio", "memory", "devices", "pids", "bpf-firewall"),
        *("bpf-devices", "bpf-foreign", "bpf-socket-bind", "bpf-restrict-network-interfaces"),
        "bpf-bind-network-interface",
    )
)
"""Words before the dot in the names of files that the kernel may have in a cgroup, or that systemd keeps for itself."""


@attrs.frozen
class Doubt:
    """The reason why a word is likely to be for no cgroup, and what its writer may have meant."""

    why: str
    """In words."""
    meant: str = ""
    """The word in its place; empty where none suggests itself."""


@attrs.frozen
class ByPath:
    """The cgroups of a section that is a path."""

    pattern: tuple[str, ...]
    """Its components, which may be patterns."""

    def matches(self, slice_: Slice) -> bool:
        """Whether the section is for a cgroup."""
        parts = slice_.path.split("/")[1:]
        return len(self.pattern) == len(parts) and all(map(fnmatch.fnmatchcase, parts, self.pattern))


@attrs.frozen
class ByName:
    """The cgroups of a section that is the name of a unit."""

    name: str
    """The name, which may be a pattern."""

    def matches(self, slice_: Slice) -> bool:
        """Whether the section is for a cgroup: a slice is one of systemd's in the place of its name alone."""
        unit = unit_of(slice_)
        return unit is not None and self.has(unit) and (not unit.endswith(SLICE) or slice_.path == _place(unit))

    def has(self, unit: str) -> bool:
        """Whether the section is for the unit of that name."""
        return fnmatch.fnmatchcase(unit, self.name)


def section(header: str) -> ByPath | ByName:
    """The cgroups that a section of ``slices.d`` is for, by what stands in its brackets. ValueError with the reason."""
    if header.startswith("/"):
        slice_ = slice_at(header)
        if slice_ is not None and slice_ != ROOT:
            return ByPath(tuple(slice_.path.split("/")[1:]))
    elif header.endswith(KINDS) and UNIT_PATTERN.fullmatch(header):
        if not PATTERN.search(header) and (doubt := doubt_of_name(header)):
            raise ValueError(told(f"[{header}]", doubt, brackets=True))
        return ByName(header)
    elif doubt := doubt_of_name(header):
        raise ValueError(told(f"[{header}]", doubt, brackets=True))
    if not header:
        raise ValueError("before the first section")
    likely = not header.startswith(("/", "[")) and slice_at(f"/{header}") not in (None, ROOT)
    raise ValueError(f"[{header}] is not the path of a cgroup" + (f": [/{header}]?" if likely else ""))


def path_of(slice_: Slice) -> list[Slice]:
    """A slice and those above it, the highest first, without the root."""
    found: list[Slice] = []
    level: Slice | None = slice_
    while level is not None and level != ROOT:
        found.append(level)
        level = level.parent
    return found[::-1]


def is_unit(name: str) -> bool:
    """Whether a word is spelt as the name of a unit that has a cgroup."""
    return name.endswith(KINDS) and name not in KINDS and UNIT_NAME.fullmatch(name) is not None


def place_of(name: str) -> str:
    """The path of the cgroup that systemd gives a slice of that name (systemd.slice(5)). ValueError for a name that no
    slice has."""
    if name == f"-{SLICE}":
        return ROOT_PATH
    parts = name.removesuffix(SLICE).split("-")
    if not is_unit(name) or not name.endswith(SLICE) or not all(parts) or "@" in name:
        raise ValueError(f"{name} is no name of a slice of systemd")
    return "".join(f"/{escaped('-'.join(parts[:count]) + SLICE)}" for count in range(1, len(parts) + 1))


def _place(name: str) -> str | None:
    try:
        return place_of(name)
    except ValueError:
        return None


def escaped(unit: str) -> str:
    """The name of the cgroup of a unit: with an underscore before what could be a file of the kernel's (cg_escape() in
    src/basic/cgroup-util.c of systemd)."""
    reserved = unit[0] in "_." or unit in RESERVED or unit.partition(".")[0] in CONTROLLERS
    return f"_{unit}" if reserved else unit


def doubt_of_name(name: str) -> Doubt | None:
    """The reason why no cgroup is that of a unit of this name; None where one can be."""
    if name == f"-{SLICE}":
        return Doubt("the root has no limits")
    stem, dot, kind = name.rpartition(".")
    if dot + kind in BARE and stem and "/" not in name:
        return _bare(name)
    if name.endswith(SLICE) and is_unit(name) and _place(name) is None:
        return Doubt("no slice of systemd has such a name")
    if stem.endswith("@") and is_unit(name):
        return Doubt("a template has no cgroup, and its instances have", f"{stem}*{dot}{kind}")
    return None


def _bare(name: str) -> Doubt:
    stem, dot, kind = name.rpartition(".")
    return Doubt(f"systemd makes no cgroup for a {kind}", f"{stem}.service" if dot + kind in STARTERS else "")


def doubt_of_path(pattern: Sequence[str]) -> Doubt | None:
    """The reason why systemd has no cgroup at a path, whose components may be patterns; None where there can be one."""
    if tuple(pattern[: len(HIERARCHY)]) == HIERARCHY:
        rest = pattern[len(HIERARCHY) :]
        rest = rest[1:] if rest and rest[0] in HYBRID else rest
        return Doubt("a path of a cgroup begins at the root of the hierarchy", f"/{'/'.join(rest)}" if rest else "")
    for depth, name in enumerate(pattern):
        parts = name.removesuffix(SLICE).split("-")
        if not name.endswith(SLICE) or PATTERN.search(name) or len(parts) == 1 or not all(parts):
            continue
        above = ["-".join(parts[:count]) + SLICE for count in range(1, len(parts))]  # systemd.slice(5)
        if depth and fnmatch.fnmatchcase(above[-1], pattern[depth - 1]):
            continue
        top = depth  # what is above that, and no slice
        while top and pattern[top - 1].endswith(SLICE):
            top -= 1
        place = "/".join(("", *pattern[:top], *above, *pattern[depth:]))
        return Doubt(f"systemd has {name} in {above[-1]}", place)
    *slices, last = pattern
    if PATTERN.search(last) or not all(part.endswith(SLICE) for part in slices):
        return None
    if last.endswith(BARE) and last not in BARE:
        return _bare(last)
    if not slices and last.endswith((".service", ".scope")) and is_unit(last) and last != FIRST:
        return Doubt(f"systemd has a {last.rpartition('.')[2]} in a slice", last)
    return None


def told(word: str, doubt: Doubt, *, brackets: bool = False) -> str:
    """The sentence that a user is told of a word that is in doubt."""
    meant = f": [{doubt.meant}]?" if brackets else f": {doubt.meant}?"
    return f"{word} is likely to match nothing: {doubt.why}" + (meant if doubt.meant else "")
