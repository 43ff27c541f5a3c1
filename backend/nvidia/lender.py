"""The process that duplicates descriptors of programs for the daemon, since closing a wrong one may take for ever.

What a program has at a number can be another file by the time that it is duplicated; and close(2) of one that the
program serves itself waits for the program (FUSE_FLUSH), in each process that has it, to which no signal comes through,
and which does not end either. So it is duplicated here, looked at here, and handed on only if it is a file of the
device; else it is closed here, in a thread that nobody waits for. This process is expendable: the daemon has no such
file at any time, and ends whatever becomes of it.

    -m backend.nvidia.lender NUMBER    serves the socket that is its standard input
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter

from backend import interpreter
from backend.errors import errno_of, fail
from backend.identity import owner_of
from backend.nvidia import device

REQUEST = struct.Struct("ii")
"""Which descriptor of which process; the pidfd comes along."""
ANSWER = struct.Struct("i")
"""An errno; with 0 comes the duplicate."""
ANSWER_S = 5.0
"""Seconds for an answer, which takes 0.1 ms."""
WRONG = 16
"""Files of a user's programs that may be under way to be closed. Of one that has as many no descriptor is duplicated
any more until some are: nobody has that many by chance."""

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_PIDFD_GETFD = 438  # the same number on every architecture (asm-generic/unistd.h)


def getfd(pidfd: int, fd: int) -> int:
    """pidfd_getfd(2)."""
    result: int = _libc.syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


class Lender:
    """The daemon's side: starts one where there is none, and asks it. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def get(self, pidfd: int, pid: int, fd: int, number: int) -> int:
        """A duplicate of descriptor `fd` of a process, if it is a file of device `number`. OSError: EBADF where it is
        none, EPERM where its user has too many that cannot be closed, ESRCH, or what is short here."""
        with self._lock:
            for fresh in (False, True):  # one that was killed is replaced at once
                fresh |= self._socket is None
                if self._socket is None:
                    self._socket = self._start(number)
                try:
                    return self._ask(self._socket, pidfd, pid, fd)
                except (ConnectionError, TimeoutError) as error:
                    self.end()
                    if fresh:
                        raise OSError(errno.EIO, f"descriptors are not lent: {error}") from None
        raise AssertionError("not reached")

    def end(self) -> None:
        """Lets it end, now or when it can."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @staticmethod
    def _ask(end: socket.socket, pidfd: int, pid: int, fd: int) -> int:
        socket.send_fds(end, [REQUEST.pack(fd, pid)], [pidfd])
        raw, duplicates, flags, _ = socket.recv_fds(end, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
        if len(raw) != ANSWER.size:
            raise ConnectionResetError(errno.ECONNRESET, "it has ended")
        code = ANSWER.unpack(raw)[0]
        if not code and not duplicates:
            code = errno.EMFILE if flags & socket.MSG_CTRUNC else errno.EIO
        if code:
            raise OSError(code, os.strerror(code))
        return duplicates[0]

    @staticmethod
    def _start(number: int) -> socket.socket:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            try:
                words = [sys.executable, "-m", "backend.nvidia.lender", str(number)]
                # It leaves us at once: whoever is our parent then waits for it, whenever it ends.
                subprocess.run(
                    words,
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,  # ours are not kept open by it
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=interpreter.environment(),
                    start_new_session=True,
                    check=True,
                )
                ours.settimeout(ANSWER_S)
            except subprocess.CalledProcessError as error:
                ours.close()
                raise OSError(errno.EAGAIN, f"descriptors are not lent: {error}") from None
            except BaseException:
                ours.close()
                raise
        return ours


class _Lending:
    """The other side."""

    def __init__(self, end: socket.socket, number: int) -> None:
        self._end = end
        self._number = number
        self._wrong: Counter[int | None] = Counter()

    def run(self) -> None:
        """Answers until the daemon is gone."""
        while True:
            raw, pidfds, _, _ = socket.recv_fds(self._end, REQUEST.size, 1)
            if not raw:
                return
            fd, pid = REQUEST.unpack(raw)
            code, lent = 0, list[int]()
            try:
                lent = [self._get(pidfds[0], pid, fd)] if pidfds else []
                code = 0 if pidfds else errno.EMFILE
            except OSError as error:
                code = errno_of(error)
            socket.send_fds(self._end, [ANSWER.pack(code)], lent)
            for mine in (*pidfds, *lent):
                os.close(mine)

    def _get(self, pidfd: int, pid: int, fd: int) -> int:
        if self._wrong and self._wrong[owner_of(pid)] >= WRONG:
            raise fail(errno.EPERM)
        duplicate = getfd(pidfd, fd)
        if device.is_usable(duplicate, self._number):
            return duplicate
        uid = owner_of(pid)
        self._wrong[uid] += 1
        threading.Thread(target=self._close, args=(duplicate, uid), daemon=True).start()
        raise fail(errno.EBADF)

    def _close(self, wrong: int, uid: int | None) -> None:
        """Not seen again where it is served by who does not answer."""
        with contextlib.suppress(OSError):  # what close(2) says of another's file is nothing to us
            os.close(wrong)
        self._wrong[uid] -= 1


def main() -> None:
    """Serves, as nobody's child."""
    if os.fork():
        os._exit(0)
    try:
        with contextlib.suppress(ConnectionError):
            _Lending(socket.socket(fileno=0), int(sys.argv[1])).run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
