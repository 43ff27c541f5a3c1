"""Families: the processes that share limits asked for through their environment, as slices below that of their cgroup.

Pure. docs/decisions/0022-families.md says what they are; :mod:`backend.core.population` makes their slices, and
:mod:`backend.core.membership` says which process is in which.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import attrs

from backend.core.records import Books
from backend.core.settings import HIGH, LIMIT_MAX, LOW, MAX, PRIORITY, SETTINGS, SWAP_MAX, WEIGHT
from backend.process.identity import ROOT, ROOT_PATH, Slice

FAMILIES_MOST = 8
"""Most families that a process can be in, each in the one before."""

ID_MOST = (1 << 64) - 1
"""Largest number of a family. No family has the number 0."""

NAME = re.compile(r"family-(?P<uid>[0-9]{1,10})-(?P<id>[0-9a-f]{16})")
"""Name of a family's slice."""


@attrs.frozen
class Family:
    """A family, as a process named it."""

    id: int
    """Random number that identifies it to its processes."""
    uid: int
    """User of the process that asked for it."""
    asked: Mapping[str, int] = attrs.field(factory=dict, eq=False)
    """Values that the process asked for, by the field of their setting."""
    proven: int | None = attrs.field(default=None, eq=False)
    """User that the daemon knows the family to be of, where `uid` is only what the name of a slice says; else None."""

    @property
    def name(self) -> str:
        """The name of its slice."""
        return f"family-{self.uid}-{self.id:016x}"

    @property
    def user(self) -> int:
        """The user that it counts for: the owner of the processes that are in it by their parents."""
        return self.uid if self.proven is None else self.proven

    def allowed(self, above: Slice, books: Books, own: Books, *, shared: bool) -> Mapping[str, int]:
        """Return the values, by field, that the family's slice is given below `above`.

        `books` are those of `above`, `own` those of the process that enters; `shared` says whether a process or slice
        of another user is directly in `above`.

        No value takes anything from outside `above`, or from another user in it. The slice has the weight and priority
        that its process had among the neighbours: no process improves either by asking.
        """
        values = dict(self.asked)
        if LOW.field in values:
            values[LOW.field] = min(values[LOW.field], 0 if above == ROOT or shared else books.low)
        weight = min(values.get(WEIGHT.field, WEIGHT.default), WEIGHT.default, own.weight)
        if WEIGHT.field in values or weight != WEIGHT.default:
            values[WEIGHT.field] = weight
        priority = max(values.get(PRIORITY.field, PRIORITY.default), PRIORITY.default, own.priority)
        if PRIORITY.field in values or priority != PRIORITY.default:
            values[PRIORITY.field] = priority
        return values


def lowered(books: Books, own: Books) -> Mapping[str, int]:
    """Return what to change in the books of an existing family's slice as a process with the books `own` enters it: a
    weight below the default, or a priority worse than the default, holds for the whole slice from then on."""
    values = {}
    if own.weight < min(WEIGHT.default, books.weight):
        values[WEIGHT.field] = own.weight
    if own.priority > max(PRIORITY.default, books.priority):
        values[PRIORITY.field] = own.priority
    return values


def carried(family: Family, books: Books, former: Books) -> Mapping[str, int]:
    """Return what to change in the books of an existing family's slice as a process enters it from `former`, the slice
    of the same family in another cgroup: limits that were lowered there below what was asked for go along."""
    values = dict(lowered(books, former))
    for field in (HIGH.field, SWAP_MAX.field, LIMIT_MAX.field):
        if getattr(former, field) < min(getattr(books, field), family.asked.get(field, MAX)):
            values[field] = getattr(former, field)
    return values


def strictest(each: Collection[Books]) -> Books:
    """Return the least weight and the worst priority that a process has on any GPU; the defaults where it is on
    none."""
    return Books(
        weight=min((one.weight for one in each), default=WEIGHT.default),
        priority=max((one.priority for one in each), default=PRIORITY.default),
    )


Families = Sequence[Family]
"""The families that a process is in, each in the one before."""


def joined(present: Families, asked: Families) -> Families:
    """Return the families of a process that is in `present`, by its parents or its earlier messages, and asks for
    `asked`.

    New families are below the present ones, since nothing leads out of a family. Those beyond `FAMILIES_MOST` are left
    out.
    """
    known = {family.id for family in present}
    return (*present, *(family for family in asked if family.id not in known))[:FAMILIES_MOST]


def below(slice_: Slice, families: Families) -> Slice:
    """Return the slice of the last of some families, below the slice of a cgroup."""
    return Slice("/".join((slice_.path.rstrip("/"), *(family.name for family in families))) or ROOT_PATH)


def parsed(slice_: Slice, cgroup: Slice) -> Sequence[tuple[Slice, Family]]:
    """Return the families that the last parts of a slice's path name, with their slices, for a process in `cgroup`: at
    most as many as a process can be in, and without what they asked for.

    A cgroup that bears such a name itself is no family. One that the process has left meanwhile counts as one: then its
    path has that name now, which does no further harm.
    """
    found: list[tuple[Slice, Family]] = []
    level: Slice | None = slice_
    while (
        level is not None
        and level != cgroup
        and len(found) < FAMILIES_MOST
        and (match := NAME.fullmatch(level.path.rpartition("/")[2]))
        and int(match["id"], 16) > 0
    ):
        found.append((level, Family(int(match["id"], 16), int(match["uid"]))))
        level = level.parent
    return found[::-1]


def believed(found: Sequence[tuple[Slice, Family]], uid: int) -> Sequence[tuple[Slice, Family]]:
    """Return those of some families, read from the path of a process of a user, that can be true: a user may give a
    cgroup any name. A family of another user but root is left out, with those above it. A family of root that a process
    of another user is in counts for that user, as nothing says that root made it."""
    kept: list[tuple[Slice, Family]] = []
    for slice_, family in reversed(found):
        if family.uid not in (0, uid):
            break
        kept.append((slice_, attrs.evolve(family, proven=uid)))
    return kept[::-1]


FIELDS = frozenset(setting.field for setting in SETTINGS if not setting.slices_only)
"""Fields of the settings that go along with a family to another cgroup, whether they were asked for or set later."""


def said_by(books: Books) -> Mapping[str, int]:
    """Return the values of a family, by field, that the books of its slice tell: those that differ from the default."""
    new = Books()
    return {name: int(getattr(books, name)) for name in FIELDS if getattr(books, name) != getattr(new, name)}
