"""A process limits itself before it executes a program: `ggroupfs run`, for programs without the library."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Sequence

from backend.common.errors import fail
from backend.door.environment import Level, messages
from backend.door.peers import user_of
from backend.door.wire import CUDA_ALL, SIZE, SOFT, STATUSES, VERSION, Feature, Message, Op
from backend.process import procfs

ANSWER_S = 15.0
"""Seconds that a daemon has for all its answers together. The library in CUDA programs gives it as long for each one
(ANSWER of daemon/session.h).
"""

UNNAMED = 65534
"""Uid that the kernel reports for a user without a number in this user namespace (fs.overflowuid)."""


def limit_self(path: str | os.PathLike[str], levels: Sequence[Level]) -> bool:
    """Put this process into families of the daemon that listens at `path`, and into the tree on every GPU. Return
    False where that daemon is of a version without families.

    Raises OSError: the daemon's refusal, EPERM for a listener that is neither root's nor this user's, EPROTO for a
    malformed answer, ETIMEDOUT, or an error of the socket.
    """
    with _Line(path) as line:
        features = line.ask(Op.HELLO, VERSION, CUDA_ALL | SOFT)[3]
        if not features & Feature.FAMILY:
            return False
        for op, args in messages(levels, everywhere=True):
            line.ask(op, *args)
        return True


class _Line(contextlib.AbstractContextManager["_Line"]):
    """A connection to a daemon, with `ANSWER_S` seconds in all."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._end = time.monotonic() + ANSWER_S
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._left().connect(os.fspath(path))
            if not _may_be_daemon(user_of(self._socket)):
                raise fail(errno.EPERM)
        except BaseException as error:
            self._socket.close()
            raise _numbered(error) from None

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def ask(self, op: Op, *args: int) -> tuple[int, ...]:
        """Send a request and return the arguments of its answer. Raises OSError as :func:`limit_self`."""
        try:
            self._left().sendall(Message(op, 1, 0, args).encode())
            while True:
                raw = self._left().recv(SIZE + 1)
                if not raw:
                    raise fail(errno.ECONNRESET)
                message = _decoded(raw)
                if message.reply:
                    return message.check().args
        except TimeoutError as error:
            raise _numbered(error) from None

    def _left(self) -> socket.socket:
        """Return the socket, limited to the time that is left. Raises TimeoutError."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        return self._socket


def _numbered(error: BaseException) -> BaseException:
    """Return an error with its errno: Python's TimeoutError may have none."""
    return fail(errno.ETIMEDOUT) if isinstance(error, TimeoutError) and not error.errno else error


def _decoded(raw: bytes) -> Message:
    """Return the message in `raw`. Raises OSError(EPROTO)."""
    try:
        message = Message.decode(raw)
    except ValueError:
        raise fail(errno.EPROTO) from None
    if message.status not in STATUSES:
        raise fail(errno.EPROTO)
    return message


def _may_be_daemon(uid: int) -> bool:
    """Return whether a listener of that user may be one of our daemons, by the same rule as the library in CUDA
    programs (daemon/link.c). In a container with a user namespace, root outside has no number, nor has any other user
    outside; only those can have put a socket at the path from there.
    """
    return uid in (0, os.geteuid()) or (uid == UNNAMED and _some_unnamed())


def _some_unnamed() -> bool:
    """Return whether some users have no number here: not in the initial user namespace, which maps all to themselves
    (user_namespaces(7)).
    """
    try:
        maps = procfs.lines(procfs.of_process("self", "uid_map"))
    except OSError:
        return False
    return [procfs.words(line)[2:] for line in maps] != [[b"4294967295"]]
