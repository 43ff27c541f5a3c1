"""The process that duplicates descriptors of programs for the daemon, since a wrong one may never be closed.

What a program has at a number can be another file by the time that it is duplicated; and close(2) of one that the
program serves itself waits for the program (FUSE_FLUSH), in each process that has it, to which no signal comes through,
and which does not end either. So it is duplicated here, looked at here, and handed on only if it is a file of the
device; else it is closed here, where none waits for it. This process is expendable: the daemon has no such file at
any time, and ends whatever becomes of it.

pidfd_getfd(2) can wait for a program, too, that executes another one and has such a file closed by that. Each request
has a thread, and a socket for the answer: a process that does not come back keeps no other.

    -m backend.nvidia.lender NUMBER    serves the socket that is its standard input
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from backend.common import interpreter, syscalls
from backend.common.errors import errno_of, fail
from backend.nvidia import device
from backend.process.identity import owner_of

REQUEST = struct.Struct("ii")
"""Which descriptor of which process. Its pidfd comes along, and the socket for the answer."""
ANSWER = struct.Struct("i")
"""An errno; with 0 comes the duplicate."""
ANSWER_S = 2.0
"""Seconds for an answer, which takes 0.1 ms."""
LATE_S = 1.0
"""Seconds after which a call counts as one that does not come back."""
STUCK = 16
"""Calls for a user's programs that do not come back, those that close a wrong file from their beginning. Of one that
has as many no descriptor is duplicated any more until some do: no user has that many by chance."""
SPARE = 2
"""Threads that are kept when they have nothing to do."""

_SYS_PIDFD_GETFD = 438  # the same number on every architecture (asm-generic/unistd.h)


def getfd(pidfd: int, fd: int) -> int:
    """pidfd_getfd(2)."""
    return syscalls.call(_SYS_PIDFD_GETFD, pidfd, fd, 0)


class Lender:
    """The daemon's side: starts one where there is none, and asks it. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended = False

    def begin(self, number: int) -> None:
        """Has it start now, while nothing waits for it: Python takes a tenth of a second to begin."""
        threading.Thread(target=self._begin, args=(number,), daemon=True).start()

    def _begin(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # the first that asks meets what is wrong
            if self._socket is None and not self._ended:
                self._socket = _start(number)

    def get(self, pidfd: int, pid: int, fd: int, number: int) -> int:
        """A duplicate of descriptor `fd` of a process, if it is a file of device `number`. OSError: EBADF where it is
        none, EPERM where too much of its user's does not come back, ETIMEDOUT where this does not, ESRCH, or what is
        short here."""
        for last in (False, True):  # one that was killed is replaced
            with contextlib.suppress(ConnectionError), self._asked(pidfd, pid, fd, number) as answer:
                raw, duplicates, flags, _ = socket.recv_fds(answer, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
                if raw:
                    return _lent(ANSWER.unpack(raw)[0], duplicates, flags)
            self._drop()
            if last:
                break
        raise OSError(errno.EIO, "descriptors are not lent: a process that does so is killed each time")

    def end(self) -> None:
        """Lets it end, now or when it can."""
        self._ended = True
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    @contextlib.contextmanager
    def _asked(self, pidfd: int, pid: int, fd: int, number: int) -> Iterator[socket.socket]:
        """Where the answer comes."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.settimeout(ANSWER_S)
            with its, self._lock:
                if self._socket is None:
                    self._socket = _start(number)
                socket.send_fds(self._socket, [REQUEST.pack(fd, pid)], [pidfd, its.fileno()])
            yield ours


def _lent(code: int, duplicates: Sequence[int], flags: int) -> int:
    if not code and not duplicates:
        code = errno.EMFILE if flags & socket.MSG_CTRUNC else errno.EIO
    if code:
        raise fail(code)
    return duplicates[0]


def _start(number: int) -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with its:
            ours.settimeout(ANSWER_S)  # to send
            # It leaves us at once: its new parent waits for it, whenever it ends.
            subprocess.run(
                [sys.executable, "-m", "backend.nvidia.lender", str(number)],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,  # ours are not kept open by it
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=interpreter.environment(),
                start_new_session=True,
                check=True,
            )
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
        self._lock = threading.Lock()
        self._idle = 0
        self._calls: dict[object, tuple[int, int | None, float]] = {}  # under way: whose, and when they are late

    def run(self, stays: bool = False) -> None:
        """Answers until the daemon is gone, in this thread and as many others as it takes."""
        while True:
            with self._lock:
                if self._idle >= SPARE and not stays:
                    return
                self._idle += 1
            raw, given, _, _ = socket.recv_fds(self._end, REQUEST.size, 2)
            if not raw:
                os._exit(0)
            with self._lock:
                self._idle -= 1
                none_left = not self._idle
            if none_left:
                threading.Thread(target=self.run, daemon=True).start()
            fd, pid = REQUEST.unpack(raw)
            self._answer(fd, pid, given)

    def _answer(self, fd: int, pid: int, given: Sequence[int]) -> None:
        code, duplicate, right = 0, -1, False
        try:
            if len(given) != 2:
                return  # descriptors are short here: the end of its socket says that there is no answer
            duplicate = self._get(given[0], pid, fd)
            right = device.is_usable(duplicate, self._number)
            code = 0 if right else errno.EBADF
        except OSError as error:
            code = errno_of(error)
        finally:
            if given[1:]:
                with contextlib.suppress(OSError), socket.socket(fileno=given[1]) as answer:
                    socket.send_fds(answer, [ANSWER.pack(code)], [duplicate] if right else [])
            for mine in given[:1]:
                os.close(mine)
        if right:
            os.close(duplicate)
        elif duplicate >= 0:
            with self._under_way(pid, owner_of(pid), 0.0), contextlib.suppress(OSError):
                os.close(duplicate)  # not seen again where it is served by a process that does not answer

    def _get(self, pidfd: int, pid: int, fd: int) -> int:
        if self._calls and self._stuck(owner_of(pid)) >= STUCK:
            raise fail(errno.EPERM)
        with self._under_way(pid, None, LATE_S):
            return getfd(pidfd, fd)

    def _stuck(self, uid: int | None) -> int:
        now = time.monotonic()
        with self._lock:
            late = [(pid, whose) for pid, whose, since in self._calls.values() if since <= now]
        return sum(uid == (owner_of(pid) if whose is None else whose) for pid, whose in late)

    @contextlib.contextmanager
    def _under_way(self, pid: int, uid: int | None, seconds: float) -> Iterator[None]:
        token = object()
        with self._lock:
            self._calls[token] = pid, uid, time.monotonic() + seconds
        try:
            yield
        finally:
            with self._lock:
                del self._calls[token]


def main() -> None:
    """Serves, as the child of no process of ours."""
    if os.fork():
        os._exit(0)
    try:
        _Lending(socket.socket(fileno=0), int(sys.argv[1])).run(stays=True)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
