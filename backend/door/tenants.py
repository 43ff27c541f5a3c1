"""The door of a tree: a unix socket for programs. The kernel, not the program, says which process connects.

The messages of a program are handled by a :class:`Session`: that of the software GPU (:mod:`backend.soft.server`), or
that of the library in CUDA programs (:mod:`backend.cuda.server`).
"""

from __future__ import annotations

import array
import contextlib
import errno
import hashlib
import logging
import os
import socket
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import trio

from backend.common.errors import fail
from backend.common.turns import Turns
from backend.door.peers import Caller, user_of
from backend.door.wire import SIZE, Message, Op
from backend.process.identity import Process
from backend.scheduler.bucket import Bucket

log = logging.getLogger(__name__)

ACCEPT_AGAIN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Errnos of accept(2) that do not mean that the listener is broken."""

ACCEPT_AGAIN_S = 0.1

RESERVE = 4
"""Descriptors that a new connection takes: those that identify it, and those that it is given. It is accepted only
while so many can be had.
"""

CONNECTIONS = 4096
"""Connections that one user may have, so that no user takes all of the daemon's descriptors."""

PATH_MOST = 107
"""Maximum length of the path of a unix socket, bytes (unix(7): sun_path has 108, with the zero at its end)."""

Connection = trio.socket.SocketType

COMPLAINTS = 1.0, 32
"""Log lines about programs that break the rules: per second, and at once. Programs must not flood the log, either."""


class Session(Protocol):
    """One connection, and the objects that it opened."""

    process: Process
    """The process at the other end."""

    async def run(self) -> None:
        """Serve the connection until the other end is closed, or sends an invalid message."""

    def close(self) -> None:
        """Release what the session holds."""


class Complaints:
    """Log lines about programs that break the rules. Lines that come too fast are counted instead."""

    def __init__(self) -> None:
        self._bucket = Bucket(*COMPLAINTS)
        self._left_out = 0

    def say(self, text: str, *words: object) -> None:
        """Log a line, or count it."""
        if not self._bucket.take(trio.current_time()):
            self._left_out += 1
            return
        if self._left_out:
            log.warning("%d more lines like the next one were left out", self._left_out)
            self._left_out = 0
        log.warning(text, *words)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[Connection]:
    """Listen on a SEQPACKET socket at `path`, open to every user of the machine; it is removed on exit.

    A socket that is there already is a leftover if no process listens on it, and another daemon's if one does
    (EADDRINUSE). At exit, the path may be another daemon's by then, and what lies there is left alone. Raises OSError
    also where there is something else (EEXIST), where other users could put something else in its place (EPERM), or
    where programs could not connect (ENAMETOOLONG).
    """
    if (long := len(os.fsencode(path))) > PATH_MOST:
        words = f"it has {long} bytes, and the path of a socket {PATH_MOST} at most: name another with socket="
        raise OSError(errno.ENAMETOOLONG, words)
    path.parent.mkdir(parents=True, exist_ok=True)
    trusted(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(errno.EEXIST, "there is something that is no socket", os.fspath(path))
        if is_served(path):
            raise OSError(errno.EADDRINUSE, "another daemon listens there", os.fspath(path))
        path.unlink()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(os.fspath(path))
        stack.callback(_remove, path, os.lstat(path))
        path.chmod(0o666)
        listener.listen(128)
        yield stack.enter_context(contextlib.closing(trio.socket.from_stdlib_socket(listener)))


def is_served(path: Path) -> bool:
    """Return whether a process listens at a path, even with no room for a connection, or for another
    type of socket.
    """
    if len(os.fsencode(path)) > PATH_MOST:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        return probe.connect_ex(os.fspath(path)) in (0, errno.EAGAIN, errno.EPROTOTYPE)


def default_path(folder: Path, mountpoint: str) -> Path:
    """Return the path of a mount's socket. Like the journal it is named after the mountpoint, so that programs
    find the next daemon after an upgrade or a crash. (The mount's device number is different then, and may be
    another mount's.)
    """
    path = folder / f"{quote(mountpoint.strip('/'), safe='', errors='surrogateescape') or 'root'}.sock"
    if len(os.fsencode(path)) > PATH_MOST:
        path = folder / f"{hashlib.sha256(mountpoint.encode(errors='surrogateescape')).hexdigest()}.sock"
    return path


def trusted(path: Path) -> None:
    """Raise EPERM where a user other than root and us could put something else at `path`: a directory that
    leads there, or a link on the way, belongs to another user, or is writable by others and not sticky (the
    last one: even if sticky).
    """
    whole = Path(os.path.abspath(path))
    real = Path(os.path.realpath(whole.parent))
    for place in {*whole.parents, real, *real.parents}:
        found = os.lstat(place)
        if found.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, f"user {found.st_uid} owns a directory above the socket", os.fspath(place))
        open_to_others = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022
        if open_to_others and (place == real or not found.st_mode & stat.S_ISVTX):
            raise OSError(errno.EPERM, "others may write to a directory above the socket", os.fspath(place))


def _remove(path: Path, ours: os.stat_result) -> None:
    """Remove our socket. What is there now may belong to another: something may be mounted over ours."""
    try:
        if os.path.samestat(os.lstat(path), ours):
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:  # EBUSY: it is mounted somewhere itself
        log.warning("the socket %s stays: %s", path, error.strerror)


