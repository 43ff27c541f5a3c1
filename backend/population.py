"""Who is in the tree: the processes on each GPU, the slices above them, and the ledger's groups for both.

Sync and free of hardware: arrivals, exits and moves are told to it, and it keeps the ledger's hierarchy in step.
A slice is there while a process below it is, and beyond that if somebody made it or set something on it.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import attrs

from backend.errors import fail
from backend.identity import ROOT, Group, Process, Slice
from backend.protocols import Inherited, Ledger
from backend.records import NOBODY


@attrs.define(eq=False)
class Resident:
    """One process of the tree."""

    process: Process
    """Who it is."""
    slice: Slice
    """Its cgroup when last looked at."""
    gpus: set[int] = attrs.field(factory=set)
    """The GPUs it has a directory for."""
    contexts: set[int] = attrs.field(factory=set)
    """The GPUs it was seen to have a context on."""


@attrs.define(eq=False)
class SliceEntry:
    """One slice of the tree."""

    slice: Slice
    """Which."""
    kept: bool = False
    """Stays when nobody is below it: made by mkdir, or something was set on it."""
    children: set[Slice] = attrs.field(factory=set)
    """Slices directly below."""
    members: dict[Process, Resident] = attrs.field(factory=dict)
    """Processes directly in it."""


class Watcher(Protocol):
    """Who wants to know of comings and goings: the filesystem, to keep the kernel's dentries true."""

    def process_came(self, process: Process) -> None:
        """There is a directory for one more process, or one more GPU's in it."""

    def process_gone(self, process: Process) -> None:
        """The directory of a process is no more."""

    def process_moved(self, process: Process) -> None:
        """A process is in another slice now, and may have another owner by that."""

    def process_migrated(self, here: Group, there: Group) -> None:
        """A process is on another GPU now: one of its directories has taken the place of another."""

    def process_left(self, group: Group) -> None:
        """A process has no directory for that GPU any more, and lives on."""

    def slice_made(self, slice_: Slice) -> None:
        """There is a directory for one more slice."""

    def slice_gone(self, slice_: Slice) -> None:
        """The directory of a slice is no more."""


