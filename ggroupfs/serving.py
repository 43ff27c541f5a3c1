"""Finds the process that serves a tree, by asking at its socket, before it is signalled or its program executed.

The files of a tree say whatever the serving process wants. That may be a user's own FUSE server of our type, and a
daemon in another pid namespace gives a pid that means another process here. So root's commands rely on the kernel:
which user mounted the tree, and which user's process listens at the socket. That process then has to state that it
serves this very mount. From then on it is identified by a pidfd, and its pid is only a name for people.
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
"""Seconds that a daemon has to state which tree it serves."""

TREE_S = 15.0
"""Seconds that a tree has to answer a read before it is considered silent."""

TYPE = "fuse.ggroupfs"

T = TypeVar("T")


class Unknown(Exception):
    """Raised if the process that serves a tree cannot be determined; the text says why."""


class Silent(Unknown):
    """Raised if a tree does not answer: its daemon is stopped, or cannot end because of a program that waits for it."""


@attrs.frozen
class Daemon:
    """The process that serves a tree."""

    pid: int
    """Pid in this namespace. Unlike `pidfd`, it may be reused at any moment."""
    pidfd: int
    """Pidfd of the process."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended; what was read by its pid may then have been about another process."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(0))


def mounted_by(device: str) -> int | None:
    """Return the user who mounted a FUSE filesystem, from the kernel; None if there is no such device number.

    The kernel has it as ``user_id`` (mount.fuse3(8)), which fusermount3 sets for users.
    """
    options = (option for mount in procfs.mounts() if mount.device == device for option in mount.options)
    return next((int(option.removeprefix("user_id=")) for option in options if option.startswith("user_id=")), None)


def is_trusted(device: str) -> bool:
    """Whether root or the user of this process made a mount; otherwise its server says what another user likes."""
    return mounted_by(device) in (0, os.geteuid())


def require_trusted(mount: Path) -> None:
    """Raise RuntimeError if another user mounted a tree: its socket must not get hold of a program's memory."""
    found = mount_of(os.path.realpath(mount))
    if found is not None and found[1] == TYPE and not is_trusted(found[0]):
        raise RuntimeError(f"{mount}: user {mounted_by(found[0])} mounted it, who may have it say anything")


def asked(mountpoint: str, read: Callable[[str], T]) -> T:
    """Return `read(mountpoint)`, run in a thread that is abandoned if the tree does not answer.

    A request that the daemon has begun keeps waiting, and keeps this process from ending. OSError of the read; Silent
    after TREE_S.
    """
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
    """Find the daemon of the tree with a device number; None if it is dead. Unknown."""
    if not is_trusted(device):
        raise Unknown(f"user {mounted_by(device)} mounted it, and may have it say anything")
    try:
        facts = asked(mountpoint, facts_of)
    except OSError:
        yield None
        return
    path = facts.get("socket", "")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # settimeout() would not limit the wait to connect
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
    """Raise Unknown unless the listener states that it serves that mount."""
    answer = _ask(connection)
    # The listener may not know the question, or have no descriptor left for it. Then the rest has to suffice: root
    # mounted the tree, root's process listens at the given path, and both give the same pid.
    if answer is None or answer.status == -errno.EPROTO:
        if facts.get("pid") != str(pid):
            raise Unknown(f"process {pid} listens at {path}, and does not say what it serves")
    elif answer.status or answer.args[0] != device_number(device):
        raise Unknown(f"process {pid} listens at {path}, and serves another tree")


def _ask(connection: socket.socket) -> Message | None:
    """Return the answer of the listener; None if there is no valid one."""
    try:
        connection.sendall(Message(Op.TREE, 1).encode())
        answer = Message.decode(connection.recv(SIZE + 1))
    except (OSError, ValueError):
        return None
    return answer if answer.reply and answer.op == Op.TREE else None


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
