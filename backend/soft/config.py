"""What kind of software GPU there is."""

from __future__ import annotations

import hashlib
import os
import uuid

import attrs

from backend.core.records import OVERCOMMIT

MIB = 1 << 20


@attrs.frozen
class SoftConfig:
    """What kind of GPU to be. The defaults are an H200's figures, where it was measured (docs/nvidia.md)."""

    capacity: int = 16 << 30
    """Bytes of GPU memory."""
    page: int = 2 * MIB
    """Bytes a page: the granule of Ghost's transparent GPU huge pages and of CUDA's virtual memory management."""
    out_bytes_per_s: int = 33_000_000_000
    """Bytes a second from the GPU to the host, remapping included: what moves and copies in that direction share."""
    in_bytes_per_s: int = 33_000_000_000
    """Bytes a second from the host to the GPU, remapping included: what moves, copies and kernels that reach over the
    bus share. What goes in the other direction takes nothing of it."""
    batch: int = 64 * MIB
    """Bytes moved at once: between two of these, other requests are taken, and a move may end early."""
    timeslice_us: int = 2048
    """Default timeslice of a TSG."""
    switch_us: int = 197
    """Engine time lost when another TSG takes over."""
    overcommit: int = OVERCOMMIT
    """Memory a process may allocate, resident or not, in capacities."""
    queue: int = 1 << 16
    """Kernels that a TSG may have queued."""
    faults: str = ""
    """A directory: while a file in it has the index of a GPU for its name, that GPU is lost. For tests; empty: none."""
    identity: str = ""
    """Whose GPUs they are: two with the same identity and index are the same GPU, by their UUID."""

    def uuid_of(self, index: int) -> str:
        """The UUID of the GPU with an index."""
        if not self.identity:
            return f"GPU-50f79900-0000-4000-8000-{index:012x}"
        name = os.fsencode(f"ggroup:{self.identity}:{index}")  # uuid5() takes no path that is not UTF-8
        return f"GPU-{uuid.UUID(bytes=hashlib.sha1(uuid.NAMESPACE_URL.bytes + name).digest()[:16], version=5)}"
