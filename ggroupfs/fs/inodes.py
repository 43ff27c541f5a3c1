"""What inode numbers are made of, and what stat(2) shows of one.

An inode number is a directory's number and a slot in it: slot 1 is the directory itself, slots from 2 on are its
files in the order of their table. So ten thousand process directories cost ten thousand small objects and nothing
for their files, and a number is never used again for something else.
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
"""The link ``self``: the last slot of the root."""

FILE_SIZE = 4096
"""st_size of every file, as sysfs has it: with 0, sendfile(2) and so shutil.copyfile() read nothing."""


@attrs.frozen
class Times:
    """When an inode was read, written and changed, as far as anybody says: Unix time, nanoseconds. All are when it came
    into the tree at first."""

    atime_ns: int
    """As set by utimensat(2)."""
    mtime_ns: int
    """The same."""
    ctime_ns: int
    """When its mode, its owner or one of those was set."""


@attrs.frozen
class Attributes:
    """What stat(2) shows of one inode."""

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
    """st_nlink: of a directory two, and one for each directory in it, as cgroup2 has it."""
    times: Times
    """st_atime and so on."""


@attrs.define(eq=False)
class Directory:
    """A directory that somebody looked at."""

    number: int
    """Makes up the inode numbers in it."""
    parent: int
    """Inode of the directory above."""
    name: str
    """Its name there."""
    subject: Subject
    """What it is the directory of: a group's control files, a process, a slice, or ``root``, ``gpus``."""
    files: tuple[Control, ...] = ()
    """Its files, by slot."""
    time_ns: int = attrs.field(factory=time.time_ns)
    """When it was first looked at."""

    @property
    def inode(self) -> int:
        """Its own inode number."""
        return self.number << SLOT_BITS | DIRECTORY_SLOT

    def file_inode(self, control: Control) -> int:
        """The inode number of one of its files."""
        return self.number << SLOT_BITS | FIRST_FILE_SLOT + self.files.index(control)
