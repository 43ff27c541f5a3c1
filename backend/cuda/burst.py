"""The shared page that tells other programs until when they are held: one sealed memfd per leading program and GPU.

A leading program has work in a busy period before others on its GPU. The page (``struct burst_page`` of
``library/driver/burst.h``) says until when the programs behind it are held, and how many such periods have begun. Only
the leading program writes it. The programs behind it have descriptors for reading, and the mode of the file keeps other
users from opening it anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct

from backend.cuda.page import SEALS

SIZE = 4096
"""Size of the page, in bytes."""

PERIODS, PERIODS_AT = struct.Struct("<Q"), 8
"""Format of the count of busy periods, and its offset in the page, in bytes. A period counts if others were not held
before it."""

MODE = 0o400
"""Mode of the file. A descriptor for reading cannot be turned into one for writing through /proc/self/fd, except by
root."""


class BurstPage:
    """The daemon's end of a page."""

    def __init__(self) -> None:
        self.writable: int | None = os.memfd_create("ggroup-burst", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Descriptor to hand to the leading program; None once the page is closed."""
        self.readable: int | None = None
        """Descriptor to hand to the programs behind it; None once the page is closed."""
        try:
            os.ftruncate(self.writable, SIZE)
            fcntl.fcntl(self.writable, fcntl.F_ADD_SEALS, SEALS)
            os.fchmod(self.writable, MODE)
            self.readable = os.open(f"/proc/self/fd/{self.writable}", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def periods(self) -> int:
        """Return how many busy periods have begun in all, as its program reports it. A period counts if others were not
        held before it. Raise OSError (EBADF) once the page is closed."""
        if self.writable is None:
            raise OSError(errno.EBADF, "the page is closed")
        return int(PERIODS.unpack(os.pread(self.writable, PERIODS.size, PERIODS_AT))[0])

    def close(self) -> None:
        """Close the daemon's descriptors. The programs keep their mappings."""
        for descriptor in (self.writable, self.readable):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self.writable = self.readable = None
