"""Report at once that a process exited, for thousands of processes with one file descriptor to wait on.

A pidfd becomes readable when its process exits (pidfd_open(2)). All pidfds are in one epoll set, which is itself a
file descriptor that trio can wait for. No polling, no thread, one task.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import select
import signal
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack

import trio

from backend.common.errors import fail
from backend.process.identity import Process, has_exited
from backend.process.looks import gone, verify

log = logging.getLogger(__name__)

AT_ONCE = 4
"""Exits that are reported before other tasks have a turn."""


class ExitWatch:
    """A watch on processes that calls back once for each of them that exits."""

    def __init__(self, exited: Callable[[Process], None]) -> None:
        self._exited = exited
        self._epoll = select.epoll()
        self._pidfds: dict[Process, int] = {}
        self._processes: dict[int, Process] = {}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < hard:  # one descriptor per process: 1024 would be the first limit to be reached
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def watch(self, process: Process) -> None:
        """Watch a process. Raises ProcessLookupError when it is gone already, or its pid is another's by now, and
        OSError(EBUSY) where it cannot be looked at.
        """
        if process in self._pidfds:
            return
        pidfd = os.pidfd_open(process.pid)
        try:
            await verify(process)  # after the open: now the pidfd can only be of that process
            if process in self._pidfds:  # it was watched meanwhile
                os.close(pidfd)
                return
            self._register(process, pidfd)
        except BaseException:
            os.close(pidfd)
            raise

    def take_over(self, processes: Iterable[Process]) -> Collection[Process]:
        """Watch processes known to an earlier daemon, before there are tasks; return those that are gone."""
        missing, mine = set(), ExitStack()
        with mine:  # if descriptors run out, no process is watched, and nothing stays open
            pidfds: dict[Process, int] = {}
            for process in processes:
                try:
                    pidfds[process] = os.pidfd_open(process.pid)
                except ProcessLookupError:
                    missing.add(process)
                else:
                    mine.callback(os.close, pidfds[process])
            missing.update(gone(pidfds))
            mine.pop_all()
        for process, pidfd in pidfds.items():
            if process in missing:
                os.close(pidfd)
            else:
                self._register(process, pidfd)
        return missing

    def _register(self, process: Process, pidfd: int) -> None:
        if self._epoll.closed:  # the process comes at the end of the mount
            raise fail(errno.ESRCH)
        self._epoll.register(pidfd, select.EPOLLIN)
        self._pidfds[process] = pidfd
        self._processes[pidfd] = process

    def watches(self, process: Process) -> bool:
        """Return whether that very process is watched; not a process that is about to be watched, or is gone."""
        return process in self._pidfds

    def lives(self, process: Process) -> bool:
        """Return whether a watched process has not ended. Does not wait for the process or look at it."""
        pidfd = self._pidfds.get(process)
        return pidfd is not None and not has_exited(pidfd)

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to that very process by its pidfd; 0 only checks that this could be done. Raises
        ProcessLookupError where the process is not watched, or has been reaped, and PermissionError where we
        may not signal it.
        """
        pidfd = self._pidfds.get(process)
        if pidfd is None:
            raise fail(errno.ESRCH)
        signal.pidfd_send_signal(pidfd, number)

    def unwatch(self, process: Process) -> None:
        """Stop watching a process."""
        pidfd = self._pidfds.pop(process, None)
        if pidfd is not None:
            del self._processes[pidfd]
            self._epoll.unregister(pidfd)
            os.close(pidfd)

    async def run(self) -> None:
        """Wait for exits until cancelled."""
        while True:
            await trio.lowlevel.wait_readable(self._epoll.fileno())
            for pidfd, _events in self._epoll.poll(0, AT_ONCE):
                process = self._processes[pidfd]
                self.unwatch(process)
                try:
                    self._exited(process)
                except Exception:  # the next process's exit has to be reported all the same
                    log.exception("process %d exited, and is not all gone", process.pid)

    def close(self) -> None:
        """Close every descriptor."""
        for process in list(self._pidfds):
            self.unwatch(process)
        self._epoll.close()
