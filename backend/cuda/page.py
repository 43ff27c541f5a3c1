"""The page on which a CUDA program counts its kernels: one sealed memfd per connection, which only the program writes.

The layout is that of ``struct totals_page`` in totals.h: a line of 64 bytes for each GPU, by its index.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from backend.core.settings import MAX
from backend.core.workingset import WorkingSet

SIZE = 4096
LINE = struct.Struct("<QQQ40x")
"""Kernels submitted, kernels finished, and calls that submitted kernels."""

GPUS = 16
"""Number of GPUs with a line (GG_DEVICES)."""

WORKED = struct.Struct("24xq32x")
"""Time with kernels pending, behind these three: twice the microseconds; while some are pending, less twice the moment
at which that began, plus 1. 0 if the library does not tell (``totals.c``). In native byte order: in other orders the
word is read byte by byte, and all bytes of this one change at once."""

PLACED = struct.Struct("<32xQQ16x")
"""Launches that ran on the SMs of a limit alone, and those that ran on all SMs in spite of one, behind that."""

STANDS = struct.Struct("<Q")
"""Flag behind the lines: 1 while the program stands by to be moved (``departure.h``)."""

USED = struct.Struct("<QQQQQQ16x")
"""Second line of each GPU, on the working set of the last turn. In order: bytes of it; bytes of it on the GPU; bytes
not written since the host had them; 0 from a library that does not tell, ALONE, or SHARES; bytes used but not expected;
bytes expected but not used."""
USED_AT = (GPUS + 1) * LINE.size
"""Offset of these second lines, in bytes: behind the line with STANDS."""

ALONE, SHARES = 1, 2
"""Values for a GPU on which no memory of the program, or some of it, is shared with another process."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of a page: if its writer truncated it, SIGBUS would kill the reader."""


def stands(descriptor: int) -> bool:
    """Return whether the page says that its program stands by. What a locked program's page says holds until the
    program is unlocked. Raise OSError."""
    raw = os.pread(descriptor, STANDS.size, GPUS * LINE.size)
    return len(raw) == STANDS.size and STANDS.unpack(raw)[0] == 1


class CounterPage:
    """The daemon's end of a page. Its contents are what the program claims."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ggroup-counters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Descriptor to hand to the program."""
        try:
            os.ftruncate(self.descriptor, SIZE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.descriptor, SIZE, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self.descriptor)
            raise

    def counts(self, gpu: int) -> tuple[int, int]:
        """Return the kernels submitted to a GPU, and those finished there, which are never more."""
        if gpu >= GPUS:
            return 0, 0
        # `finished` is read first: meanwhile more kernels may be submitted and finish.
        finished = LINE.unpack_from(self._map, gpu * LINE.size)[1]
        submitted = LINE.unpack_from(self._map, gpu * LINE.size)[0]
        return submitted, min(submitted, finished)

    def launches(self, gpu: int) -> int:
        """Return the calls that submitted kernels to a GPU; 0 from a library that does not count them."""
        return int(LINE.unpack_from(self._map, gpu * LINE.size)[2]) if gpu < GPUS else 0

    def placed(self, gpu: int) -> tuple[int, int]:
        """Return the launches on a GPU that ran on the SMs of a limit alone, and those that did not."""
        if gpu >= GPUS:
            return 0, 0
        placed, unplaced = PLACED.unpack_from(self._map, gpu * PLACED.size)
        return min(placed, MAX), min(unplaced, MAX)

    def worked_us(self, gpu: int, now_us: int) -> int | None:
        """Return the microseconds up to `now_us` (CLOCK_MONOTONIC) with kernels pending on a GPU. None if the library
        does not tell."""
        if gpu >= GPUS:
            return None
        word = int(WORKED.unpack_from(self._map, gpu * WORKED.size)[0])
        return (word >> 1) + now_us * (word & 1) if word else None

    def working_set(self, gpu: int) -> WorkingSet | None:
        """Return what the program used of a GPU's memory in its last turn; None if its library does not tell."""
        if gpu >= GPUS:
            return None
        used, resident, unwritten, told, *off = USED.unpack_from(self._map, USED_AT + gpu * USED.size)
        if told not in (ALONE, SHARES):
            return None
        used, unwritten, missed, over = (min(nbytes, MAX) for nbytes in (used, unwritten, *off))
        return WorkingSet(used, min(resident, used), unwritten, missed, over)

    def is_alone(self, gpu: int) -> bool:
        """Return whether the program shares no memory of a GPU with another process."""
        return gpu < GPUS and USED.unpack_from(self._map, USED_AT + gpu * USED.size)[3] == ALONE

    def close(self) -> None:
        """Close the daemon's end. The program keeps its own mapping."""
        self._map.close()
        os.close(self.descriptor)
