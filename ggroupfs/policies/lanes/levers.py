"""The levers of a tree under jobs that may be gone at any moment, for the policy `lanes` at work."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path

from ggroupfs.client import GONE, content, flat, require_tree
from ggroupfs.policies.face import Figures
from ggroupfs.policies.mounted import US, MountedPlatform

log = logging.getLogger(__name__)

LOST = (errno.ENOTCONN, errno.ECONNABORTED)
"""The errnos of the files of a tree whose daemon is gone."""


class Levers:
    """See :class:`ggroupfs.policies.face.Platform`, which it implements over :class:`MountedPlatform`.

    What cannot be done to one job is no reason to stop with the others: it is logged, or for who is gone passed over.
    Only a tree that is gone is an OSError.
    """

    def __init__(self, mount: Path, gpu: int, capacity: int) -> None:
        """A GPU of that tree, of which jobs may have `capacity` bytes."""
        self._mount = mount
        self._gpu = gpu
        self._capacity = capacity
        self._platform = MountedPlatform(mount, gpu)
        self._groups: dict[str, Path] = {}
        self.stuck: set[str] = set()
        """Jobs that could not be thawed, and are there still."""

    @property
    def capacity(self) -> int:
        return self._capacity

    def add(self, job: str, pid: int) -> None:
        """A process is a job; it is frozen. It need not have used the GPU yet. OSError where that cannot be."""
        with contextlib.suppress(FileExistsError):
            (self._mount / str(pid)).mkdir()
        group = self._mount / str(pid) / str(self._gpu)
        self._platform.add(job, group)
        self._groups[job] = group

    def discard(self, job: str) -> None:
        """A job is over: it is thawed, if it lives."""
        self.thaw(job)
        self.stuck.discard(job)
        self._platform.discard(job)
        self._groups.pop(job, None)

    def figures(self, job: str) -> Figures:
        """As the protocol has it; of who is gone, zeros."""
        return Figures(
            resident=self._number(job, "gmem.current"),
            swapped=self._number(job, "gmem.swap.current"),
            service=flat(self._read(job, "gcgroup.stat")).get("gpu_usec", 0) * US,
            frozen=bool(self._number(job, "compute.freeze")),
        )

    def thaw(self, job: str) -> None:
        self.stuck.discard(job)
        if not self._try(job, "cannot be thawed", lambda: self._platform.thaw(job)):
            self.stuck.add(job)

    def freeze(self, job: str) -> None:
        """It waits for its turn anyway; so one that cannot be frozen is merely trusted."""
        self._try(job, "cannot be frozen", lambda: self._platform.freeze(job))

    def reclaim(self, job: str, nbytes: int) -> None:
        self._try(job, f"{nbytes} bytes cannot be moved to the host", lambda: self._platform.reclaim(job, nbytes))

    def _number(self, job: str, name: str) -> int:
        return int(self._read(job, name) or 0)

    def _read(self, job: str, name: str) -> str:
        """Empty for who is gone."""
        try:
            return content(self._groups[job] / name)
        except OSError as error:
            self._pass_over(error)
            return ""

    def _try(self, job: str, what: str, lever: Callable[[], None]) -> bool:
        """Whether it was done, or needs not be."""
        try:
            lever()
        except OSError as error:
            if error.errno not in (*GONE, *LOST):
                log.warning("%s %s: %s", job, what, error.strerror)
                return False
            self._pass_over(error)
        return True

    def _pass_over(self, error: OSError) -> None:
        """Raises it, but where a job is gone and the tree is not."""
        if error.errno not in GONE:
            raise error
        require_tree(self._mount)
