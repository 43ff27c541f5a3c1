"""Which process serves a tree: asked for at its socket, before it is signalled or what it runs is executed.

What a tree's files say is the word of the process that serves it. That may be a user's own FUSE of our type, and a
daemon of another pid namespace says a number that means another process here. So root's commands go by what the kernel
says: which user mounted it, and whose process listens at the socket; and that process has to say that it serves this
very mount. From then on it is a pidfd, and its number a name for people.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

import attrs

from backend.door.client import facts_of
from backend.door.peers import pid_of_peer, pidfd_of_peer, user_of
from backend.door.wire import SIZE, Message, Op
from backend.process import procfs
from ggroupfs.mounts import device_number, mount_of

ANSWER_S = 5.0
"""Seconds that a daemon has to say which tree it serves."""

TREE_S = 15.0
"""Seconds that a tree has to answer a read, before it is taken for one that never does."""

TYPE = "fuse.ggroupfs"

T = TypeVar("T")


class Unknown(Exception):
    """It cannot be told which process serves a tree; the text says why."""


class Silent(Unknown):
    """A tree does not answer: its daemon is stopped, or is kept from its end by a program that waits for it."""


@attrs.frozen
class Daemon:
    """The process that serves a tree."""

    pid: int
    """Its number here. Other than `pidfd` it may be another process's by the next moment."""
    pidfd: int
    """Itself."""

    @property
    def has_ended(self) -> bool:
        """Whether it has: then what was read by its number may have been about another process."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


def mounted_by(device: str) -> int | None:
    """The user who mounted a FUSE file system, as the kernel says (mount.fuse3(8), ``user_id``: fusermount3 sets it for
    users); None where there is none of that device number."""
    options = (option for mount in procfs.mounts() if mount.device == device for option in mount.options)
    return next((int(option.removeprefix("user_id=")) for option in options if option.startswith("user_id=")), None)


def is_trusted(device: str) -> bool:
    """Whether a mount is root's, or of this process's user: else its server says what another user likes."""
    return mounted_by(device) in (0, os.geteuid())


def require_trusted(mount: Path) -> None:
    """RuntimeError where another user mounted a tree: its socket is not one to put a program's memory into the hands
    of."""
    found = mount_of(os.path.realpath(mount))
    if found is not None and found[1] == TYPE and not is_trusted(found[0]):
        raise RuntimeError(f"{mount}: user {mounted_by(found[0])} mounted it, who may have it say anything")


def asked(mountpoint: str, read: Callable[[str], T]) -> T:
    """What `read` returns for a tree: in a thread, which is left behind where the tree does not answer. A request that
    the daemon has begun with waits on, and keeps this process from its end. OSError of the read; Silent after
    TREE_S."""
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(read(mountpoint))
        except OSError as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="tree", daemon=True).start()
    if not wait([answer], TREE_S).done:
        raise Silent(f"the tree does not answer within {TREE_S:.0f} s")
    return answer.result()


@contextlib.contextmanager
def daemon_of(mountpoint: str, device: str) -> Iterator[Daemon | None]:
    """The daemon of the tree of that device number; None where it is dead. Unknown."""
    if not is_trusted(device):
        raise Unknown(f"user {mounted_by(device)} mounted it, and may have it say anything")
    try:
        facts = asked(mountpoint, facts_of)
    except OSError:
        yield None
        return
    path = facts.get("socket", "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # settimeout() would not wait for room to connect
            connection.setsockopt(socket.SOL_SOCKET, way, _timeval(ANSWER_S))
        try:
            connection.connect(path)
            user, pid = user_of(connection), pid_of_peer(connection)
            if user not in (0, os.geteuid()):
                raise Unknown(f"user {user} listens at {path}")
            if not pid:
                raise Unknown(f"the process that listens at {path} is in another pid namespace")
            pidfd = pidfd_of_peer(connection)
        except OSError as error:
            raise Unknown(f"its socket {path}: {error.strerror or error}") from None
        try:
            _check(connection, path, device, facts, pid)
            yield Daemon(pid, pidfd)
        finally:
            os.close(pidfd)


def _check(connection: socket.socket, path: str, device: str, facts: Mapping[str, str], pid: int) -> None:
    """Unknown, unless what listens there says that it serves that mount."""
    answer = _ask(connection)
    # One that does not know the question, or has no descriptor left to take it: root mounted the tree, root's process
    # listens where it says, and both say the same number.
    if answer is None or answer.status == -errno.EPROTO:
        if facts.get("pid") != str(pid):
            raise Unknown(f"process {pid} listens at {path}, and does not say what it serves")
    elif answer.status or answer.args[0] != device_number(device):
        raise Unknown(f"process {pid} listens at {path}, and serves another tree")


def _ask(connection: socket.socket) -> Message | None:
    """Its answer; None where that is none."""
    try:
        connection.sendall(Message(Op.TREE, 1).encode())
        answer = Message.decode(connection.recv(SIZE + 1))
    except (OSError, ValueError):
        return None
    return answer if answer.reply and answer.op == Op.TREE else None


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
