"""The page of shared memory on which a program is told what to do, and tells what it did, as in tests/bench/gpu.

Passes done (u64 @0), ready (u64 @8), words wrong (u64 @16), stop (u32 @24, set by the caller), error (u32 @28), go (u32
@32, set by the caller: the number of the round that is wanted), over (u32 @36: of the last round that is over).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

PASSES, READY, WRONG = 0, 8, 16
STOP, ERROR, GO, OVER = 24, 28, 32, 36
UNKNOWN = (1 << 64) - 1
"""Words wrong of a program that has not been told to stop."""


class Page:
    """One page, mapped."""

    def __init__(self, path: str) -> None:
        """A page at `path`; made there where there is none, for a run by hand."""
        if not Path(path).exists():
            Path(path).write_bytes(bytes(4096))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4096)

    def u32(self, offset: int) -> int:
        """A word of 32 bits."""
        return int(struct.unpack_from("<I", self._map, offset)[0])

    def u64(self, offset: int) -> int:
        """A word of 64 bits."""
        return int(struct.unpack_from("<Q", self._map, offset)[0])

    def set32(self, offset: int, value: int) -> None:
        """Write a word of 32 bits."""
        struct.pack_into("<I", self._map, offset, value)

    def set64(self, offset: int, value: int) -> None:
        """Write a word of 64 bits."""
        struct.pack_into("<Q", self._map, offset, value)

    @property
    def stop(self) -> bool:
        """Whether the caller wants an end."""
        return self.u32(STOP) != 0


def whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
