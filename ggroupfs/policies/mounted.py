"""The platform of a policy on a real machine: groups of a mounted tree, through their control files."""

from __future__ import annotations

import errno
from pathlib import Path

from backend.common.errors import fail
from ggroupfs.client import content, flat, require_tree
from ggroupfs.policies.face import Figures

US = 1000


class MountedPlatform:
    """A :class:`ggroupfs.policies.face.Platform` over one GPU of a tree.

    A lever is a write that blocks until it holds. A trio program calls it, or a whole
    :func:`ggroupfs.policies.face.carry_out`, in a thread. The errors are those of the control files.
    """

    def __init__(self, mount: Path, gpu: int = 0) -> None:
        """FileNotFoundError if there is no tree, or no such GPU in it."""
        require_tree(mount)
        self._capacity = int(content(mount / "gpus" / str(gpu) / "gmem.capacity"))
        self._groups: dict[str, Path] = {}

    def add(self, job: str, group: Path) -> None:
        """Take a process or slice, by its directory, as a job, and freeze it: a policy expects jobs to arrive paused.

        OSError if the group cannot be frozen.
        """
        _write(group / "compute.freeze", 1)
        self._groups[job] = group

    def discard(self, job: str) -> None:
        """Forget a job that is over. Its group is left as it is."""
        self._groups.pop(job, None)

    @property
    def capacity(self) -> int:
        return self._capacity

    def figures(self, job: str) -> Figures:
        """See the protocol. ENODATA if this machine cannot tell GPU time."""
        group = self._group(job)
        stat = flat(content(group / "gcgroup.stat"))
        usec = stat.get("gpu_usec", stat.get("gpu_usec_estimate"))
        if usec is None:
            raise fail(errno.ENODATA)
        return Figures(
            resident=int(content(group / "gmem.current")),
            swapped=int(content(group / "gmem.swap.current")),
            service=usec * US,
            frozen=content(group / "compute.freeze") == "1",
        )

    def thaw(self, job: str) -> None:
        _write(self._group(job) / "compute.freeze", 0)

    def freeze(self, job: str) -> None:
        _write(self._group(job) / "compute.freeze", 1)

    def reclaim(self, job: str, nbytes: int) -> None:
        """See the protocol. EAGAIN if less memory could be moved than `nbytes`."""
        if nbytes:
            _write(self._group(job) / "gmem.reclaim", nbytes)

    def _group(self, job: str) -> Path:
        if job not in self._groups:
            raise fail(errno.ENOENT)
        return self._groups[job]


def _write(file: Path, value: int) -> None:
    file.write_text(f"{value}\n")