class Population:
    """The processes and slices of one tree."""

    def __init__(self, ledger: Ledger, gpus: Iterable[int]) -> None:
        self._ledger = ledger
        self._gpus = tuple(gpus)
        self._residents: dict[int, Resident] = {}
        self._slices: dict[Slice, SliceEntry] = {ROOT: SliceEntry(ROOT, kept=True)}
        self.watchers: list[Watcher] = []
        self.version = 0
        """Another number whenever anything else is in the tree, or is elsewhere in it."""

    # Looking

    def __len__(self) -> int:
        return len(self._residents)

    def pids(self) -> Iterable[int]:
        """The pids that have a directory."""
        return self._residents.keys()

    def residents(self) -> Iterable[Resident]:
        """The processes that have a directory."""
        return self._residents.values()

    def by_pid(self, pid: int) -> Resident | None:
        """The process that bears `pid` in the tree."""
        return self._residents.get(pid)

    def resident(self, process: Process) -> Resident | None:
        """The entry of exactly that process, not of one that bears its pid later."""
        resident = self._residents.get(process.pid)
        return resident if resident is not None and resident.process == process else None

    def slices(self) -> Sequence[Slice]:
        """The slices that have a directory, the root among them."""
        return list(self._slices)

    def slice_entry(self, slice_: Slice) -> SliceEntry | None:
        """The entry of a slice."""
        return self._slices.get(slice_)

    def holds(self, group: Group) -> bool:
        """Whether the tree has a directory for this group."""
        if isinstance(group.node, Slice):
            return group.node in self._slices and group.gpu in self._gpus
        resident = self.resident(group.node)
        return resident is not None and group.gpu in resident.gpus

    def below(self, group: Group) -> Iterator[Resident]:
        """The processes at or below a group that have a directory on its GPU. For one look: who waits meanwhile, or
        lets somebody in or out, makes a list of them first."""
        if isinstance(group.node, Process):
            resident = self.resident(group.node)
            if resident is not None and group.gpu in resident.gpus:
                yield resident
            return
        pending = [group.node]
        while pending:
            entry = self._slices.get(pending.pop())
            if entry is not None:
                for resident in entry.members.values():  # the first may be all that is asked for, of thousands
                    if group.gpu in resident.gpus:
                        yield resident
                pending.extend(entry.children)

    def children(self, slice_: Slice) -> Collection[Slice]:
        """The slices directly below one. For one look."""
        entry = self._slices.get(slice_)
        return entry.children if entry is not None else ()

    def members(self, slice_: Slice, gpu: int) -> Iterator[Process]:
        """The processes directly in a slice that have a directory on a GPU. For one look."""
        entry = self._slices.get(slice_)
        for resident in entry.members.values() if entry is not None else ():
            if gpu in resident.gpus:
                yield resident.process

    def path(self, group: Group) -> list[Group]:
        """The group and every one above it on its GPU; the GPU's root last."""
        node = group.node
        groups = [group]
        slice_: Slice | None
        if isinstance(node, Process):
            resident = self.resident(node)
            slice_ = resident.slice if resident is not None else None
        else:
            slice_ = node.parent
        while slice_ is not None:
            groups.append(Group(group.gpu, slice_))
            slice_ = slice_.parent
        return groups

    # What was there before

    def take_over(self, inherited: Sequence[Inherited], cgroups: Mapping[Process, Slice]) -> None:
        """Enters what the books hold already. `cgroups` says where its processes, which all live, are now.

        What the daemon before left half done is made whole: a slice is on every GPU, a process where its cgroup is.
        """
        above = {one.group: one.parent for one in inherited}
        for group in above:
            if isinstance(group.node, Slice):
                self._enter(group.node, above.keys())
            else:
                resident = self._reside(group.node, cgroups[group.node], above.keys())
                resident.gpus.add(group.gpu)
        for one in inherited:
            if one.joined and isinstance(one.group.node, Process):
                self._residents[one.group.node.pid].contexts.add(one.group.gpu)
        for group, parent in above.items():
            slice_ = group.node.parent if isinstance(group.node, Slice) else cgroups[group.node]
            assert slice_ is not None, "a GPU's root is nobody's child"
            if parent != Group(group.gpu, slice_):
                self._ledger.move(group, Group(group.gpu, slice_))
        for slice_ in {group.node for group in above if isinstance(group.node, Slice)}:
            self._agree(slice_)
        for slice_ in self.slices():
            if slice_ in self._slices:  # not pruned with one below it
                self._prune(slice_)

    def _agree(self, slice_: Slice) -> None:
        """Has the books of all GPUs say of a slice what those of one say: whether it stays, and whose it is."""
        each = [self._ledger.books(Group(gpu, slice_)) for gpu in self._gpus]
        kept = self._slices[slice_].kept = any(books.kept for books in each)
        whole: dict[str, int] = {"kept": kept}
        for name in ("uid", "gid"):
            given = {getattr(books, name) for books in each} - {NOBODY}
            whole |= {name: max(given)} if given else {}
        for gpu, books in zip(self._gpus, each, strict=True):
            if any(getattr(books, name) != value for name, value in whole.items()):
                self._ledger.configure(Group(gpu, slice_), **whole)

    # Processes

    def admit(self, process: Process, slice_: Slice, gpus: Iterable[int]) -> Resident:
        """Gives a process a directory, with these GPUs in it; what it has already it keeps."""
        resident = self._reside(process, slice_)
        for gpu in sorted(set(gpus) - resident.gpus):
            self._ledger.add(Group(gpu, process), Group(gpu, resident.slice))
            resident.gpus.add(gpu)
            self.version += 1
            for watcher in self.watchers:
                watcher.process_came(process)
        return resident

    def _reside(self, process: Process, slice_: Slice, there: Collection[Group] = ()) -> Resident:
        """The entry of a process, made in `slice_` where it has none."""
        resident = self.resident(process)
        if resident is None:
            entry = self._enter(slice_, there)
            resident = self._residents[process.pid] = entry.members[process] = Resident(process, slice_)
            self.version += 1
        return resident

    def expel(self, process: Process) -> None:
        """The process exited: everything that was known of it goes."""
        resident = self.resident(process)
        if resident is None:
            return
        del self._residents[process.pid]
        self.version += 1
        for gpu in resident.gpus:
            self._ledger.remove(Group(gpu, process))
        del self._slices[resident.slice].members[process]
        for watcher in self.watchers:
            watcher.process_gone(process)
        self._prune(resident.slice)

    def relocate(self, resident: Resident, slice_: Slice) -> None:
        """The process was moved to another cgroup: its charges follow it."""
        former = resident.slice
        self._enter(slice_).members[resident.process] = resident
        for gpu in resident.gpus:
            self._ledger.move(Group(gpu, resident.process), Group(gpu, slice_))
        del self._slices[former].members[resident.process]
        resident.slice = slice_
        self.version += 1
        for watcher in self.watchers:
            watcher.process_moved(resident.process)
        self._prune(former)

    def migrated(self, here: Group, there: Group) -> None:
        """A process that has both directories is on `there` from now on, and has nothing to do with `here` any more."""
        resident = self._forsake(here)
        resident.contexts.add(there.gpu)
        for watcher in self.watchers:
            watcher.process_migrated(here, there)

    def leave(self, group: Group) -> None:
        """A process lives on, and has no directory for that GPU any more."""
        self._forsake(group)
        for watcher in self.watchers:
            watcher.process_left(group)

    def _forsake(self, group: Group) -> Resident:
        assert isinstance(group.node, Process)
        resident = self._residents[group.node.pid]
        self._ledger.remove(group)
        resident.gpus.discard(group.gpu)
        self.version += 1
        resident.contexts.discard(group.gpu)
        return resident

    # Slices

    def make(self, slice_: Slice) -> None:
        """mkdir: FileExistsError where it is, FileNotFoundError without a parent."""
        if slice_ in self._slices:
            raise fail(errno.EEXIST)
        if slice_.parent not in self._slices:
            raise fail(errno.ENOENT)
        self._enter(slice_)
        self.keep(slice_)

    def keep(self, slice_: Slice) -> None:
        """Something was set on a slice: it stays until rmdir."""
        entry = self._slices[slice_]
        if not entry.kept:
            for gpu in self._gpus:
                self._ledger.configure(Group(gpu, slice_), kept=True)
            entry.kept = True

    def hold(self, slice_: Slice) -> None:
        """A slice is there, with those above it, until :meth:`let_go` or rmdir."""
        self._enter(slice_)
        self.keep(slice_)

    def let_go(self, slice_: Slice) -> None:
        """A slice stays only as long as something is below it."""
        entry = self._slices.get(slice_)
        if entry is not None and entry.kept and slice_ != ROOT:
            for gpu in self._gpus:
                self._ledger.configure(Group(gpu, slice_), kept=False)
            entry.kept = False
            self._prune(slice_)

    def owner(self, slice_: Slice) -> tuple[int, int]:
        """Uid and gid that a slice was given to, NOBODY for none."""
        books = self._ledger.books(Group(self._gpus[0], slice_))
        return books.uid, books.gid

    def give(self, slice_: Slice, **owner: int) -> None:
        """Somebody else owns what is below a slice: `uid`, `gid`, or both. The root's owner is not in the books."""
        if slice_ != ROOT:
            for gpu in self._gpus:
                self._ledger.configure(Group(gpu, slice_), **owner)

    def unmake(self, slice_: Slice) -> None:
        """rmdir: EBUSY while a process or a slice is below it."""
        entry = self._slices[slice_]
        if entry.members or entry.children or slice_ == ROOT:
            raise fail(errno.EBUSY)
        entry.kept = False
        self._prune(slice_)

    def _enter(self, slice_: Slice, there: Collection[Group] = ()) -> SliceEntry:
        """The entry of a slice, made with those above it where missing; but for those `there`, in the books too."""
        entry = self._slices.get(slice_)
        if entry is None:
            above = slice_.parent
            assert above is not None, "the root is always there"
            parent = self._enter(above, there)
            for gpu in self._gpus:
                if Group(gpu, slice_) not in there:
                    self._ledger.add(Group(gpu, slice_), Group(gpu, above))
            parent.children.add(slice_)
            entry = self._slices[slice_] = SliceEntry(slice_)
            self.version += 1
            for watcher in self.watchers:
                watcher.slice_made(slice_)
        return entry

    def _prune(self, slice_: Slice) -> None:
        """Drops a slice, and those above it, that nothing holds any more."""
        entry = self._slices[slice_]
        if entry.kept or entry.members or entry.children:
            return
        above = slice_.parent
        assert above is not None, "the root is kept"
        for gpu in self._gpus:
            self._ledger.remove(Group(gpu, slice_))
        del self._slices[slice_]
        self._slices[above].children.remove(slice_)
        self.version += 1
        for watcher in self.watchers:
            watcher.slice_gone(slice_)
        self._prune(above)
