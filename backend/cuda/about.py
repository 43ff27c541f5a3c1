"""The mark in a file of libggroup-cuda.so: the version of the messages and the features that it speaks."""

from __future__ import annotations

import errno
import os
import struct

import attrs

from backend.door.wire import CUDA_ALL, VERSION, Feature, names

MARK = struct.Struct("<16sQQ")
"""Layout of the mark, magic, version and features: ``struct about`` of backend/cuda/library/daemon/about.c."""
MAGIC = b"ggroup library:\0"
"""First field of the mark."""
LIBRARY_BYTES_MOST = 64 << 20
"""Most bytes of a file that are searched for the mark."""


@attrs.frozen
class About:
    """The abilities of a library."""

    version: int
    """Version of the messages (``backend.door.wire.VERSION``)."""
    features: Feature
    """Its features, including bits that this program does not know."""

    @property
    def misfit(self) -> str:
        """The reason why programs with that library cannot do all that this program can; empty where they can."""
        if self.version != VERSION:
            return f"speaks version {self.version}, and this program {VERSION}"
        lacks = CUDA_ALL & ~self.features
        return f"lacks {names(lacks)}" if lacks else ""


def about(path: str | os.PathLike[str]) -> About:
    """Return the abilities of the library in a file. OSError where the file cannot be read; with ENOEXEC where it has
    no mark, as a library older than the mark."""
    with open(path, "rb") as file:
        content = file.read(LIBRARY_BYTES_MOST)
    place = content.find(MAGIC)
    if place < 0 or len(content) < place + MARK.size:
        raise OSError(errno.ENOEXEC, "it does not say what it speaks", os.fspath(path))
    _, version, features = MARK.unpack_from(content, place)
    return About(version, Feature(features))
