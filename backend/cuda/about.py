"""What a file of libggroup-cuda.so says of itself: the version of the messages and the features that it speaks."""

from __future__ import annotations

import errno
import os
import struct

import attrs

from backend.door.wire import CUDA, VERSION, Feature, names

MARK = struct.Struct("<16sQQ")
"""Magic, version and features: ``struct about`` of backend/cuda/library/daemon/about.c."""
MAGIC = b"ggroup library:\0"
"""First field of the mark."""
LIBRARY_BYTES_MOST = 64 << 20
"""Bytes of a file that is taken for the library, at most."""


@attrs.frozen
class About:
    """What a library speaks."""

    version: int
    """Version of the messages (``backend.door.wire.VERSION``)."""
    features: Feature
    """What it can; bits that this program does not know are among them."""

    @property
    def misfit(self) -> str:
        """Why programs with that library cannot do all that this program can; empty where they can."""
        if self.version != VERSION:
            return f"speaks version {self.version}, and this program {VERSION}"
        lacks = CUDA & ~self.features
        return f"lacks {names(lacks)}" if lacks else ""


def about(path: str | os.PathLike[str]) -> About:
    """Return what the library in a file says. OSError where it cannot be read; with ENOEXEC where it says nothing, as a
    library does that is older than the mark.
    """
    with open(path, "rb") as file:
        content = file.read(LIBRARY_BYTES_MOST)
    place = content.find(MAGIC)
    if place < 0 or len(content) < place + MARK.size:
        raise OSError(errno.ENOEXEC, "it does not say what it speaks", os.fspath(path))
    _, version, features = MARK.unpack_from(content, place)
    return About(version, Feature(features))
