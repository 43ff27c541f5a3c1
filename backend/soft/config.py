"""The properties of a software GPU."""

from __future__ import annotations

import hashlib
import os
import uuid

import attrs

from backend.core.records import OVERCOMMIT

MIB = 1 << 20


@attrs.frozen
class SoftConfig:
    """Properties of a software GPU. The defaults are figures of an H200, where they were measured (docs/nvidia.md)."""

    capacity: int = 16 << 30
    """Size of the GPU memory, bytes."""
    page: int = 2 * MIB
    """Size of a page, bytes: the granule of Ghost's transparent GPU huge pages and of CUDA's virtual
    memory management.
    """
    out_bytes_per_s: int = 33_000_000_000
    """Bytes a second from the GPU to the host, remapping included, shared by moves and copies in that direction."""
    in_bytes_per_s: int = 33_000_000_000
    """Bytes a second from the host to the GPU, remapping included, shared by moves, copies and kernels that reach
    over the bus. Traffic in the other direction takes none of it.
    """
    batch: int = 64 * MIB
    """Bytes moved at once: between two batches other requests are taken, and a move may end early."""
    timeslice_us: int = 2048
    """Default timeslice of a TSG, microseconds."""
    switch_us: int = 197
    """Engine time lost when another TSG takes over, microseconds."""
    sms: int = 132
    """Streaming multiprocessors."""
    sm_step: int = 8
    """SMs in the smallest part of them that programs can be given."""
    overcommit: int = OVERCOMMIT
    """Memory that a process may allocate, resident or not, as a multiple of the capacity."""
    queue: int = 1 << 16
    """Kernels that a TSG may have queued."""
    faults: str = ""
    """A directory for tests: while it has a file named by a GPU's index, that GPU is lost. Empty for none."""
    identity: str = ""
    """Identity of the GPUs: two with the same identity and index are the same GPU, with the same UUID."""

    def uuid_of(self, index: int) -> str:
        """Return the UUID of the GPU with an index."""
        if not self.identity:
            return f"GPU-50f79900-0000-4000-8000-{index:012x}"
        name = os.fsencode(f"ggroup:{self.identity}:{index}")  # uuid5() takes no path that is not UTF-8
        return f"GPU-{uuid.UUID(bytes=hashlib.sha1(uuid.NAMESPACE_URL.bytes + name).digest()[:16], version=5)}"
