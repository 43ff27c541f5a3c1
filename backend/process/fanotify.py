"""Permission events of fanotify(7): a process that opens a marked file waits for an answer.

This works only for regular files. The kernel makes no such event for a device node or any other file, whatever is
marked (fanotify_group_event_mask() in fs/notify/fanotify/fanotify.c: "Path type events are only relevant for files
and dirs"), and refuses a mark in /proc with EINVAL. A mark is on the inode: it counts for every name, and in every
mount namespace, that the file is opened by.

When the last descriptor of the fanotify group is closed, all waiting openings go on; so they do when the process that
holds it is killed.
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
"""struct fanotify_event_metadata: length, version, reserved, length of this struct, mask, descriptor, process."""
ANSWER = struct.Struct("=iI")
"""struct fanotify_response."""
VERSION = 3
"""FANOTIFY_METADATA_VERSION, the version of the layout of an event."""
AT_ONCE = 64
"""Openings that one read(2) takes, at most; each takes a descriptor."""


@attrs.frozen
class Opening:
    """A file that a process is about to open, and that waits for an answer."""

    fd: int
    """The same file, opened for us. Its number names the opening until that is answered."""
    thread: int
    """The thread that opens it; 0 for one of another pid namespace. The thread may end before its process, when
    another thread of that executes a program (execve(2)).
    """


class Openings:
    """A fanotify group for permission events. Raises OSError where the kernel has none, or we may not make one."""

    def __init__(self) -> None:
        flags = FAN_CLOEXEC | FAN_NONBLOCK | FAN_CLASS_CONTENT | FAN_UNLIMITED_QUEUE | FAN_REPORT_TID
        self._fd = syscalls.named("fanotify_init", flags, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)

    def fileno(self) -> int:
        """Return the descriptor that is readable when an opening waits."""
        return self._fd

    def close(self) -> None:
        """Let all openings go on; later ones do not wait."""
        os.close(self._fd)

    def mark(self, path: str | os.PathLike[str]) -> None:
        """Make every later opening of this file wait, by whatever process. Raises OSError: EINVAL where the kernel
        was built without permission events (CONFIG_FANOTIFY_ACCESS_PERMISSIONS), or has none for such a file.
        """
        name = os.fsencode(path)
        syscalls.named("fanotify_mark", self._fd, FAN_MARK_ADD, ctypes.c_uint64(FAN_OPEN_PERM), AT_FDCWD, name)

    def unmark(self) -> None:
        """Remove all marks: no further opening waits."""
        syscalls.named("fanotify_mark", self._fd, FAN_MARK_FLUSH, ctypes.c_uint64(0), AT_FDCWD, None)

    def asked(self) -> Sequence[Opening]:
        """Return the openings that have come. Each has to be answered, or all by :meth:`close`. Raises OSError where
        this process lacked a resource, for which the kernel refused an opening (the program gets EPERM), or where the
        layout of events is a later one.
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
        """Let an opening go on. If its thread was killed meanwhile, the kernel no longer knows the opening."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.write(self._fd, ANSWER.pack(opening.fd, FAN_ALLOW))
        finally:
            os.close(opening.fd)


def check() -> None:
    """Raise OSError, with the reason, if openings cannot be made to wait here. This is tried out on a
    file of our own.
    """
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
