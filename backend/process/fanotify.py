"""Openings of files that wait for an answer: permission events, as fanotify(7) has them.

Only for regular files. The kernel makes no such event of a device node, nor of any other file, whatever is marked
(fanotify_group_event_mask() in fs/notify/fanotify/fanotify.c: "Path type events are only relevant for files and dirs"),
and refuses a mark in /proc for it with EINVAL. A mark is one of the inode: it counts by whatever name, and in whatever
mount namespace, that is opened.

When the last descriptor of it is closed, whatever waits goes on, as it does where the process that has it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Sequence

import attrs

from backend.common import syscalls
from backend.common.errors import fail

FAN_CLOEXEC, FAN_NONBLOCK, FAN_CLASS_CONTENT, FAN_UNLIMITED_QUEUE = 0x1, 0x2, 0x4, 0x10  # linux/fanotify.h
FAN_REPORT_TID = 0x100
FAN_MARK_ADD, FAN_MARK_FLUSH = 0x1, 0x80
FAN_OPEN_PERM = 0x10000
FAN_ALLOW = 1
AT_FDCWD = -100

EVENT = struct.Struct("=IBBHQii")
"""struct fanotify_event_metadata: length, version, reserved, length of this, mask, descriptor, process."""
ANSWER = struct.Struct("=iI")
"""struct fanotify_response."""
VERSION = 3
"""FANOTIFY_METADATA_VERSION: of the layout of an event."""
AT_ONCE = 64
"""Openings that are taken by one read(2), at most. Each is a descriptor."""


@attrs.frozen
class Opening:
    """A file that a process is about to open, and does not before it is answered."""

    fd: int
    """The same file, opened for us: its number is the name of the opening until that is answered."""
    thread: int
    """The thread that opens it; 0 for one of another pid namespace. It ends without its process where another thread
    of that executes a program (execve(2))."""


class Openings:
    """See the module. OSError where the kernel has none, or we may not."""

    def __init__(self) -> None:
        flags = FAN_CLOEXEC | FAN_NONBLOCK | FAN_CLASS_CONTENT | FAN_UNLIMITED_QUEUE | FAN_REPORT_TID
        self._fd = syscalls.named("fanotify_init", flags, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)

    def fileno(self) -> int:
        """What is readable when there is one."""
        return self._fd

    def close(self) -> None:
        """All of them go on, and no other waits."""
        os.close(self._fd)

    def mark(self, path: str | os.PathLike[str]) -> None:
        """From now on an opening of this file waits, for whichever process. OSError: EINVAL where the kernel was made
        without it (CONFIG_FANOTIFY_ACCESS_PERMISSIONS), or has none of such a file."""
        name = os.fsencode(path)
        syscalls.named("fanotify_mark", self._fd, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM), AT_FDCWD, name)

    def unmark(self) -> None:
        """No opening waits from now on, but for those that do."""
        syscalls.named("fanotify_mark", self._fd, FAN_MARK_FLUSH, ctypes.c_uint64(0), AT_FDCWD, None)

    def asked(self) -> Sequence[Opening]:
        """Those that have come, each of which is to be answered, or all by :meth:`close`. OSError where something is
        short, by which the kernel has refused one (EPERM for the program), or where the events are of a later layout.
        """
        try:
            raw = os.read(self._fd, AT_ONCE * EVENT.size)
        except BlockingIOError:
            return ()
        found, offset = [], 0
        while offset < len(raw):
            length, version, _, _, mask, fd, thread = EVENT.unpack_from(raw, offset)
            if version != VERSION or length < EVENT.size:
                raise fail(errno.EPROTO)
            offset += length
            if mask & FAN_OPEN_PERM and fd >= 0:
                found.append(Opening(fd, thread))
        return found

    def allow(self, opening: Opening) -> None:
        """Answers one. Of a thread that was killed meanwhile the kernel knows none any more."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.write(self._fd, ANSWER.pack(opening.fd, FAN_ALLOW))
        finally:
            os.close(opening.fd)


def check() -> None:
    """OSError, which says why, where openings cannot be had wait here. It is tried, on a file that is none's."""
    try:
        openings = Openings()
    except AttributeError:
        raise fail(errno.ENOSYS) from None  # a C library without it
    except PermissionError:
        raise OSError(errno.EPERM, "fanotify_init(2) needs CAP_SYS_ADMIN in the initial user namespace") from None
    try:
        file = os.memfd_create("ggroupfs")
        try:
            openings.mark(f"/proc/self/fd/{file}")
        finally:
            os.close(file)
    except OSError as error:
        if error.errno == errno.EINVAL:
            why = "this kernel was made without CONFIG_FANOTIFY_ACCESS_PERMISSIONS"
            raise OSError(errno.EOPNOTSUPP, why) from None
        raise
    finally:
        openings.close()
