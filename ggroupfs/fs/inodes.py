"""Inode numbers: how they are made up, and what stat(2) shows of an inode.

An inode number consists of a directory's number and a slot in it: slot 1 is the directory itself, and slots from 2 on
are its files in the order of their table. So ten thousand process directories cost ten thousand small objects and
nothing for their files, and a number is never reused.
"""

from __future__ import annotations

import time

import attrs

from ggroupfs.fs.controls import Control
from ggroupfs.fs.keeper import Subject

SLOT_BITS = 6
DIRECTORY_SLOT = 1
FIRST_FILE_SLOT = 2

ROOT_INODE = 1
SELF_INODE = ROOT_INODE | ((1 << SLOT_BITS) - 1)
"""Inode of the link ``self``: the last slot of the root."""

FILE_SIZE = 4096
"""st_size of every file, bytes, as in sysfs: with 0, sendfile(2) and so shutil.copyfile() read nothing."""


@attrs.frozen
class Times:
    """The times of an inode, Unix time in nanoseconds.

    All start as the time at which its directory was first looked up.
    """

    atime_ns: int
    """Access time, as set by utimensat(2)."""
    mtime_ns: int
    """Modification time, as set by utimensat(2)."""
    ctime_ns: int
    """Time of the last change of the mode, the owner or the times."""


@attrs.frozen
class Attributes:
    """The attributes of an inode, as stat(2) shows them."""

    inode: int
    """st_ino."""
    mode: int
    """st_mode, type and permissions."""
    uid: int
    """Owner."""
    gid: int
    """Group."""
    size: int
    """st_size, bytes."""
    links: int
    """st_nlink: 2 plus the number of subdirectories for a directory, as in cgroup2."""
    times: Times
    """st_atime, st_mtime and st_ctime."""


@attrs.define(eq=False)
class Directory:
    """A directory that was looked up at least once."""

    number: int
    """Number from which the inode numbers in it are made."""
    parent: int
    """Inode of the parent directory."""
    name: str
    """Name in the parent directory."""
    subject: Subject
    """Subject of the directory: a group (its control files), a process, a slice, or the words ``root`` and ``gpus``."""
    files: tuple[Control, ...] = ()
    """Files, by slot."""
    time_ns: int = attrs.field(factory=time.time_ns)
    """Time of the first lookup, Unix time in nanoseconds."""

    @property
    def inode(self) -> int:
        """Inode number of the directory itself."""
        return self.number << SLOT_BITS | DIRECTORY_SLOT

    def file_inode(self, control: Control) -> int:
        """Return the inode number of one of the directory's files."""
        return self.number << SLOT_BITS | FIRST_FILE_SLOT + self.files.index(control)
