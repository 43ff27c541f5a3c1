"""The page by which a program that goes before others has them held: one sealed file in memory a program and GPU.

It has a word, until when they are held, and how often that has begun (``struct burst_page`` of
``library/driver/burst.h``). Its program alone writes it; those that go behind have descriptors for reading, and the
file has no mode by which another user could open it anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from backend.cuda.page import SEALS

SIZE = 4096
"""Bytes of the file."""

PERIODS, PERIODS_AT = struct.Struct("<Q"), 8
"""How often others were held that were not before, and the byte where that is."""

MODE = 0o400
"""Mode of the file: a descriptor for reading gives none for writing, by /proc/self/fd, but to root."""


class BurstPage:
    """The daemon's end of it."""

    def __init__(self) -> None:
        self.writable: int | None = os.memfd_create("ggroup-burst", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """A descriptor to be handed to the program that goes before others; None once it is closed."""
        self.readable: int | None = None
        """A descriptor to be handed to programs that go behind it; None once it is closed."""
        try:
            os.ftruncate(self.writable, SIZE)
            fcntl.fcntl(self.writable, fcntl.F_ADD_SEALS, SEALS)
            os.fchmod(self.writable, MODE)
            self.readable = os.open(f"/proc/self/fd/{self.writable}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def periods(self) -> int:
        """How often others were held that were not before, ever, by the word of its program. OSError once it is
        closed."""
        if self.writable is None:
            raise OSError(errno.EBADF, "the page is closed")
        return int(PERIODS.unpack(os.pread(self.writable, PERIODS.size, PERIODS_AT))[0])

    def close(self) -> None:
        """The programs keep their mappings."""
        for descriptor in (self.writable, self.readable):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.writable = self.readable = None