class Door:
    """The state that the connections of one listener share."""

    def __init__(self, tree: int = 0) -> None:
        self.tree = tree
        """Device number of the mount."""
        self.complaints = Complaints()
        """Log lines about its programs."""
        self.connections: Counter[int] = Counter()
        """Number of connections of each user."""
        self.turns: dict[int, Turns] = defaultdict(Turns)
        """Turns of each user: whatever the number of its connections, one of their messages is taken per round
        of the event loop.
        """


async def serve(listener: Connection, open_session: Callable[[Process, Line], Session], tree: int = 0) -> None:
    """Serve every program that connects, until cancelled. `tree` is the device number of the mount."""
    door = Door(tree)
    reserve: list[int] = []
    async with trio.open_nursery() as nursery:
        while True:
            try:
                while len(reserve) < RESERVE:
                    reserve.append(os.eventfd(0))
                connection, _ = await listener.accept()
            except OSError as error:
                if error.errno not in ACCEPT_AGAIN:
                    raise
                door.complaints.say("no room for another program: %s", error.strerror)
                await trio.sleep(ACCEPT_AGAIN_S)
                continue
            finally:
                while reserve:
                    os.close(reserve.pop())
            await nursery.start(_serve_one, connection, open_session, door)


async def _serve_one(
    connection: Connection,
    open_session: Callable[[Process, Line], Session],
    door: Door,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    with contextlib.closing(connection), contextlib.ExitStack() as stack:
        uid = user_of(connection)  # type: ignore[arg-type]
        door.connections[uid] += 1
        stack.callback(_leave, door, uid)
        if door.connections[uid] > CONNECTIONS:
            door.complaints.say("user %d: more than %d connections: dropped", uid, CONNECTIONS)
            task_status.started()
            return
        session: Session | None = None
        try:
            try:
                caller = stack.enter_context(contextlib.closing(Caller(connection)))  # type: ignore[arg-type]
            finally:
                task_status.started()  # it has the descriptors that it needs; to look at it may take time
            process = await caller.identify()
            caller.close()
            line = Line(connection, process, door.turns[uid], door.complaints, door.tree, uid)
            session = open_session(process, line)
        except ProcessLookupError:  # the process died, or is in a pid namespace that is not below ours
            pass
        except OSError as error:
            door.complaints.say("a program cannot be served: %s", error.strerror)
            return
        except Exception:
            log.exception("a program cannot be served")
            return
        if session is None:  # such a program may only ask which tree this is
            await Line(connection, Process(0, 0), door.turns[uid], door.complaints, door.tree).receive()
            return
        try:
            try:
                await session.run()
            finally:
                session.close()
        except* Exception:
            log.exception("process %d: connection dropped", session.process.pid)


def _leave(door: Door, uid: int) -> None:
    door.connections[uid] -= 1
    if not door.connections[uid]:
        del door.connections[uid]
        door.turns.pop(uid, None)


class Line:
    """A connection, as messages.

    Nothing is raised when the other end is gone. Every other program that is killed leaves that way, and an exception
    that leaves a nursery is a cycle of tasks, frames and tracebacks, 80 objects that only a full garbage collection
    finds. The daemon runs those rarely (:data:`ggroupfs.daemon.mount.COLLECTED`), and would grow until then.
    """

    def __init__(
        self,
        connection: Connection,
        process: Process,
        turns: Turns | None = None,
        complaints: Complaints | None = None,
        tree: int = 0,
        uid: int = 0,
    ) -> None:
        """`turns` are those of the user `uid`, and `tree` is the device number of the mount."""
        self.uid = uid
        """User at the other end, according to the kernel."""
        self._connection = connection
        self._process = process
        self._turns = turns if turns is not None else Turns()
        self._complaints = complaints if complaints is not None else Complaints()
        self._tree = tree
        self._sending = trio.Lock()  # several tasks of a session send
        self._gone = False

    async def receive(self) -> Message | None:
        """Return the next message for the session; None where the other end is gone, or sent an invalid message. The
        kernel closes descriptors that come with a message, since there is no room for any.
        """
        while (message := await self._receive()) and message.op == Op.TREE and not message.reply:
            wrong = message.flags or message.status
            await self.send(message.refuse(errno.EPROTO) if wrong else message.answer(self._tree))
        return message

    async def _receive(self) -> Message | None:
        await trio.lowlevel.wait_readable(self._connection)
        await self._turns.turn()
        try:
            raw = b"" if self._gone else await self._connection.recv(SIZE + 1)
        except ConnectionResetError:
            return None  # answers of ours were not read
        if not raw:
            return None
        try:
            return Message.decode(raw)
        except ValueError:
            self._complaints.say("process %d: not a message (%d bytes): dropped", self._process.pid, len(raw))
            return None

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        """Send a message once there is room; return False where the other end is gone, as :meth:`receive`
        then says, too.
        """
        async with self._sending:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if descriptors:
                    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())
                    await self._connection.sendmsg([message.encode()], [rights])
                else:
                    await self._connection.send(message.encode())
                return True
        self._gone = True
        return False


def check(request: Message, greeted: bool) -> None:
    """Raise EPROTO for a message that is not a request, or comes before the greeting."""
    if request.flags or request.status or request.reply or not (greeted or request.op == Op.HELLO):
        raise fail(errno.EPROTO)
