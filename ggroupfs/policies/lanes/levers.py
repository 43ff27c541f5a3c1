"""The levers of a tree for the running policy `lanes`. Its jobs may disappear at any moment."""

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
"""Errnos of the files of a tree after the end of its daemon."""


class Levers:
    """A :class:`ggroupfs.policies.face.Platform` over :class:`MountedPlatform` that survives the loss of jobs.

    A failure with one job must not stop the others, so it is logged, or passed over if the job is gone. OSError is
    raised only if the tree itself is gone.
    """

    def __init__(self, mount: Path, gpu: int, capacity: int) -> None:
        """Use one GPU of a tree, of which the jobs may have `capacity` bytes."""
        self._mount = mount
        self._gpu = gpu
        self._capacity = capacity
        self._platform = MountedPlatform(mount, gpu)
        self._groups: dict[str, Path] = {}
        self.stuck: set[str] = set()
        """Jobs that could not be thawed and still exist."""

    @property
    def capacity(self) -> int:
        return self._capacity

    def add(self, job: str, pid: int) -> None:
        """Take a process as a job, and freeze it. It need not have used the GPU yet. OSError if it cannot be frozen."""
        with contextlib.suppress(FileExistsError):
            (self._mount / str(pid)).mkdir()
        group = self._mount / str(pid) / str(self._gpu)
        self._platform.add(job, group)
        self._groups[job] = group

    def discard(self, job: str) -> None:
        """Forget a job that is over, and thaw it if it still lives."""
        self.thaw(job)
        self.stuck.discard(job)
        self._platform.discard(job)
        self._groups.pop(job, None)

    def figures(self, job: str) -> Figures:
        """See the protocol; zeros for a job that is gone."""
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
        """Freeze a waiting job.

        If that fails the job is trusted to wait for its turn, as the protocol asks of it anyway.
        """
        self._try(job, "cannot be frozen", lambda: self._platform.freeze(job))

    def reclaim(self, job: str, nbytes: int) -> None:
        self._try(job, f"{nbytes} bytes cannot be moved to the host", lambda: self._platform.reclaim(job, nbytes))

    def _number(self, job: str, name: str) -> int:
        return int(self._read(job, name) or 0)

    def _read(self, job: str, name: str) -> str:
        """Return the content of a job's file; empty if the job is gone."""
        try:
            return content(self._groups[job] / name)
        except OSError as error:
            self._pass_over(error)
            return ""

    def _try(self, job: str, what: str, lever: Callable[[], None]) -> bool:
        """Return whether the lever was pulled, or the job is gone."""
        try:
            lever()
        except OSError as error:
            if error.errno not in (*GONE, *LOST):
                log.warning("%s %s: %s", job, what, error.strerror)
                return False
            self._pass_over(error)
        return True

    def _pass_over(self, error: OSError) -> None:
        """Raise the error again, unless only the job is gone and the tree is still there."""
        if error.errno not in GONE:
            raise error
        require_tree(self._mount)
