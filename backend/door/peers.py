"""Who is at the other end of a unix socket, as the kernel vouches for it."""

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
"""Linux 6.5 (asm-generic/socket.h); the socket module has it from Python 3.14 on."""


class _Stat:
    """A file of /proc that is read in a thread, which may not come back: closed by whoever leaves it last."""

    def __init__(self, pid: int) -> None:
        """ProcessLookupError if it is gone."""
        self._fd = procfs.open_stat(pid)
        self._lock = threading.Lock()
        self._users = 1

    def read(self) -> procfs.Stat:
        """In the thread. ProcessLookupError if it is gone."""
        with self._lock:
            if not self._users:
                raise fail(errno.ESRCH)
            self._users += 1
        try:
            return procfs.read_stat(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        """Leaves it."""
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self._fd)


class Caller:
    """The process at the other end, of a server: with all descriptors that it takes to know which one it is.

    The pid is that of connect(2) or socketpair(2), translated to our namespace. Who connects, hands the socket to a
    child and dies leaves a pid behind that may be another's by the time that it is read. So the kernel is asked for a
    pidfd, which is never another's: does it live after the process was identified, then that is it. Before Linux 6.5
    there is none, and who recycles pids as fast as we accept can speak for another.
    """

    def __init__(self, connection: socket.socket) -> None:
        """ProcessLookupError if it is gone. Waits for nobody."""
        with contextlib.ExitStack() as stack:
            self._pidfd = _pidfd_of(connection)
            if self._pidfd is not None:
                stack.callback(os.close, self._pidfd)
            self._pid = tgid_of(pid_of_peer(connection))
            self._stat = _Stat(self._pid)
            stack.callback(self._stat.close)
            self._opened = stack.pop_all()

    async def identify(self) -> Process:
        """Which one. ProcessLookupError if it is gone; OSError as for :func:`backend.process.looks.look`."""
        found = Process(self._pid, started(await look(self._pid, self._stat.read)))
        if self._pidfd is not None and has_exited(self._pidfd):
            raise fail(errno.ESRCH)
        return found

    def close(self) -> None:
        """Gives the descriptors back."""
        self._opened.close()


async def peer_of(connection: socket.socket) -> Process:
    """As :class:`Caller` says."""
    with contextlib.closing(Caller(connection)) as caller:
        return await caller.identify()


def pidfd_of_peer(connection: socket.socket) -> int:
    """A pidfd of the process at the other end of a unix socket: of a server, that which called listen(2). It is of no
    other one. ProcessLookupError where it is gone, or not to be seen from this pid namespace.

    Before Linux 6.5 the pid of SO_PEERCRED is opened, and it has to be a process of the same start time before and
    after. One that ended before, and whose pid is another's by now, does not answer at that socket any more. It may
    have us wait (:func:`backend.process.identity.start_time`): for root's commands, of a daemon of root's.
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
    """Its pid in our pid namespace, 0 where it is in none that is to be seen from here. A name, for words and /proc."""
    return _peer(connection)[0]


def user_of(connection: socket.socket) -> int:
    """The user at the other end of a unix socket."""
    return _peer(connection)[1]


def _pidfd_of(connection: socket.socket) -> int | None:
    """The kernel's own of the process at the other end; None before Linux 6.5. ProcessLookupError where it was
    reaped."""
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
    """Pid, uid and gid of the other end (unix(7), SO_PEERCRED)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid
