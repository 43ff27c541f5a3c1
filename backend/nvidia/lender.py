"""A process that duplicates descriptors of programs for the daemon, so that the daemon never holds a dangerous file.

A descriptor number of a program can be another file by the time it is duplicated. If it is a file that the program
serves itself, close(2) waits for the program (FUSE_FLUSH), in each process that holds it; no signal interrupts that
wait, and the process cannot end. So descriptors are duplicated and examined in this process, and are handed on only
if they are files of the device; any other is closed here, where no other process waits for it. This process is
expendable: the daemon never holds such a file, and ends whatever becomes of it.

pidfd_getfd(2) can also wait for a program: one that calls execve and thereby closes such a file. So each request has
a thread and a socket for the answer, and a call that does not return holds up no other request.

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
"""A request: a descriptor and the pid of its process. The pidfd and the socket for the answer are passed along."""
ANSWER = struct.Struct("i")
"""An answer: an errno; with 0 the duplicate is passed along."""
ANSWER_S = 2.0
"""Time limit of an answer, seconds; usually it takes 0.1 ms."""
LATE_S = 1.0
"""Seconds after which a call counts as stuck."""
STUCK = 16
"""Number of stuck calls for programs of one user from which on no descriptor of that user's programs is
duplicated, until some return. Closing a wrong file counts from its beginning. No user has that many by chance.
"""
SPARE = 2
"""Idle threads that are kept."""

_SYS_PIDFD_GETFD = 438  # the same number on every architecture (asm-generic/unistd.h)


def getfd(pidfd: int, fd: int) -> int:
    """Call pidfd_getfd(2)."""
    return syscalls.call(_SYS_PIDFD_GETFD, pidfd, fd, 0)


class Lender:
    """The daemon's end: starts the process where there is none, and asks it. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended = False

    def begin(self, number: int) -> None:
        """Start the process now, while no caller waits for it: Python takes a tenth of a second to start."""
        threading.Thread(target=self._begin, args=(number,), daemon=True).start()

    def _begin(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):  # the first request meets the error
            if self._socket is None and not self._ended:
                self._socket = _start(number)

    def get(self, pidfd: int, pid: int, fd: int, number: int) -> int:
        """Return a duplicate of descriptor `fd` of a process, if it is a file of device `number`. Raises OSError: EBADF
        where it is not, EPERM where too many calls for that user are stuck, ETIMEDOUT where this one is, ESRCH for
        a process that is gone, and others where this process lacks a resource.
        """
        for last in (False, True):  # a lender that was killed is replaced
            with contextlib.suppress(ConnectionError), self._asked(pidfd, pid, fd, number) as answer:
                raw, duplicates, flags, _ = socket.recv_fds(answer, ANSWER.size, 1, socket.MSG_CMSG_CLOEXEC)
                if raw:
                    return _lent(ANSWER.unpack(raw)[0], duplicates, flags)
            self._drop()
            if last:
                break
        raise OSError(errno.EIO, "descriptors are not lent: a process that does so is killed each time")

    def end(self) -> None:
        """Let the process end, now or when it can."""
        self._ended = True
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    @contextlib.contextmanager
    def _asked(self, pidfd: int, pid: int, fd: int, number: int) -> Iterator[socket.socket]:
        """Send a request, and yield the socket on which its answer comes."""
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
            # It leaves us at once: its new parent reaps it, whenever it ends.
            subprocess.run(
                [sys.executable, "-m", "backend.nvidia.lender", str(number)],
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,  # it must not keep ours open
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
    """The other end: the process that duplicates."""

    def __init__(self, end: socket.socket, number: int) -> None:
        self._end = end
        self._number = number
        self._lock = threading.Lock()
        self._idle = 0
        self._calls: dict[object, tuple[int, int | None, float]] = {}  # under way: whose, and when they are late

    def run(self, stays: bool = False) -> None:
        """Answer requests until the daemon is gone, in this thread and as many others as it takes."""
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
                return  # no descriptors are left here: the closed socket says that there is no answer
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
                os.close(duplicate)  # never returns if the process that serves it does not answer

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
    """Serve as a child of init, detached from the daemon."""
    if os.fork():
        os._exit(0)
    try:
        _Lending(socket.socket(fileno=0), int(sys.argv[1])).run(stays=True)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
