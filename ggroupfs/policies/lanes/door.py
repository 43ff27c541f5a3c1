"""Where jobs come to the policy `lanes`: its socket, which job is at the other end, and what they say, line by line."""

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
"""Mode of the socket. Users that it is not for are kept out by the directory that it is in."""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """The socket of a policy, which is its file too. EADDRINUSE where another one listens."""
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
    """A policy that was killed leaves its socket behind."""
    if not path.is_socket():
        raise OSError(errno.EADDRINUSE, "there is something already that is no socket", os.fspath(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        code = probe.connect_ex(os.fspath(path))
    if code != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, "another program listens there already", os.fspath(path))
    path.unlink()


async def comers(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Every job that connects."""
    while True:
        await trio.lowlevel.wait_readable(listener)
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # what came has left again
            continue
        connection.setblocking(False)
        yield connection


@attrs.define(eq=False)
class Speaker:
    """The other end of a connection."""

    connection: socket.socket
    """Where it is spoken to; not blocking."""
    _lines: Lines = attrs.field(factory=Lines, init=False)
    _said: deque[str] = attrs.field(factory=deque, init=False)

    @property
    def pid(self) -> int:
        """The process that connected: its thread group, as seen from here; 0 for one that cannot be.

        It is the process that called connect(2), whichever of its children writes. So a job is this one process.
        """
        ucred = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return int(CREDENTIALS.unpack(ucred)[0])

    async def hear(self) -> str | None:
        """Its next line; None at the end. ValueError for a line that is none."""
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
        """Tells it something; whether it could be told. One that does not listen is hung up on: none waits for it."""
        try:
            self.connection.send(f"{line}\n".encode())
        except OSError:  # it is gone, or has let its buffer become full
            self.hang_up()
            return False
        return True

    def hang_up(self) -> None:
        """Nothing more is said. A job that reads it reads its end."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
