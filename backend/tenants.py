"""The door of a tree: programs come in over a unix socket. Who they are is what the kernel says, never what they say.

What they say after that is the business of a :class:`Session`: of the software GPU (:mod:`backend.soft.server`), or of
the library in CUDA programs (:mod:`backend.cuda.server`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import trio

from backend.errors import fail
from backend.identity import Process, peer_of, user_of
from backend.wire import SIZE, Message, Op

log = logging.getLogger(__name__)

ACCEPT_AGAIN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""What accept(2) may say without the listener being broken."""

ACCEPT_AGAIN_S = 0.1

CONNECTIONS = 4096
"""Connections that one user may have: nobody can use up the daemon's descriptors for all others."""

Connection = trio.socket.SocketType


class Session(Protocol):
    """One connection, and what it opened."""

    process: Process
    """Who is at the other end."""

    async def run(self) -> None:
        """Serves it until the other end is closed, or says what is no message."""

    def close(self) -> None:
        """Gives back what it holds."""


@contextlib.contextmanager
def listening(path: Path) -> Iterator[Connection]:
    """A SEQPACKET socket at `path`, for everybody on the machine, removed at the end.

    What lies there already is a leftover: the path carries the mount's device number, which is ours alone. Once our
    tree is unmounted it may be another's, and what then lies there is left to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(os.fspath(path))
        stack.callback(_remove, path, os.stat(path).st_ino)
        path.chmod(0o666)
        listener.listen(128)
        yield stack.enter_context(contextlib.closing(trio.socket.from_stdlib_socket(listener)))


def _remove(path: Path, inode: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == inode:
            path.unlink()


async def serve(listener: Connection, open_session: Callable[[Connection, Process], Session]) -> None:
    """Serves every program that connects, until cancelled."""
    connections: Counter[int] = Counter()
    async with trio.open_nursery() as nursery:
        while True:
            try:
                connection, _ = await listener.accept()
            except OSError as error:
                if error.errno not in ACCEPT_AGAIN:
                    raise
                log.warning("no room for another program: %s", error.strerror)
                await trio.sleep(ACCEPT_AGAIN_S)
                continue
            nursery.start_soon(_serve_one, connection, open_session, connections)


async def _serve_one(
    connection: Connection, open_session: Callable[[Connection, Process], Session], connections: Counter[int]
) -> None:
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        uid = user_of(connection)  # type: ignore[arg-type]
        connections[uid] += 1
        stack.callback(connections.subtract, [uid])
        if connections[uid] > CONNECTIONS:
            log.warning("user %d: more than %d connections: dropped", uid, CONNECTIONS)
            return
        try:
            session = open_session(connection, peer_of(connection))  # type: ignore[arg-type]
        except ProcessLookupError:
            return  # it connected and died
        except OSError as error:
            log.warning("a program cannot be served: %s", error.strerror)
            return
        try:
            await session.run()
        except* (BrokenPipeError, ConnectionResetError):
            pass  # it died, or closed its end
        except* Exception:
            log.exception("process %d: connection dropped", session.process.pid)
        finally:
            session.close()


async def receive(connection: Connection, process: Process) -> Message | None:
    """The next message; None where the other end is closed, or sent what is none."""
    raw = await connection.recv(SIZE + 1)
    if not raw:
        return None
    try:
        return Message.decode(raw)
    except ValueError:
        log.warning("process %d: not a message (%d bytes): dropped", process.pid, len(raw))
        return None


def check(request: Message, greeted: bool) -> None:
    """EPROTO for what is no request, or comes before the greeting."""
    if request.flags or request.status or request.reply or not (greeted or request.op == Op.HELLO):
        raise fail(errno.EPROTO)
