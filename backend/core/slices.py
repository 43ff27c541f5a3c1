"""The slices of one tree, with the ledger's groups for them: made, kept, given to users, and dropped.

Sync and free of hardware. A slice exists while a process is below it, and beyond that if a caller made it or set
something on it.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Sequence

from backend.common.errors import fail
from backend.core.bounds import REFUSALS, Bounds, Places
from backend.core.entries import SliceEntry, Watcher
from backend.core.families import Family
from backend.core.member import Record
from backend.core.protocols import Ledger
from backend.core.settings import APPLIED, SETTINGS
from backend.process.identity import ROOT, Group, Slice, SliceOn

NEW = {one.field: one.default for one in SETTINGS if one in APPLIED or one.in_file_of is not None}
"""Settings of a new group, by field."""


class SliceTree:
    """The slices of one tree."""

    def __init__(self, ledger: Ledger, gpus: Iterable[int], delegate_of: Callable[[Slice], int] = lambda _: 0) -> None:
        """`delegate_of` returns the user that may make cgroups below a cgroup."""
        self._ledger = ledger
        self._gpus = tuple(gpus)
        self._delegate_of = delegate_of
        self._bounds = Bounds()
        self._places = Places()
        self._slices: dict[Slice, SliceEntry] = {ROOT: SliceEntry(ROOT, None, kept=True)}
        self._records: dict[Group, Record] = {}
        for gpu in self._gpus:
            self._keep_record(SliceOn(ROOT, gpu))
        self.watchers: list[Watcher] = []
        self.dropped: list[Callable[[Record, Record | None], None]] = []
        """Called with the record of each group that left, and the record in which its process goes on elsewhere, or
        None."""
        self.kept: list[Callable[[Slice, bool], None]] = []
        """Called with a slice and whether it stays from now on."""
        self.version = 0
        """Number that changes whenever the content of the tree does."""
        self.families = 0
        """Number of slices of families."""

    # Lookups

    def slices(self) -> Sequence[Slice]:
        """Return the slices that have a directory, the root included."""
        return list(self._slices)

    def slice_entry(self, slice_: Slice) -> SliceEntry | None:
        """Return the entry of a slice; None for none."""
        return self._slices.get(slice_)

    def holds(self, group: Group) -> bool:
        """Return whether the tree has a directory for a group."""
        return group in self._records

    def record(self, group: Group) -> Record:
        """Return the record of a group; for one that is not in the tree, a new record, which nothing else will see."""
        return self._records.get(group) or Record(group)

    def records(self) -> Collection[Record]:
        """Return the records of all groups in the tree."""
        return self._records.values()

    def _keep_record(self, group: Group) -> Record:
        record = self._records[group] = Record(group)
        return record

    def _drop_record(self, group: Group, heir: Record | None = None) -> None:
        record = self._records.pop(group)
        for listener in self.dropped:
            listener(record, heir)

    def children(self, slice_: Slice) -> Collection[Slice]:
        """Return the slices directly below one. For one look."""
        entry = self._slices.get(slice_)
        return entry.children if entry is not None else ()

    # Changes

    def make(self, slice_: Slice) -> None:
        """Make a slice, by mkdir. FileExistsError where it exists, FileNotFoundError without a parent. EAGAIN for too
        many, or too deep."""
        if slice_ in self._slices:
            raise fail(errno.EEXIST)
        if slice_.parent not in self._slices:
            raise fail(errno.ENOENT)
        self._enter(slice_)
        self.keep(slice_)

    def keep(self, slice_: Slice) -> None:
        """Keep a slice on which something was set until rmdir or :meth:`let_go`; that of a family, as long as a process
        is in it."""
        entry = self._slices[slice_]
        if not entry.kept and not entry.family:
            for gpu in self._gpus:
                self._ledger.configure(SliceOn(slice_, gpu), kept=True)
            entry.kept = True
            self._tell_kept(slice_, True)

    def _tell_kept(self, slice_: Slice, kept: bool) -> None:
        for listener in self.kept:
            listener(slice_, kept)

    def require_plain(self, slice_: Slice) -> None:
        """Raise EINVAL for the slice of a family, which goes with its last process, and for one below such a slice."""
        level: Slice | None = slice_
        while level is not None:
            entry = self._slices.get(level)
            if entry is not None and entry.family:
                raise fail(errno.EINVAL)
            level = level.parent

    def make_ahead(self, slice_: Slice) -> None:
        """Make a slice, with those above it, that stays until :meth:`let_go` or rmdir. EAGAIN for one that is too deep,
        EINVAL for that of a family."""
        self.require_plain(slice_)
        self._enter(slice_)
        self.keep(slice_)

    def hold(self, slice_: Slice) -> None:
        """Do as :meth:`make_ahead`, for a unit that is active."""
        self.make_ahead(slice_)
        self._slices[slice_].unit = True
        self._tell_kept(slice_, True)

    def let_go(self, slice_: Slice) -> None:
        """Keep a slice only as long as something is below it."""
        entry = self._slices.get(slice_)
        if entry is not None and entry.kept and slice_ != ROOT:
            for gpu in self._gpus:
                self._ledger.configure(SliceOn(slice_, gpu), kept=False)
            entry.kept = entry.unit = False
            self._tell_kept(slice_, False)
            self._prune(slice_)

    def reset(self, slice_: Slice) -> None:
        """Give a slice back to root with nothing set on it, as it belongs to another cgroup now."""
        for gpu in self._gpus:
            self._ledger.configure(SliceOn(slice_, gpu), **NEW)
        if self._slices[slice_].given is not None:
            self.give(slice_, uid=0, gid=0)
        self.version += 1
        for watcher in self.watchers:
            watcher.slice_renewed(slice_)

    def owner(self, slice_: Slice) -> tuple[int, int]:
        """Return the uid and gid that a slice was given to; the number for none where it was not."""
        books = self._ledger.books(SliceOn(slice_, self._gpus[0]))
        return books.uid, books.gid

    def give(self, slice_: Slice, **owner: int) -> None:
        """Give what is below a slice to another owner: `uid`, `gid`, or both. The root's owner is not in the books."""
        if slice_ != ROOT:
            for gpu in self._gpus:
                self._ledger.configure(SliceOn(slice_, gpu), **owner)
        entry = self._slices.get(slice_)
        if entry is not None:
            entry.given = owner.get("uid", entry.given)

    def unmake(self, slice_: Slice) -> None:
        """Remove a slice, by rmdir. EBUSY while a process or a slice is below it."""
        entry = self._slices[slice_]
        if entry.members or entry.children or slice_ == ROOT:
            raise fail(errno.EBUSY)
        entry.kept = False
        self._prune(slice_)

    # Helpers

    def _enter(self, slice_: Slice, there: Collection[Group] = ()) -> SliceEntry:
        """Return the entry of a slice, made with those above it where missing. Groups in `there` are in the books
        already."""
        entry, refused = self._reach(slice_, there)
        if refused is not None:
            self._prune(entry.slice)
            raise refused
        return entry

    def _reach(
        self, slice_: Slice, there: Collection[Group], *, followed: bool = False
    ) -> tuple[SliceEntry, OSError | None]:
        """Return the entry of a slice; where that could not be made, of the lowest one above that could, and the
        error."""
        missing: list[Slice] = []
        level: Slice | None = slice_
        while level not in self._slices:
            assert level is not None, "the root is always there"
            missing.append(level)
            level = level.parent
        entry = self._slices[level]
        for next_below in reversed(missing):
            try:
                entry = self._make(next_below, entry, there, followed=followed)
            except OSError as error:
                if error.errno not in REFUSALS:
                    self._prune(entry.slice)
                    raise
                return entry, error
        return entry, None

    def _make(
        self,
        slice_: Slice,
        above: SliceEntry,
        there: Collection[Group],
        *,
        followed: bool,
        family: Family | None = None,
    ) -> SliceEntry:
        """Make a slice below an existing one, for a `family` if given. Groups in `there` are in the books already; a
        slice with such a group is exempt from the bounds."""
        user = self._user(above, followed=followed) if family is None else family.user
        missing = [gpu for gpu in self._gpus if SliceOn(slice_, gpu) not in there]
        if len(missing) == len(self._gpus):
            if family is None:
                self._bounds.require(user, above.depth + 1)
            else:
                self._places.require(slice_, user, above.depth + 1)
        groups, added = {gpu: SliceOn(slice_, gpu) for gpu in self._gpus}, list[int]()
        try:
            for gpu in missing:
                self._ledger.add(groups[gpu], SliceOn(above.slice, gpu))
                added.append(gpu)
        except OSError:
            for gpu in added:
                self._ledger.remove(SliceOn(slice_, gpu))
            raise
        entry = self._slices[slice_] = SliceEntry(slice_, above, above.depth + 1, user, family=family is not None)
        self._count(entry)
        above.children.add(slice_)
        for group in groups.values():
            self._keep_record(group)
        self.version += 1
        for watcher in self.watchers:
            watcher.slice_made(slice_)
        return entry

    def _count(self, entry: SliceEntry) -> None:
        """Count a slice for its user."""
        if entry.family:
            self._places.hold(entry.slice, entry.user)
            self.families += 1
        else:
            self._bounds.take(entry.user)

    def _discount(self, entry: SliceEntry) -> None:
        """Stop counting a slice."""
        if entry.family:
            self._places.let_go(entry.slice)
            self.families -= 1
        else:
            self._bounds.give(entry.user)

    def _user(self, above: SliceEntry | None, *, followed: bool) -> int:
        """Return the user that the slices below one count for: the one that it, or the nearest above it, was given to.
        For a slice that exists for a process in it, the user that may make such cgroups."""
        entry = above
        while entry is not None and entry.given is None:
            entry = entry.above
        if entry is not None and entry.given is not None:
            return entry.given
        return self._delegate_of(above.slice) if followed and above is not None else 0

    def _prune(self, slice_: Slice) -> None:
        """Drop a slice, and those above it, that nothing holds any more."""
        entry = self._slices[slice_]
        while not (entry.kept or entry.members or entry.children):
            above = entry.above
            assert above is not None, "the root is kept"
            for gpu in self._gpus:
                self._ledger.remove(SliceOn(entry.slice, gpu))
            del self._slices[entry.slice]
            above.children.remove(entry.slice)
            self._discount(entry)
            for gpu in self._gpus:
                self._drop_record(SliceOn(entry.slice, gpu))
            self.version += 1
            self._tell_kept(entry.slice, False)
            for watcher in self.watchers:
                watcher.slice_gone(entry.slice)
            entry = above
