"""Families: a process that asked for limits by its environment and its children, as slices below that of their cgroup.

Pure. docs/design.md, "Families", says what they are; :mod:`backend.core.population` makes their slices, and
:mod:`backend.core.membership` says which process is in which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import attrs

from backend.core.records import Books
from backend.core.settings import BY_ENVIRONMENT, LOW, PRIORITY, WEIGHT
from backend.process.identity import ROOT, ROOT_PATH, Slice

FAMILIES_MOST = 8
"""Families that a process is in at most, each in the one before."""

ID_MOST = (1 << 64) - 1
"""Largest number of a family; 0 is none."""

NAME = re.compile(r"family-(?P<uid>[0-9]{1,10})-(?P<id>[0-9a-f]{16})")
"""Name of the slice of a family."""


@attrs.frozen
class Family:
    """One family, as a process named it."""

    id: int
    """Random number by which its processes know it."""
    uid: int
    """User of the process that asked."""
    asked: Mapping[str, int] = attrs.field(factory=dict, eq=False)
    """Values that it asked for, by the field of their setting."""

    @property
    def name(self) -> str:
        """The name of its slice."""
        return f"family-{self.uid}-{self.id:016x}"

    def allowed(self, above: Slice, books: Books) -> Mapping[str, int]:
        """The values that its slice is given below `above`, of which the books say `books`: none of them takes from a
        neighbour what a process that asks for nothing would leave it."""
        values = dict(self.asked)
        if LOW.field in values:
            values[LOW.field] = min(values[LOW.field], 0 if above == ROOT else books.low)
        if WEIGHT.field in values:
            values[WEIGHT.field] = min(values[WEIGHT.field], WEIGHT.default)
        if PRIORITY.field in values:
            values[PRIORITY.field] = max(values[PRIORITY.field], PRIORITY.default)
        return values


Families = Sequence[Family]
"""Families that a process is in, each in the one before."""


def joined(present: Families, asked: Families) -> Families:
    """The families of a process that is in `present`, by its parents or by what it said before, and asks for `asked`.
    Nothing leads out of a family: what is new is below what there is. Those over `FAMILIES_MOST` are left out."""
    known = {family.id for family in present}
    return (*present, *(family for family in asked if family.id not in known))[:FAMILIES_MOST]


def below(slice_: Slice, families: Families) -> Slice:
    """The slice of the last of some families, below that of a cgroup."""
    return Slice("/".join((slice_.path.rstrip("/"), *(family.name for family in families))) or ROOT_PATH)


def parsed(slice_: Slice, cgroup: Slice) -> Sequence[tuple[Slice, Family]]:
    """The families whose slices end the path of one, in which a process of `cgroup` is; without what they asked for.

    Of a cgroup that is called so itself they are none. One that a process has left meanwhile counts as one: then the
    process has that name in its path where it is now, and no more.
    """
    found: list[tuple[Slice, Family]] = []
    level: Slice | None = slice_
    while level is not None and level != cgroup and (match := NAME.fullmatch(level.path.rpartition("/")[2])):
        found.append((level, Family(int(match["id"], 16), int(match["uid"]))))
        level = level.parent
    return found[::-1]


FIELDS = frozenset(setting.field for setting in BY_ENVIRONMENT.values())
"""Fields of the settings that a family can have asked for."""


def said_by(books: Books) -> Mapping[str, int]:
    """The values that a family asked for, as far as its books say so after the daemon that it asked."""
    new = Books()
    return {name: int(getattr(books, name)) for name in FIELDS if getattr(books, name) != getattr(new, name)}
