"""The tree: its directories and files, by name and by inode, and their owners. Synchronous, without FUSE."""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Iterator, Sequence

import attrs

from backend.common.errors import fail
from backend.core.controller import Controller
from backend.core.records import NOBODY
from backend.ledgers.journal.state import Owned
from backend.process.identity import ROOT, Group, Process, Slice, SliceOn, group_on, tgid_of
from ggroupfs.fs.controls import CONTROLS, Control
from ggroupfs.fs.facts import GPU_FACTS, ROOT_FACTS
from ggroupfs.fs.inodes import (
    DIRECTORY_SLOT,
    FILE_SIZE,
    FIRST_FILE_SLOT,
    ROOT_INODE,
    SELF_INODE,
    SLOT_BITS,
    Attributes,
    Directory,
    Times,
)
from ggroupfs.fs.keeper import Keeper, Nobody, Subject
from ggroupfs.text.names import DIGITS, escape, is_number, unescape


class Tree:
    """The directories and files of a mount. All errors are OSError; an inode that is gone gives ENOENT."""

    def __init__(self, controller: Controller, keeper: Keeper | None = None) -> None:
        """`keeper` is told of changed owners and modes, and supplies those from before a restart."""
        self.controller = controller
        self._keeper: Keeper = keeper or Nobody()
        self._population = controller.population
        self._directories: dict[int, Directory] = {}
        self._by_subject: dict[Subject, Directory] = {}
        self._ownership: dict[int, Owned] = {}
        self._times: dict[int, Times] = {}  # those that were set or changed; kept for this mount only
        self._next = 0
        self._changes = 0  # of owners and modes
        self.root = self._directory("root", ROOT_INODE, "", ROOT_FACTS)
        self.gpus = self._directory("gpus", ROOT_INODE, "gpus")
        self.slices = self._directory(ROOT, ROOT_INODE, "slice")
        for slice_ in self._population.slices():
            self._restore(slice_)
        for subject, file, owned in list(self._keeper.kept()):
            self._restore_one(subject, file, owned)

    # Finding

    def lookup(self, parent: int, name: str) -> Attributes:
        """Return the attributes of `name` in a directory. ENOENT."""
        directory = self.directory(parent)
        for slot, control in enumerate(directory.files, FIRST_FILE_SLOT):
            if control.name == name:
                return self.attributes(directory.number << SLOT_BITS | slot)
        if directory is self.root and name == "self":
            return self.attributes(SELF_INODE)
        if directory is self.gpus:
            for index, gpu in self.controller.gpus.items():
                if name == gpu.info.uuid:
                    return self.attributes(self.gpus.number << SLOT_BITS | FIRST_FILE_SLOT + index)
        child = self._child(directory, name)
        if child is None:
            raise fail(errno.ENOENT)
        return self.attributes(child.inode)

    def entries(self, inode: int) -> Iterator[tuple[str, int]]:
        """Yield the names in a directory with their inodes."""
        directory = self.directory(inode)
        for slot, control in enumerate(directory.files, FIRST_FILE_SLOT):
            yield control.name, directory.number << SLOT_BITS | slot
        if directory is self.root:
            yield "self", SELF_INODE
        if directory is self.gpus:
            for index, gpu in self.controller.gpus.items():
                yield gpu.info.uuid, self.gpus.number << SLOT_BITS | FIRST_FILE_SLOT + index
        for name in self._names(directory):
            child = self._child(directory, name)
            if child is not None:
                yield name, child.inode

    @property
    def version(self) -> tuple[int, int]:
        """A value that changes whenever :meth:`entries` or :meth:`attributes` may give another answer anywhere."""
        return self._population.version, self._changes

    def directory(self, inode: int) -> Directory:
        """Return the directory that an inode is, or is in. ENOENT if it is gone.

        Until the kernel has heard that a directory is gone, it sends inodes from its cache. The name that the caller
        used does not exist, hence ENOENT. (ESTALE makes the kernel look the path up once more, but still reaches
        callers in a crowd.)
        """
        directory = self._directories.get(inode >> SLOT_BITS)
        if directory is None:
            raise fail(errno.ENOENT)
        return directory

    def file(self, inode: int) -> tuple[Control, Group]:
        """Return the control that an inode is, and its group. ENOENT if it is gone, EISDIR for a directory."""
        directory = self.directory(inode)
        slot = (inode & (1 << SLOT_BITS) - 1) - FIRST_FILE_SLOT
        if not 0 <= slot < len(directory.files):
            raise fail(errno.EISDIR)
        subject = directory.subject
        return directory.files[slot], subject if isinstance(subject, Group) else SliceOn(ROOT, -1)

    def attributes(self, inode: int) -> Attributes:
        """Return the attributes of an inode. ENOENT if it is gone."""
        directory = self.directory(inode)
        return self._attributes(directory, inode, self._inherited(directory, itself=inode == directory.inode))

    def _attributes(self, directory: Directory, inode: int, owner: tuple[int, int]) -> Attributes:
        """`owner` is the owner if the inode was never chowned."""
        slot = inode & (1 << SLOT_BITS) - 1
        size = FILE_SIZE
        if slot == DIRECTORY_SLOT:
            kind, permissions, size = stat.S_IFDIR, 0o755, 0
        elif slot - FIRST_FILE_SLOT < len(directory.files):
            kind, permissions = stat.S_IFREG, directory.files[slot - FIRST_FILE_SLOT].mode
        else:
            kind, permissions, size = stat.S_IFLNK, 0o777, 1
        uid, gid = owner
        own = self._ownership.get(inode)
        if own is not None and own.lent in (None, uid):
            uid = uid if own.uid is None else own.uid
            gid = gid if own.gid is None else own.gid
            permissions = permissions if own.permissions is None else own.permissions
        links = 2 + self._directories_in(directory) if slot == DIRECTORY_SLOT else 1
        return Attributes(inode, kind | permissions, uid, gid, size, links, self._times_of(directory, inode))

    def _times_of(self, directory: Directory, inode: int) -> Times:
        return self._times.get(inode) or Times(directory.time_ns, directory.time_ns, directory.time_ns)

    def readlink(self, inode: int, tid: int) -> str:
        """Return the target of a link for the thread `tid`, as /proc/self does."""
        if inode == SELF_INODE:
            try:
                return str(tgid_of(tid))
            except ProcessLookupError:
                raise fail(errno.ENOENT) from None
        return str((inode & (1 << SLOT_BITS) - 1) - FIRST_FILE_SLOT)

    def known(self, subject: Group | Process | Slice) -> Directory | None:
        """Return the directory of a subject, or None if it was never looked up."""
        return self._by_subject.get(subject)

    def path(self, directory: Directory) -> str:
        """Return the path of a directory below the mountpoint, beginning with ``/``."""
        names: list[str] = []
        while directory is not self.root:
            names.append(f"/{directory.name}")
            directory = self.directory(directory.parent)
        return "".join(reversed(names))

    # Changing

    async def mkdir(self, parent: int, name: str, uid: int) -> Attributes:
        """Make the directory of a live process, which may have to be waited for, or of a slice, for a user.

        EPERM in other directories, EINVAL for an invalid name.
        """
        directory = self.directory(parent)
        if directory is self.root:
            if not is_number(name) or name.startswith("0"):
                raise fail(errno.EINVAL)
            await self.controller.make_process(int(name))
        elif isinstance(directory.subject, Slice):
            # The name of a GPU, or one that would make /proc/<pid>/cgroup unreadable (see cgroup_mkdir()).
            if "\n" in name or (DIGITS.fullmatch(name) and unescape(name) == name):
                raise fail(errno.EINVAL)
            self.controller.lives.make(_below(directory.subject, name), uid)
        else:
            raise fail(errno.EPERM)
        return self.lookup(parent, name)

    def rmdir(self, parent: int, name: str) -> None:
        """Remove a directory. EBUSY while something runs in it, EPERM unless it belongs to a process or a slice."""
        directory = self.directory(parent)
        child = self._child(directory, name)
        if child is None:
            raise fail(errno.ENOENT if name not in dict(self.entries(parent)) else errno.ENOTDIR)
        if isinstance(child.subject, Process):
            self.controller.unmake_process(child.subject)
        elif isinstance(child.subject, Slice) and child is not self.slices:
            self.controller.unmake_slice(child.subject)
        else:
            raise fail(errno.EPERM)

    def chown(
        self, inode: int, uid: int | None, gid: int | None, permissions: int | None, by: int = 0
    ) -> Sequence[int]:
        """chown(2) and chmod(2) by a user; None leaves a value as it is. Return the inodes with changed attributes.

        A change made by a delegate ends with the delegation, so no user keeps access to what was taken back.
        """
        directory, before = self.directory(inode), self.attributes(inode)
        if by and uid not in (None, before.uid):
            raise fail(errno.EPERM)  # root of a user namespace: owning files of other users, it could escape its limits
        if by and uid == before.uid:
            uid = None  # already the owner: a user must not make permanent what it was lent
        subject = directory.subject
        slice_ = subject if isinstance(subject, Slice) and inode == directory.inode else None
        owner = {name: new for name, new in (("uid", uid), ("gid", gid)) if new is not None}
        if slice_ is not None and owner:
            self.controller.lives.look(slice_)  # the cgroup may be a new one, and the new owner is of that
            if self._population.slice_entry(slice_) is None:
                raise fail(errno.ENOENT)
            self._population.give(slice_, **owner)
        inherited, _ = self._inherited(directory, itself=inode == directory.inode)
        own = self._ownership.get(inode, Owned())
        if own.lent not in (None, inherited):
            own = Owned()
        self._own(
            directory,
            inode,
            Owned(
                own.uid if uid is None else uid,
                own.gid if gid is None else gid,
                own.permissions if permissions is None else permissions,
                by if by and by == inherited and own.uid is None and uid is None else None,
            ),
        )
        self.set_times(inode)
        if slice_ is None:
            return ()
        if self._population.slice_entry(slice_) is not None:
            self._population.keep(slice_)
        if not owner:
            return ()  # the files below inherit owners, but not modes
        return [seen for below in self._below(slice_) for seen in self.inodes(below)]

    def set_times(self, inode: int, atime_ns: int | None = None, mtime_ns: int | None = None) -> None:
        """utimensat(2); None leaves a time as it is. The change time becomes the present."""
        before = self._times_of(self.directory(inode), inode)
        self._times[inode] = Times(
            before.atime_ns if atime_ns is None else atime_ns,
            before.mtime_ns if mtime_ns is None else mtime_ns,
            time.time_ns(),
        )
        self._changes += 1

    def inodes(self, directory: Directory) -> list[int]:
        """Return the inode of a directory and those of its files."""
        files = range(FIRST_FILE_SLOT, FIRST_FILE_SLOT + len(directory.files))
        return [directory.inode, *(directory.number << SLOT_BITS | slot for slot in files)]

    def seen(self, subject: Group | Process | Slice) -> list[Directory]:
        """Return the known directories of a process or slice, or of a single group, deepest first."""
        groups = [] if isinstance(subject, Group) else [group_on(subject, index) for index in self.controller.gpus]
        found = (self._by_subject.get(key) for key in (*groups, subject))
        return [directory for directory in found if directory is not None]

    def seen_inodes(self, subject: Process | Slice) -> list[int]:
        """Return the inodes of the known directories of a process or slice, and of their files."""
        return [inode for directory in self.seen(subject) for inode in self.inodes(directory)]

    def hand_over(self, here: Group, there: Group) -> list[int]:
        """Copy the owners and modes of a group's directory to that of another group. Return the inodes that changed."""
        directory = self.known(here)
        if directory is None or self._ownership.keys().isdisjoint(self.inodes(directory)):
            return []
        other = self._directory(there, directory.parent, str(there.gpu), directory.files)
        pairs = list(zip(self.inodes(directory), self.inodes(other), strict=True))
        for inode, to in pairs:
            if inode in self._ownership:
                self._own(other, to, self._ownership[inode])
        return [to for _, to in pairs]

    def forget(self, subject: Group | Process | Slice) -> list[Directory]:
        """Drop the directories of a process or slice, or of a group, that is gone. Return them, deepest first."""
        gone = self.seen(subject)
        for directory in gone:
            del self._directories[directory.number], self._by_subject[directory.subject]
            for inode in self.inodes(directory):
                self._times.pop(inode, None)
            if [inode for inode in self.inodes(directory) if self._ownership.pop(inode, None) is not None]:
                self._keeper.forget(directory.subject)
        return gone

    def disown(self, slice_: Slice) -> list[int]:
        """Drop all owners and modes in the directories of a slice. Return the inodes that changed."""
        for directory in self.seen(slice_):
            if [inode for inode in self.inodes(directory) if self._ownership.pop(inode, None) is not None]:
                self._keeper.forget(directory.subject)
        self._changes += 1
        return [seen for below in self._below(slice_) for seen in self.inodes(below)]

    # Helpers

    def _directory(self, subject: Subject, parent: int, name: str, files: tuple[Control, ...] = ()) -> Directory:
        directory = self._by_subject.get(subject)
        if directory is None:
            if isinstance(subject, Group):  # the identical object of the books, which they find without a comparison
                subject = self._population.record(subject).group
            directory = Directory(self._next, parent, name, subject, files)
            self._directories[self._next] = self._by_subject[subject] = directory
            self._next += 1
        return directory

    def _restore(self, slice_: Slice) -> None:
        """Restore the owner that the books have for a slice that exists from the start."""
        uid, gid = (None if one == NOBODY else one for one in self._population.owner(slice_))
        if (uid, gid) != (None, None):
            self._ownership[self._slice(slice_).inode] = Owned(uid, gid)

    def _restore_one(self, subject: Subject, file: str, owned: Owned) -> None:
        """Restore the owner and mode of a file that the keeper remembers, if it still exists.

        A slice's owner is in the books.
        """
        directory = self._place(subject)
        names = {control.name: inode for control, inode in self._files(directory)} if directory is not None else {}
        if directory is None:
            self._keeper.forget(subject)
        if directory is None or (file and file not in names):
            return
        inode = names[file] if file else directory.inode
        if isinstance(subject, Slice) and subject != ROOT:
            of_books = self._ownership.get(inode, Owned())
            owned = attrs.evolve(owned, uid=of_books.uid, gid=of_books.gid)
        self._ownership[inode] = owned
        if subject == ROOT and not file and owned.uid is not None:
            self._population.give(ROOT, uid=owned.uid)  # the books have no owner of the root

    def _place(self, subject: Subject) -> Directory | None:
        """Return the directory of a subject, creating its record if needed; None if there is no such directory."""
        if isinstance(subject, str):
            return self._by_subject.get(subject)
        node = subject.node if isinstance(subject, Group) else subject
        above: Directory | None
        if isinstance(node, Process):
            there = self._population.resident(node) is not None
            above = self._child(self.root, str(node.pid)) if there else None
        else:
            above = self._slice(node) if self._population.slice_entry(node) is not None else None
        if above is None or not isinstance(subject, Group):
            return above
        return self._child(self.gpus if node == ROOT else above, str(subject.gpu))

    def _own(self, directory: Directory, inode: int, owned: Owned) -> None:
        """Set the owner and mode of a directory or of a file in it. Those of links are not kept for the next daemon."""
        self._ownership[inode] = owned
        self._changes += 1
        names = {directory.inode: "", **{at: control.name for control, at in self._files(directory)}}
        if inode in names:
            self._keeper.keep(directory.subject, names[inode], owned)

    @staticmethod
    def _files(directory: Directory) -> Iterator[tuple[Control, int]]:
        for slot, control in enumerate(directory.files, FIRST_FILE_SLOT):
            yield control, directory.number << SLOT_BITS | slot

    def _slice(self, slice_: Slice) -> Directory:
        """Return the directory of a slice, creating records for it and those above as needed."""
        unknown: list[Slice] = []
        level: Slice | None = slice_
        while level is not None and level not in self._by_subject:
            unknown.append(level)
            level = level.parent
        directory = self.slices if level is None else self._by_subject[level]
        for below in reversed(unknown):
            directory = self._directory(below, directory.inode, escape(below.path.rpartition("/")[2]))
        return directory

    def _names(self, directory: Directory) -> list[str]:
        """Names of the subdirectories of a directory."""
        subject = directory.subject
        if directory is self.root:
            return ["gpus", "slice", *map(str, self._population.pids())]
        if directory is self.gpus:
            return [str(index) for index in self.controller.gpus]
        if isinstance(subject, Process):
            resident = self._population.resident(subject)
            return [str(index) for index in sorted(resident.gpus)] if resident is not None else []
        if isinstance(subject, Slice):
            entry = self._population.slice_entry(subject)
            below = [escape(child.path.rpartition("/")[2]) for child in entry.children] if entry is not None else []
            return below if subject == ROOT else [*map(str, self.controller.gpus), *below]
        return []

    def _directories_in(self, directory: Directory) -> int:
        """Number of subdirectories of a directory."""
        subject, gpus = directory.subject, len(self.controller.gpus)
        if directory is self.root:
            return 2 + len(self._population)
        if directory is self.gpus:
            return gpus
        if isinstance(subject, Process):
            resident = self._population.resident(subject)
            return len(resident.gpus) if resident is not None else 0
        if isinstance(subject, Slice):
            return len(self._population.children(subject)) + (gpus if subject != ROOT else 0)
        return 0

    def _child(self, directory: Directory, name: str) -> Directory | None:
        """Return the subdirectory `name` of a directory, creating its record if needed; None if there is none."""
        subject = directory.subject
        number = int(name) if is_number(name) and str(int(name)) == name else None
        if directory is self.root:
            if name in ("gpus", "slice"):
                return self.gpus if name == "gpus" else self.slices
            resident = self._population.by_pid(number) if number is not None else None
            if resident is not None:
                return self._directory(resident.process, ROOT_INODE, name)
        elif directory is self.gpus:
            if number is not None and number in self.controller.gpus:
                return self._directory(SliceOn(ROOT, number), directory.inode, name, GPU_FACTS)
        elif isinstance(subject, Slice):
            if number is not None:
                if subject != ROOT and number in self.controller.gpus:
                    return self._directory(group_on(subject, number), directory.inode, name, CONTROLS)
            elif self._population.slice_entry(_below(subject, name)) is not None:
                return self._directory(_below(subject, name), directory.inode, name)
        elif isinstance(subject, Process) and number is not None and self._population.holds(group_on(subject, number)):
            return self._directory(group_on(subject, number), directory.inode, name, CONTROLS)
        return None

    def _inherited(self, directory: Directory, *, itself: bool) -> tuple[int, int]:
        """Owner of an inode that was never chowned: the one that the nearest slice above was given.

        See "Delegation" in cgroup-v2.rst. A delegated slice's own control files stay with the level above, so no user
        can raise its own limit.
        """
        subject = directory.subject.node if isinstance(directory.subject, Group) else directory.subject
        slice_: Slice | None = None
        if isinstance(subject, Slice):
            slice_ = subject if itself and directory.subject is subject else subject.parent
        elif isinstance(subject, Process) and isinstance(directory.subject, Group):
            resident = self._population.resident(subject)
            slice_ = resident.slice if resident is not None else None
        while slice_ is not None:
            chowned = self._by_subject.get(slice_)
            own = self._ownership.get(chowned.inode) if chowned is not None else None
            if own is not None and own.uid is not None:
                return own.uid, own.gid or 0
            slice_ = slice_.parent
        return 0, 0

    def _below(self, slice_: Slice) -> Iterator[Directory]:
        """The known directories that may inherit the owner of a slice."""
        for directory in list(self._directories.values()):
            subject = directory.subject.node if isinstance(directory.subject, Group) else directory.subject
            if isinstance(subject, Process):
                resident = self._population.resident(subject)
                subject = resident.slice if resident is not None else ROOT
            if isinstance(subject, Slice) and slice_.contains(subject):
                yield directory


def _below(slice_: Slice, name: str) -> Slice:
    """Return the slice that `name` stands for in the directory of another slice."""
    return Slice(f"{slice_.path.rstrip('/')}/{unescape(name)}")
