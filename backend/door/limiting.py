"""A process that limits itself before it becomes another program: `ggroupfs run`, for programs without the library."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from backend.common.errors import fail
from backend.door.environment import Level, messages
from backend.door.wire import CUDA, SIZE, SOFT, VERSION, Feature, Message, Op

ANSWER_S = 15.0
"""Seconds that a daemon has for an answer, as the library in CUDA programs gives it (ANSWER of daemon/session.h)."""


def limit_self(path: str | os.PathLike[str], levels: Sequence[Level]) -> bool:
    """Has this process be in some families, and in the tree on every GPU, of the daemon that listens at `path`. False
    where that daemon is of a version without families. OSError: its refusal, TimeoutError, or of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(os.fspath(path))
        features = _ask(connection, Op.HELLO, VERSION, CUDA | SOFT)[3]
        if not features & Feature.FAMILY:
            return False
        for op, args in messages(levels, everywhere=True):
            _ask(connection, op, *args)
        return True


def _ask(connection: socket.socket, op: Op, *args: int) -> tuple[int, ...]:
    connection.sendall(Message(op, 1, 0, args).encode())
    while True:
        raw = connection.recv(SIZE)
        if not raw:
            raise fail(errno.ECONNRESET)
        message = Message.decode(raw)
        if message.reply:
            return message.check().args
