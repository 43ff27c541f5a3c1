"""The socket of the policy `lanes`: accepting jobs, identifying the process of each, and exchanging lines with it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import attrs
import trio

from ggroupfs.client.protocol import Lines

CREDENTIALS = struct.Struct("iII")
"""struct ucred: pid, uid, gid (unix(7))."""
BACKLOG = 128
MODE = 0o666
"""Mode of the socket. The directory that contains it restricts which users can connect."""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """Listen at `path` and remove the file at the end. EADDRINUSE if another program listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as listener:
        try:
            listener.bind(os.fspath(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, error.strerror or str(error), os.fspath(path)) from None
            _discard_stale(path)
            listener.bind(os.fspath(path))
        try:
            path.chmod(MODE)
            listener.listen(BACKLOG)
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _discard_stale(path: Path) -> None:
    """Remove the socket that a killed policy left behind. EADDRINUSE if the file is in use, or is not a socket."""
    if not path.is_socket():
        raise OSError(errno.EADDRINUSE, "there is something already that is no socket", os.fspath(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        code = probe.connect_ex(os.fspath(path))
    if code != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, "another program listens there already", os.fspath(path))
    path.unlink()


async def comers(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield the connection of every job that connects."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # the job that connected has left again
            continue
        connection.setblocking(False)
        yield connection


@attrs.define(eq=False)
class Speaker:
    """The job at the other end of a connection."""

    connection: socket.socket
    """The connection; not blocking."""
    _lines: Lines = attrs.field(factory=Lines, init=False)
    _said: deque[str] = attrs.field(factory=deque, init=False)

    @property
    def pid(self) -> int:
        """The process that connected, a thread group, as a pid in this pid namespace; 0 if it has none here.

        It is the process that called connect(2), even if one of its children writes. So a job is this one process.
        """
        ucred = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return int(CREDENTIALS.unpack(ucred)[0])

    async def hear(self) -> str | None:
        """Return the next line of the job, or None at the end. ValueError for bytes that are not a line."""
        while not self._said:
            await trio.lowlevel.wait_readable(self.connection)
            try:
                data = self.connection.recv(4096)
            except BlockingIOError:
                continue
            except ConnectionError:
                return None
            if not data:
                return None
            self._said += self._lines.feed(data)
        return self._said.popleft()

    def say(self, line: str) -> bool:
        """Send a line, and return whether that worked.

        A job that does not read is hung up on, so none blocks the policy.
        """
        try:
            self.connection.send(f"{line}\n".encode())
        except OSError:  # the job is gone, or has let its buffer become full
            self.hang_up()
            return False
        return True

    def hang_up(self) -> None:
        """Shut the connection down. A job that reads from it reads the end of the stream."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
