"""Hold a process by a pidfd, so that nothing is ever done to a later process with its pid."""

from __future__ import annotations

import errno
import os
import select

from backend.common.errors import fail
from backend.process.identity import Process, is_alive
from backend.process.running import is_frozen, is_signalled


class Pinned:
    """A process held by its pidfd."""

    def __init__(self, process: Process) -> None:
        """Raises ProcessLookupError when the process is gone already, or its pid is another's."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        try:
            self.check()
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raise ProcessLookupError once the process has ended. For a later call to hit another process, this one
        would have to end, be reaped, and have its number reused in between.
        """
        if self._poll.poll(0) or not is_alive(self._process):
            raise fail(errno.ESRCH)

    def responds(self) -> None:
        """Raise OSError(EBUSY) for a process that is stopped or frozen. Its own threads do what the driver asks of
        it, so calls would hang until it goes on.
        """
        if is_signalled(self._process.pid):
            raise OSError(errno.EBUSY, "it is stopped by a signal or a debugger")
        if is_frozen(self._process.pid):
            raise OSError(errno.EBUSY, "its cgroup is frozen")

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self._pidfd)
