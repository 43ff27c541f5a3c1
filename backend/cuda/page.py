"""The page on which a CUDA program counts its kernels: one sealed file in memory a connection, which it alone writes.

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
"""Kernels submitted, kernels finished, and calls that submitted some."""

GPUS = 16
"""GG_DEVICES: GPUs that there is a line for."""

WORKED = struct.Struct("24xq32x")
"""Behind these three, for how long some were pending: twice the microseconds; and while some are, that less twice the
moment since when, and 1 more. 0 where the library does not tell (``totals.c``). In the machine's own order: other
words are read byte by byte, and this one changes in all of its bytes at once."""

STANDS = struct.Struct("<Q")
"""Behind the lines: 1 while the program stands by to be moved (``departure.h``)."""

USED = struct.Struct("<QQQQQQ16x")
"""Of another line for each GPU: bytes of the working set of the last turn, of those on the GPU, and bytes that the
program has not written since the host had them last; 0 from a library that does not tell, ALONE, or SHARES; and bytes
that the turn used beyond what was expected, and that were expected in vain."""
USED_AT = (GPUS + 1) * LINE.size
"""The byte from which on those are: behind a line in which STANDS is."""

ALONE, SHARES = 1, 2
"""Whether no memory of the program on that GPU is shared with another process, or some is."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A page that its writer truncates would kill the reader with SIGBUS."""


def stands(descriptor: int) -> bool:
    """Whether a page says that its program stands by. What it says of a program that is locked holds until that is
    unlocked. OSError."""
    raw = os.pread(descriptor, STANDS.size, GPUS * LINE.size)
    return len(raw) == STANDS.size and STANDS.unpack(raw)[0] == 1


class CounterPage:
    """The daemon's end of it. What is in there is the program's own word."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("ggroup-counters", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """To be handed to the program."""
        try:
            os.ftruncate(self.descriptor, SIZE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.descriptor, SIZE, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self.descriptor)
            raise

    def counts(self, gpu: int) -> tuple[int, int]:
        """Kernels submitted to a GPU, and finished there: never more than the former."""
        if gpu >= GPUS:
            return 0, 0
        # Finished is read first: in between more may be submitted, and finished.
        finished = LINE.unpack_from(self._map, gpu * LINE.size)[1]
        submitted = LINE.unpack_from(self._map, gpu * LINE.size)[0]
        return submitted, min(submitted, finished)

    def launches(self, gpu: int) -> int:
        """Calls that submitted kernels to a GPU; 0 of a library that does not count them."""
        return int(LINE.unpack_from(self._map, gpu * LINE.size)[2]) if gpu < GPUS else 0

    def worked_us(self, gpu: int, now_us: int) -> int | None:
        """Microseconds up to a moment of CLOCK_MONOTONIC for which some kernels were submitted to a GPU and not
        finished; None where the library does not tell."""
        if gpu >= GPUS:
            return None
        word = int(WORKED.unpack_from(self._map, gpu * WORKED.size)[0])
        return (word >> 1) + now_us * (word & 1) if word else None

    def working_set(self, gpu: int) -> WorkingSet | None:
        """What the program used of a GPU's memory in its last turn; None where its library does not tell."""
        if gpu >= GPUS:
            return None
        used, resident, unwritten, told, *off = USED.unpack_from(self._map, USED_AT + gpu * USED.size)
        if told not in (ALONE, SHARES):
            return None
        used, unwritten, missed, over = (min(nbytes, MAX) for nbytes in (used, unwritten, *off))
        return WorkingSet(used, min(resident, used), unwritten, missed, over)

    def is_alone(self, gpu: int) -> bool:
        """Whether the program shares no memory of a GPU with another process."""
        return gpu < GPUS and USED.unpack_from(self._map, USED_AT + gpu * USED.size)[3] == ALONE

    def close(self) -> None:
        """The program keeps its own mapping."""
        self._map.close()
        os.close(self.descriptor)
