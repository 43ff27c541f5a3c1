"""Learns at once that a process exited, for thousands of processes with one file descriptor to wait on.

A pidfd becomes readable when its process exits (pidfd_open(2)); all of them sit in one epoll set, which is itself
a file descriptor that trio can wait for. No polling, no thread, one task.
"""

from __future__ import annotations

import logging
import os
import resource
import select
from collections.abc import Callable

import trio

from backend.identity import Process, is_alive

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Exits that are told before everybody else has a turn."""


class ExitWatch:
    """Calls back once for each watched process that exits."""

    def __init__(self, exited: Callable[[Process], None]) -> None:
        self._exited = exited
        self._epoll = select.epoll()
        self._pidfds: dict[Process, int] = {}
        self._processes: dict[int, Process] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # one descriptor a process: 1024 would be the first limit met
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def watch(self, process: Process) -> None:
        """Watches a process. ProcessLookupError when it is gone already, or its pid is another's by now."""
        if process in self._pidfds:
            return
        pidfd = os.pidfd_open(process.pid)
        try:
            if not is_alive(process):  # checked after the open: now the pidfd can only be of that process
                raise ProcessLookupError(process.pid)
            self._epoll.register(pidfd, select.EPOLLIN)
        except BaseException:
            os.close(pidfd)
            raise
        self._pidfds[process] = pidfd
        self._processes[pidfd] = process

    def unwatch(self, process: Process) -> None:
        """Stops watching."""
        pidfd = self._pidfds.pop(process, None)
        if pidfd is not None:
            del self._processes[pidfd]
            self._epoll.unregister(pidfd)
            os.close(pidfd)

    async def run(self) -> None:
        """Waits for exits until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for pidfd, _events in self._epoll.poll(0, AT_ONCE):
                process = self._processes[pidfd]
                self.unwatch(process)
                try:
                    self._exited(process)
                except Exception:  # the next one's exit is to be seen all the same
                    log.exception("process %d exited, and is not all gone", process.pid)

    def close(self) -> None:
        """Gives every descriptor back."""
        for process in list(self._pidfds):
            self.unwatch(process)
        self._epoll.close()
