"""Matches names of units and paths of cgroups against cgroups, and finds those that can match none. Pure.

The words come from sections of ``slices.d`` and from command lines. A path begins with a slash; a name is that of a
unit of the system manager, wherever its cgroup is.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

import attrs

from backend.process.identity import ROOT, ROOT_PATH, Slice, slice_at
from ggroupfs.units.manager import KINDS, SLICE, unit_of

HIERARCHY = ("sys", "fs", "cgroup")
"""Path components of the usual mountpoint of cgroups, which are not part of a cgroup's path."""
HYBRID = ("unified", "systemd")
"""Names of hierarchies below that mountpoint on a hybrid host, which are not part of a cgroup's path either."""

PATTERN = re.compile(r"[*?[]")
"""Mark of a pattern in a component of a section (fnmatch(3))."""

UNIT_NAME = re.compile(r"[0-9A-Za-z:_.@\\-]{1,255}", re.ASCII)
"""Valid name of a unit (unit_name_is_valid() in src/basic/unit-name.c of systemd)."""
UNIT_PATTERN = re.compile(r"[0-9A-Za-z:_.@\\*?\[\]!-]{1,255}", re.ASCII)
"""Name of a unit, or pattern of such names."""

BARE = (".target", ".timer", ".path", ".device", ".automount")
"""Kinds of units that have no cgroup."""
STARTERS = (".timer", ".path")
"""Kinds of those that start a service of the same name."""
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
"""Words before the dot in names of files that the kernel may have in a cgroup, or that systemd reserves."""


@attrs.frozen
class Doubt:
    """A reason why a word probably matches no cgroup, and the word that its author may have meant."""

    why: str
    """Reason, in words."""
    meant: str = ""
    """Suggested replacement; empty if there is none."""


@attrs.frozen
class ByPath:
    """The cgroups of a section with a path as its header."""

    pattern: tuple[str, ...]
    """Components of the path, which may be patterns."""

    def matches(self, slice_: Slice) -> bool:
        """Whether the section applies to a cgroup."""
        parts = slice_.path.split("/")[1:]
        return len(self.pattern) == len(parts) and all(map(fnmatch.fnmatchcase, parts, self.pattern))


@attrs.frozen
class ByName:
    """The cgroups of a section with the name of a unit as its header."""

    name: str
    """Name of the unit, which may be a pattern."""

    def matches(self, slice_: Slice) -> bool:
        """Whether the section applies to a cgroup. A slice is the unit only in the place that its name implies."""
        unit = unit_of(slice_)
        return unit is not None and self.has(unit) and (not unit.endswith(SLICE) or slice_.path == _place(unit))

    def has(self, unit: str) -> bool:
        """Whether the section applies to the unit of that name."""
        return fnmatch.fnmatchcase(unit, self.name)


def section(header: str) -> ByPath | ByName:
    """Return the cgroups to which a section of ``slices.d`` applies, by its header. ValueError with the reason."""
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
    """Return a slice and those above it, topmost first, without the root."""
    found: list[Slice] = []
    level: Slice | None = slice_
    while level is not None and level != ROOT:
        found.append(level)
        level = level.parent
    return found[::-1]


def is_unit(name: str) -> bool:
    """Whether a word is a valid name of a unit that has a cgroup."""
    return name.endswith(KINDS) and name not in KINDS and UNIT_NAME.fullmatch(name) is not None


def place_of(name: str) -> str:
    """Return the path of the cgroup that systemd gives a slice (systemd.slice(5)).

    ValueError for an invalid slice name.
    """
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
    """Return the name of a unit's cgroup: an underscore precedes what could be a file of the kernel.

    See cg_escape() in src/basic/cgroup-util.c of systemd.
    """
    reserved = unit[0] in "_." or unit in RESERVED or unit.partition(".")[0] in CONTROLLERS
    return f"_{unit}" if reserved else unit


def doubt_of_name(name: str) -> Doubt | None:
    """Return why no cgroup can belong to a unit of this name; None if one can."""
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
    """Return why systemd has no cgroup at a path, which may contain patterns; None if it may have one."""
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
        top = depth  # the number of leading components up to the last one that is not a slice
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
    """Return the sentence that tells a user why a word is in doubt."""
    meant = f": [{doubt.meant}]?" if brackets else f": {doubt.meant}?"
    return f"{word} is likely to match nothing: {doubt.why}" + (meant if doubt.meant else "")
