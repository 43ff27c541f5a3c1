"""Identify the process at the other end of a unix socket, as the kernel vouches for it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading

from backend.common.errors import fail
from backend.process import procfs
from backend.process.identity import Process, has_exited, identify, is_alive, started, tgid_of
from backend.process.looks import look

SO_PEERPIDFD = 77
"""Socket option of Linux 6.5 (asm-generic/socket.h); the socket module has it from Python 3.14 on."""


class _Stat:
    """A file of /proc that is read in a thread which may not return; its last user closes it."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError if the process is gone."""
        self._fd = procfs.open_stat(pid)
        self._lock = threading.Lock()
        self._users = 1

    def read(self) -> procfs.Stat:
        """Read the file, in the thread. Raises ProcessLookupError if the process is gone."""
        with self._lock:
            if not self._users:
                raise fail(errno.ESRCH)
            self._users += 1
        try:
            return procfs.read_stat(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        """Stop using the file."""
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self._fd)


class Caller:
    """The process at the other end of a server's connection, with the descriptors that identifying it takes.

    The pid is that of connect(2) or socketpair(2), translated to our namespace. A process that connects, hands the
    socket to a child and dies leaves a pid behind that another process may have by the time it is read. So the kernel
    is asked for a pidfd, which never refers to another process: if it is alive after the process was identified, the
    identity is right. Before Linux 6.5 there is no such pidfd, and a program that recycles pids as fast as we accept
    can speak for another one.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Raises ProcessLookupError if the process is gone. Does not wait for it."""
        with contextlib.ExitStack() as stack:
            self._pidfd = _pidfd_of(connection)
            if self._pidfd is not None:
                stack.callback(os.close, self._pidfd)
            self._pid = tgid_of(pid_of_peer(connection))
            self._stat = _Stat(self._pid)
            stack.callback(self._stat.close)
            self._opened = stack.pop_all()

    async def identify(self) -> Process:
        """Return the process. Raises ProcessLookupError if it is gone, OSError as
        :func:`backend.process.looks.look`.
        """
        found = Process(self._pid, started(await look(self._pid, self._stat.read)))
        if self._pidfd is not None and has_exited(self._pidfd):
            raise fail(errno.ESRCH)
        return found

    def close(self) -> None:
        """Close the descriptors."""
        self._opened.close()


async def peer_of(connection: socket.socket) -> Process:
    """Return the process at the other end, identified as by :class:`Caller`."""
    with contextlib.closing(Caller(connection)) as caller:
        return await caller.identify()


def pidfd_of_peer(connection: socket.socket) -> int:
    """Return a pidfd of the process at the other end of a unix socket; for a server, the one that called listen(2).
    It never refers to another process. Raises ProcessLookupError where that is gone, or invisible from this pid
    namespace.

    Before Linux 6.5 the pid of SO_PEERCRED is opened, and its start time has to be the same before and after. A
    process that ended before, and whose pid is another's by now, no longer answers at that socket. This may wait
    (:func:`backend.process.identity.start_time`), so it is for root's commands, on a daemon of root's.
    """
    pid = pid_of_peer(connection)
    if not pid:
        raise fail(errno.ESRCH)
    given = _pidfd_of(connection)
    if given is not None:
        return given
    process = identify(tgid_of(pid))
    pidfd = os.pidfd_open(process.pid)
    if not is_alive(process):
        os.close(pidfd)
        raise fail(errno.ESRCH)
    return pidfd


def pid_of_peer(connection: socket.socket) -> int:
    """Return the peer's pid in our pid namespace; 0 where it has none that is visible here. Only a name, for
    /proc and messages.
    """
    return _peer(connection)[0]


def user_of(connection: socket.socket) -> int:
    """Return the user at the other end of a unix socket."""
    return _peer(connection)[1]


def _pidfd_of(connection: socket.socket) -> int | None:
    """Return the kernel's own pidfd of the process at the other end; None before Linux 6.5. Raises ProcessLookupError
    where that was reaped.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, struct.calcsize("i"))
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return None
        if error.errno in (errno.EINVAL, errno.ESRCH):
            raise fail(errno.ESRCH) from None
        raise
    return int(struct.unpack("i", raw)[0])


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the other end (unix(7), SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid
