"""The slices of families in a tree: promised to processes that asked, made as these come, given their values.

:mod:`backend.core.families` says what a family is and may have. Its places are counted apart from those of other slices
(:class:`backend.core.bounds.Places`), so a promised place is there when its process comes.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from backend.common.errors import fail
from backend.core.bounds import REFUSALS
from backend.core.entries import SliceEntry
from backend.core.families import Families, Family, below, carried, lowered, said_by
from backend.core.records import Books
from backend.core.settings import LOW
from backend.core.slices import SliceTree
from backend.process import procfs
from backend.process.identity import ROOT, Group, Process, Slice, SliceOn

NEIGHBOURS_MOST = 64
"""Most processes of a slice that are looked at to find whether all are of one user, some 20 us each; a slice with more
counts as one of several users."""

Where = Mapping[int, Slice]
"""The slices of families, by the number of the family."""


@attrs.frozen
class Entering:
    """A process that is about to enter families."""

    process: Process
    """The process."""
    own: Mapping[int, Books]
    """Its books on each GPU, by GPU index; empty for a process that is new."""
    there: Collection[Group] = ()
    """Groups that are in the books already, with their values."""
    former: Where = attrs.field(factory=dict)
    """The slices of the families that it is in now; their books go along."""


class FamilyTree(SliceTree):
    """The slices of one tree, families' included."""

    def promise(self, cgroup: Slice, families: Families) -> Sequence[Slice]:
        """Reserve a place for the slice of each of some families below a cgroup, until :meth:`withdraw`.

        Return the slices. EAGAIN for a slice that is too deep, or one too many for its user or for all; EEXIST where a
        slice of that name was made by hand.
        """
        level, missing = cgroup, 0
        while (entry := self._slices.get(level)) is None:
            above = level.parent
            assert above is not None, "the root is always there"
            level, missing = above, missing + 1
        if missing:
            self._bounds.require(self._user(entry, followed=True), entry.depth + missing)
        slice_, depth, promised = cgroup, entry.depth + missing, list[Slice]()
        try:
            for family in families:
                slice_, depth = below(slice_, (family,)), depth + 1
                found = self._slices.get(slice_)
                if found is not None and found.kept and not found.family:
                    raise fail(errno.EEXIST)
                self._places.require(slice_, family.user, depth)
                self._places.hold(slice_, family.user)
                promised.append(slice_)
        except OSError:
            self.withdraw(promised)
            raise
        return promised

    def renew(self, promised: Sequence[Slice], user: int) -> None:
        """Promise again, for processes of a user, what was withdrawn a moment ago."""
        for slice_ in promised:
            self._places.hold(slice_, user)

    def withdraw(self, promised: Sequence[Slice]) -> None:
        """End promises: the slice is there now, or no process will come for it."""
        for slice_ in promised:
            self._places.let_go(slice_)

    def _reach_families(
        self, entry: SliceEntry, families: Families, entering: Entering
    ) -> tuple[SliceEntry, OSError | None]:
        """Return the entry of the slice of the last of some families below `entry`; where that could not be made, of
        the lowest that could, and the error. A slice that could not be given its values is dropped again. OSError."""
        for family in families:
            slice_ = below(entry.slice, (family,))
            found = self._slices.get(slice_)
            is_new, adopted = found is None or not (found.family or found.kept), None
            if found is None:
                try:
                    found = self._make(slice_, entry, entering.there, followed=True, family=family)
                except OSError as error:
                    if error.errno not in REFUSALS:
                        self._prune(entry.slice)
                        raise
                    return entry, error
            elif is_new:  # made before this daemon, or a cgroup of that name
                adopted = found.user
                self._become(found, family.user, is_family=True)
            try:
                self._give_values(found, family, entering, is_new=is_new)
            except OSError:
                if adopted is not None:
                    self._become(found, adopted, is_family=False)
                self._prune(slice_)
                raise
            entry = found
        return entry, None

    def _become(self, entry: SliceEntry, user: int, *, is_family: bool) -> None:
        """Turn an existing slice into a family's, or back into another, and count it for a user."""
        self._discount(entry)
        entry.family, entry.user = is_family, user
        self._count(entry)

    def _give_values(self, entry: SliceEntry, family: Family, entering: Entering, *, is_new: bool) -> None:
        """Give the slice of a family its values, on every GPU where it does not have them yet."""
        above = entry.above
        assert above is not None, "the root is no family's"
        gpus = [gpu for gpu in self._gpus if SliceOn(entry.slice, gpu) not in entering.there]
        former = {gpu: self._former(family, gpu, entering) for gpu in gpus}
        if not is_new:
            for gpu, before in former.items():
                books = self._ledger.books(SliceOn(entry.slice, gpu))
                if before is None:
                    self._change(entry, gpu, lowered(books, entering.own.get(gpu, Books())))
                else:
                    self._change(entry, gpu, carried(family, books, before))
            return
        asked = {gpu: family.asked if before is None else said_by(before) for gpu, before in former.items()}
        wants_low = above.slice != ROOT and any(LOW.field in values for values in asked.values())
        shared = wants_low and self._is_shared(above, entry, family.uid, entering.process)
        for gpu, values in asked.items():
            own = entering.own.get(gpu, Books()) if former[gpu] is None else Books()
            books = self._ledger.books(SliceOn(above.slice, gpu))
            allowed = attrs.evolve(family, asked=values).allowed(above.slice, books, own, shared=shared)
            self._change(entry, gpu, allowed)

    def _change(self, entry: SliceEntry, gpu: int, changes: Mapping[str, int]) -> None:
        if changes:
            self._ledger.configure(SliceOn(entry.slice, gpu), **changes)

    def _former(self, family: Family, gpu: int, entering: Entering) -> Books | None:
        """Return the books of the slice of the same family that the process is in now; None where it is in none, or
        where the books of that slice were not there when the daemon began."""
        slice_ = entering.former.get(family.id)
        if slice_ is None or slice_ not in self._slices:
            return None
        group = SliceOn(slice_, gpu)
        return None if entering.there and group not in entering.there else self._ledger.books(group)

    def _is_shared(self, above: SliceEntry, but: SliceEntry, uid: int, process: Process) -> bool:
        """Return whether a process or slice of another user is directly in `above`, apart from `but` and `process`."""
        if any(self._slices[child].user != uid for child in above.children if child != but.slice):
            return True
        others = [one.pid for one in above.members if one != process]
        return len(others) > NEIGHBOURS_MOST or any(_is_of_another(pid, uid) for pid in others)


def _is_of_another(pid: int, uid: int) -> bool:
    """Return whether a process is of another user, or cannot be looked at; False for one that is gone."""
    try:
        return procfs.descent(pid).uid != uid
    except ProcessLookupError:
        return False
    except OSError:
        return True


def numbered(found: Iterable[tuple[Slice, Family]]) -> Where:
    """Return the slices of families, by the number of the family."""
    return {family.id: slice_ for slice_, family in found}
