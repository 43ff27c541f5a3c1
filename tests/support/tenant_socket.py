"""A raw connection to the socket of tenants, for tests of messages that the library would not send."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from backend.door.wire import FORMAT, SIZE, SOFT, VERSION, Message, Op
from backend.soft.client import socket_of
from tests.support.mounted import SECONDS, SLOW, Mounted

MIB = 1 << 20


class Raw:
    """A connection that says what it likes."""

    def __init__(self, mount: Mounted) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(SECONDS * SLOW)
        self.socket.connect(os.fspath(socket_of(mount.path)))
        self._seq = 0

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, op: int, *args: int, gpu: int = 0, flags: int = 0, status: int = 0) -> None:
        """Send one message."""
        self._seq += 1
        self.socket.sendall(FORMAT.pack(op, status, self._seq, gpu, flags, *args, *[0] * (5 - len(args))))

    def ask(self, op: int, *args: int, gpu: int = 0, flags: int = 0, status: int = 0) -> int | tuple[int, ...]:
        """Send a message; return the errno of the answer, or the values that it grants. Events are skipped."""
        self.send(op, *args, gpu=gpu, flags=flags, status=status)
        while not (answer := Message.decode(self.socket.recv(SIZE + 1))).reply:
            assert answer.op == Op.PROGRESS
        assert answer.seq == self._seq
        assert answer.flags == 0
        return -answer.status if answer.status else answer.args

    def hello(self) -> Raw:
        """Send the greeting that opens a connection."""
        assert self.ask(Op.HELLO, VERSION) == (VERSION, 2 * MIB, 2048, SOFT, 0)
        return self

    @property
    def closed(self) -> bool:
        """Return whether the daemon hangs up."""
        try:
            while self.socket.recv(SIZE):
                pass
        except ConnectionResetError:
            pass
        return True


def descriptors(mount: Mounted) -> int:
    """Return how many descriptors the daemon has open."""
    return len(os.listdir(f"/proc/{mount.daemon.pid}/fd"))


def open_files(mount: Mounted) -> set[str]:
    """Return the targets of the daemon's descriptors (proc_pid_fd(5)), without those that it closes meanwhile."""
    found = set()
    for entry in os.scandir(f"/proc/{mount.daemon.pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry.path))
    return found


def status(mount: Mounted, key: str) -> int:
    """Return a number of the daemon's /proc/<pid>/status."""
    lines = Path(f"/proc/{mount.daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
