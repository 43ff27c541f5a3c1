"""Families: a process that asked for limits by its environment and its children, as slices below that of their cgroup.

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
    proven: int | None = attrs.field(default=None, eq=False)
    """User that the daemon knows it to be of, where `uid` is only what the name of a slice says."""

    @property
    def name(self) -> str:
        """The name of its slice."""
        return f"family-{self.uid}-{self.id:016x}"

    @property
    def user(self) -> int:
        """The user for which it counts, and whose processes are in it by their parents."""
        return self.uid if self.proven is None else self.proven

    def allowed(self, above: Slice, books: Books, own: Books, *, shared: bool) -> Mapping[str, int]:
        """The values that its slice is given below `above`, of which the books say `books`, for a process of which they
        say `own`; `shared` is whether something of another user is directly in `above`.

        None of them takes from what is outside of `above`, or from another user in it. What the process had, compared
        with what is beside it, its slice has: no process has a better weight or priority by asking.
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
    """What changes in the books of a family's slice that is there as a process comes into it of which they say `own`:
    a weight below the default, or a priority that is worse, holds for the slice from then on."""
    values = {}
    if own.weight < min(WEIGHT.default, books.weight):
        values[WEIGHT.field] = own.weight
    if own.priority > max(PRIORITY.default, books.priority):
        values[PRIORITY.field] = own.priority
    return values


def carried(family: Family, books: Books, former: Books) -> Mapping[str, int]:
    """What changes in the books of a family's slice that is there as a process comes into it from a slice of the same
    family in another cgroup, `former`: what was made less there than was asked for."""
    values = dict(lowered(books, former))
    for field in (HIGH.field, SWAP_MAX.field, LIMIT_MAX.field):
        if getattr(former, field) < min(getattr(books, field), family.asked.get(field, MAX)):
            values[field] = getattr(former, field)
    return values


def strictest(each: Collection[Books]) -> Books:
    """The least weight and the worst priority that a process has on any GPU; the defaults, where it is on none."""
    return Books(
        weight=min((one.weight for one in each), default=WEIGHT.default),
        priority=max((one.priority for one in each), default=PRIORITY.default),
    )


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
    """The families whose slices end the path of one, in which a process of `cgroup` is, with those slices; no more than
    a process can be in, and without what they asked for.

    Of a cgroup that is called so itself they are none. One that a process has left meanwhile counts as one: then the
    process has that name in its path where it is now, and no more.
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
    """Those of some families, read from the path of a process of a user, that can be: a user may call a cgroup as it
    likes. One of another user but root is none, and so are those above it. One of root that a process of another user
    is in counts for that user, as nothing says that root made it."""
    kept: list[tuple[Slice, Family]] = []
    for slice_, family in reversed(found):
        if family.uid not in (0, uid):
            break
        kept.append((slice_, attrs.evolve(family, proven=uid)))
    return kept[::-1]


FIELDS = frozenset(setting.field for setting in SETTINGS if not setting.slices_only)
"""Fields of the settings that go along with a family to another cgroup: what was asked for, and what was set later."""


def said_by(books: Books) -> Mapping[str, int]:
    """The values that a family has, as far as the books of its slice say so."""
    new = Books()
    return {name: int(getattr(books, name)) for name in FIELDS if getattr(books, name) != getattr(new, name)}
