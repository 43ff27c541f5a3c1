"""The population of a tree: the processes on each GPU, the slices above them, and the ledger's groups for both.

Sync and free of hardware: arrivals, exits and moves are reported to it, and it keeps the ledger's hierarchy in step.
What concerns slices alone is in :mod:`backend.core.slices`, those of families in :mod:`backend.core.familytree`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from backend.core.bounds import Bounds, Places
from backend.core.entries import Resident, SliceEntry
from backend.core.families import Families, believed, parsed, said_by, strictest
from backend.core.familytree import Entering, FamilyTree, Where, numbered
from backend.core.member import Record
from backend.core.protocols import Inherited, Ledger
from backend.core.records import NOBODY, Books
from backend.process import procfs
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn

log = logging.getLogger(__name__)


class Population(FamilyTree):
    """The processes and slices of one tree."""

    def __init__(self, ledger: Ledger, gpus: Iterable[int], delegate_of: Callable[[Slice], int] = lambda _: 0) -> None:
        """`delegate_of` returns the user that may make cgroups below a cgroup."""
        super().__init__(ledger, gpus, delegate_of)
        self._told: set[int] = set()  # users for which too many or too deep slices were logged
        self._residents: dict[int, Resident] = {}

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
        """Return the process that bears `pid` in the tree; None for none."""
        return self._residents.get(pid)

    def resident(self, process: Process) -> Resident | None:
        """Return the entry of exactly that process; None also where another one bears its pid now."""
        resident = self._residents.get(process.pid)
        return resident if resident is not None and resident.process == process else None

    def below(self, group: Group) -> Iterator[Resident]:
        """Yield the processes at or below a group that have a directory on its GPU.

        For one look: a caller that awaits in between, or lets a process in or out, makes a list first. The time taken
        grows with the number of processes, and slices without any cost nothing.
        """
        if isinstance(group, Member):
            resident = self.resident(group.process)
            if resident is not None and group.gpu in resident.gpus:
                yield resident
            return
        top = self._slices.get(group.slice)
        pending = [top] if top is not None else []
        while pending:
            entry = pending.pop()
            for resident in entry.members.values():  # of thousands, the first may be all that the caller needs
                if group.gpu in resident.gpus:
                    yield resident
            pending.extend(entry.occupied)

    def sharers(self, group: Group) -> int:
        """Return how many processes at or below a group have a context on its GPU. The number is kept, rather than
        counted: every caller with a timeslice on a slice asks for it."""
        if isinstance(group, Member):
            resident = self.resident(group.process)
            return int(resident is not None and group.gpu in resident.contexts)
        entry = self._slices.get(group.slice)
        return entry.sharers[group.gpu] if entry is not None else 0

    def members(self, slice_: Slice, gpu: int) -> Iterator[Process]:
        """Yield the processes directly in a slice that have a directory on a GPU. For one look."""
        entry = self._slices.get(slice_)
        for resident in entry.members.values() if entry is not None else ():
            if gpu in resident.gpus:
                yield resident.process

    def path(self, group: Group) -> list[Group]:
        """Return the group and every one above it on its GPU, the GPU's root last."""
        groups = [group]
        slice_ = self._above(group)
        while slice_ is not None and slice_ not in self._slices:  # for a slice that is gone
            groups.append(SliceOn(slice_, group.gpu))
            slice_ = slice_.parent
        entry = self._slices[slice_] if slice_ is not None else None
        while entry is not None:
            groups.append(SliceOn(entry.slice, group.gpu))
            entry = entry.above
        return groups

    def _above(self, group: Group) -> Slice | None:
        """Return the slice that a group is in; None for the root, and for a process that is gone."""
        if isinstance(group, SliceOn):
            return group.slice.parent
        resident = self.resident(group.process)
        return resident.slice if resident is not None else None

    # Taking over

    def take_over(self, inherited: Sequence[Inherited], cgroups: Mapping[Process, Slice]) -> None:
        """Enter what the books hold already. `cgroups` maps its processes, which are all alive, to their current
        cgroups.

        What the former daemon left half done is completed: a slice is on every GPU, a process where its cgroup is.
        """
        above = {one.group: one.parent for one in inherited}
        for group in above:
            if isinstance(group, SliceOn):
                self._enter(group.slice, above.keys())
            else:
                parent = above[group]
                at = parent.slice if isinstance(parent, SliceOn) else ROOT
                families, former = self._families_in(group.process, at, cgroups[group.process], group.gpu)
                resident = self._reside(group.process, cgroups[group.process], families, above.keys(), former)
                resident.records[group.gpu] = self._keep_record(group)
                self.version += 1
        for one in inherited:
            if one.joined and isinstance(one.group, Member):
                self.join(self._residents[one.group.process.pid], one.group.gpu)
        for group, parent in above.items():
            slice_ = self._above(group)
            assert slice_ is not None, "a GPU's root is nobody's child"
            if parent != SliceOn(slice_, group.gpu):
                self._ledger.move(group, SliceOn(slice_, group.gpu))
        for slice_ in {group.slice for group in above if isinstance(group, SliceOn)}:
            self._agree(slice_)
        self._count_anew()
        for slice_ in self.slices():
            if slice_ in self._slices:  # not pruned with one below it
                self._prune(slice_)

    def _agree(self, slice_: Slice) -> None:
        """Make the books of all GPUs agree on a slice: whether it is kept, and its owner."""
        entry = self._slices[slice_]
        each = [self._ledger.books(SliceOn(slice_, gpu)) for gpu in self._gpus]
        kept = entry.kept = any(books.kept for books in each)
        whole: dict[str, int] = {"kept": kept}
        for name in ("uid", "gid"):
            given = {getattr(books, name) for books in each} - {NOBODY}
            whole |= {name: max(given)} if given else {}
        entry.given = whole.get("uid")
        for gpu, books in zip(self._gpus, each, strict=True):
            if any(getattr(books, name) != value for name, value in whole.items()):
                self._ledger.configure(SliceOn(slice_, gpu), **whole)

    def _count_anew(self) -> None:
        """Count the slices that were taken over for their users, as if they were made now; none is refused."""
        self._bounds, self._places, self.families = Bounds(), Places(), 0
        for slice_, entry in self._slices.items():
            if slice_ != ROOT:
                if not entry.family:
                    entry.user = self._user(entry.above, followed=not entry.kept)
                self._count(entry)

    # Processes

    def admit(self, process: Process, cgroup: Slice, gpus: Iterable[int], families: Families = ()) -> Resident:
        """Give a process a directory with these GPUs in it, besides those that it has already. It is in the slice of
        its families below that of its cgroup; where that is refused (:mod:`backend.core.bounds`), in the nearest one
        above that exists. On OSError everything is as before."""
        was_there = self.resident(process) is not None
        resident = self._reside(process, cgroup, families)
        try:
            for gpu in sorted(set(gpus) - resident.gpus):
                member = Member(process, gpu)
                self._ledger.add(member, SliceOn(resident.slice, gpu))
                resident.records[gpu] = self._keep_record(member)
                self.version += 1
                for watcher in self.watchers:
                    watcher.process_came(process)
        except OSError:
            if not was_there:  # its exit would not be noticed
                self.expel(process)
            raise
        return resident

    def _reside(
        self,
        process: Process,
        cgroup: Slice,
        families: Families,
        there: Collection[Group] = (),
        former: Where | None = None,
    ) -> Resident:
        """Return the entry of a process; where it has none, one is made in the slice of its families below that of
        `cgroup`."""
        resident = self.resident(process)
        if resident is None:
            entry = self._enter_for(process, cgroup, families, there, former)
            resident = self._residents[process.pid] = Resident(process, entry.slice, cgroup, families)
            entry.admit(resident)
            self.version += 1
        return resident

    def expel(self, process: Process) -> None:
        """Drop everything that is known of a process that exited."""
        resident = self.resident(process)
        if resident is None:
            return
        del self._residents[process.pid]
        self.version += 1
        for gpu in resident.gpus:
            self._ledger.remove(Member(process, gpu))
        self._slices[resident.slice].dismiss(process)
        for record in resident.records.values():
            self._drop_record(record.group)
        for watcher in self.watchers:
            watcher.process_gone(process)
        self._prune(resident.slice)

    def relocate(self, resident: Resident, cgroup: Slice, families: Families | None = None) -> bool:
        """Follow a process that was moved to another cgroup, or into other families, with its charges. Return whether
        its slice is another one now."""
        former, process = self._slices[resident.slice], resident.process
        families = resident.families if families is None else families
        inside = [one for one in parsed(resident.slice, resident.cgroup) if one[1] in resident.families]
        entry = self._enter_for(process, cgroup, families, former=numbered(inside))
        if entry is former:
            resident.cgroup, resident.families = cgroup, families
            return False
        moved: list[int] = []
        try:
            for gpu in resident.gpus:
                self._ledger.move(Member(process, gpu), SliceOn(entry.slice, gpu))
                moved.append(gpu)
        except OSError:
            for gpu in moved:
                self._ledger.move(Member(process, gpu), SliceOn(former.slice, gpu))
            self._prune(entry.slice)
            raise
        entry.admit(resident)
        former.dismiss(process)
        resident.slice, resident.cgroup, resident.families = entry.slice, cgroup, families
        self.version += 1
        for watcher in self.watchers:
            watcher.process_moved(process)
        self._prune(former.slice)
        return True

    def migrated(self, here: Member, there: Member) -> None:
        """Move a process that has both directories from `here` to `there`, and drop the former."""
        self.join(self._forsake(here, self._records[there]), there.gpu)
        for watcher in self.watchers:
            watcher.process_migrated(here, there)

    def leave(self, group: Member) -> None:
        """Drop the directory of a process for one GPU; the process lives on."""
        self._forsake(group)
        for watcher in self.watchers:
            watcher.process_left(group)

    def _forsake(self, group: Member, heir: Record | None = None) -> Resident:
        resident = self._residents[group.process.pid]
        self._ledger.remove(group)
        del resident.records[group.gpu]
        self.version += 1
        self.quit(resident, group.gpu)
        self._drop_record(group, heir)
        return resident

    def join(self, resident: Resident, gpu: int) -> None:
        """Note that a process has a context on a GPU."""
        if gpu not in resident.contexts:
            resident.contexts.add(gpu)
            self._slices[resident.slice].share(gpu, 1)

    def quit(self, resident: Resident, gpu: int) -> None:
        """Note that a process no longer has a context on a GPU."""
        if gpu in resident.contexts:
            resident.contexts.discard(gpu)
            self._slices[resident.slice].share(gpu, -1)

    # Helpers

    def _families_in(self, process: Process, slice_: Slice, cgroup: Slice, gpu: int) -> tuple[Families, Where]:
        """Return the families of a process that was in `slice_` as the former daemon ended and is in `cgroup` now, with
        their slices. Where descriptors are too short to look at the process, the names of the slices are believed: so
        no limit is lost."""
        found = parsed(slice_, cgroup)
        if found:
            try:
                found = believed(found, procfs.descent(process.pid).uid)
            except ProcessLookupError:
                found = ()
            except OSError as error:
                log.warning("process %d: its user cannot be looked up: %s", process.pid, error.strerror)
        families = [attrs.evolve(one, asked=said_by(self._ledger.books(SliceOn(at, gpu)))) for at, one in found]
        return tuple(families), numbered(found)

    def _own(self, process: Process) -> Mapping[int, Books]:
        """Return the books of a process on each GPU; for a GPU that it is not on, the strictest of the others, since it
        may be moved there. Empty for a process that is new."""
        resident = self.resident(process)
        if resident is None:
            return {}
        each = {gpu: self._ledger.books(Member(process, gpu)) for gpu in resident.gpus}
        others = strictest(each.values())
        return {gpu: each.get(gpu, others) for gpu in self._gpus}

    def _enter_for(
        self,
        process: Process,
        cgroup: Slice,
        families: Families,
        there: Collection[Group] = (),
        former: Where | None = None,
    ) -> SliceEntry:
        """Return the entry of the slice of a process's families below that of its cgroup, or of the nearest one above
        that is not refused. `former` has the slices of the families that it is in now."""
        entry, refused = self._reach(cgroup, there, followed=True)
        user = None if refused is None else self._user(entry, followed=True)
        if families:
            entering = Entering(process, self._own(process), there, former or {})
            entry, of_family = self._reach_families(entry, families, entering)
            if refused is None:
                refused, user = of_family, families[-1].user
        if refused is not None and user is not None and user not in self._told:
            self._told.add(user)
            log.warning(
                "process %d is counted in %.200r: slices below, of user %d, are too many or too deep (%s)",
                *(process.pid, entry.slice.path, user, refused.strerror),
            )
        return entry
