"""Kinds about messages at a door, in any protocol: half messages, wrong ones, and none."""

from __future__ import annotations

import random
import socket
import struct
import time

from backend.door.wire import FORMAT, REPLY, SIZE, VERSION, Message, Op
from tests.hostile.registry import Tenant, kind

EDGES = (0, 1, 2, 5, 64, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
STATUSES = (-1, -5, -11, -19, -107, -511, -512, -513, -600, -4095, -4096, -200000, -(1 << 31), 1, 5, 600, (1 << 31) - 1)
"""Statuses that an answer may carry: a valid one is 0 or a negated errno."""
OPS = [*Op, 0, 3, 99, REPLY - 1]
ASKED = (Op.RECLAIM, Op.DEPART, Op.END_TURN, Op.BEGIN_TURN)
"""Requests of the daemon to a program."""
RECEIVED = 16
"""Number of messages among which the answer to a request is looked for."""


def word(random: random.Random) -> int:
    """Return any word, those at the edges more often."""
    return random.choice((random.choice(EDGES), random.getrandbits(64), random.randrange(100)))


def arguments(random: random.Random) -> tuple[int, ...]:
    return tuple(word(random) for _ in range(5))


def ask(tenant: Tenant, connection: socket.socket, op: int, *args: int, gpu: int = 0) -> Message:
    """Return the answer to a request. ConnectionResetError if it does not come, TimeoutError if it is late."""
    seq = next(tenant.seq)
    connection.send(Message(op, seq, gpu, args).encode())
    for _ in range(RECEIVED):
        raw = connection.recv(SIZE)
        if not raw:
            raise ConnectionResetError
        message = Message.decode(raw)
        if message.reply and message.seq == seq:
            return message
        if not message.reply and message.op in ASKED:
            answer(connection, message)
    raise TimeoutError


def answer(connection: socket.socket, request: Message, status: int = 0, *args: int) -> None:
    """Answer a request of the daemon; by default, that nothing of it was done."""
    connection.send(FORMAT.pack(request.op | REPLY, status, request.seq, request.gpu, 0, *(*args, 0, 0, 0, 0, 0)[:5]))


def greeted(tenant: Tenant) -> socket.socket:
    """Return the shared connection, with the greeting done."""
    line, new = tenant.shared()
    try:
        if new:
            ask(tenant, line, Op.HELLO, *tenant.greeting).check()
    except (ConnectionError, BrokenPipeError):
        tenant.hang_up(line)
        raise
    return line


def say(tenant: Tenant, op: int, *args: int, gpu: int = 0) -> Message:
    """Send one request on the shared connection."""
    line = greeted(tenant)
    try:
        return ask(tenant, line, op, *args, gpu=gpu).check()
    except (ConnectionError, BrokenPipeError):
        tenant.hang_up(line)
        raise


@kind("connect and leave")
def leave(tenant: Tenant, random: random.Random) -> None:
    with tenant.connect() as connection:
        if random.random() < 0.7:
            connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())
        if random.random() < 0.5:
            connection.recv(SIZE)


@kind("connect and say nothing")
def silence(tenant: Tenant, random: random.Random) -> None:
    """Hold connections: more than the daemon has descriptors for, if all tenants do so."""
    for _ in range(20):
        tenant.hold(tenant.connect().detach())
    time.sleep(0.002)


@kind("send half messages")
def halves(tenant: Tenant, random: random.Random) -> None:
    with tenant.connect() as connection:
        if random.random() < 0.5:
            connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())
        size = random.choice((0, 1, 32, 63, 65, 128, 4096, 100_000))
        connection.send(random.randbytes(size))
        connection.recv(SIZE)


@kind("send anything")
def anything(tenant: Tenant, random: random.Random) -> None:
    """Send any operation of any protocol with any arguments, on the shared connection."""
    line = greeted(tenant)
    raw = FORMAT.pack(
        int(random.choice(OPS)) | random.choice((0, 0, 0, REPLY)),
        random.choice((0, 0, 0, *STATUSES)),
        random.choice((0, 1, next(tenant.seq), (1 << 64) - 1)),
        random.choice((0, 0, 0, 1, 2, (1 << 32) - 1)),
        random.choice((0, 0, 0, 1)),
        *arguments(random),
    )
    line.send(raw)
    try:
        if not line.recv(SIZE):
            tenant.hang_up(line)
    except TimeoutError:
        pass


@kind("answer what nobody asked")
def unasked(tenant: Tenant, random: random.Random) -> None:
    with tenant.connect() as connection:
        ask(tenant, connection, Op.HELLO, *tenant.greeting)
        op, status = random.choice((*ASKED, Op.HELLO, 99)), random.choice((0, *STATUSES))
        connection.send(struct.pack("<IiQII5Q", op | REPLY, status, random.randrange(4), 0, 0, *arguments(random)))
        connection.recv(SIZE)


@kind("never read answers")
def deaf(tenant: Tenant, random: random.Random) -> None:
    """Send requests until there is no room for more; the connection is kept."""
    connection = tenant.connect()
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.setblocking(False)
        connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())
        op = random.choice((Op.HELLO, Op.LIMITS, Op.JOIN, Op.READ, Op.LOCATE, Op.CHARGE))
        for seq in range(2, 300):
            connection.send(Message(op, seq, 0, (VERSION, 1)).encode())
    finally:
        tenant.hold(connection.detach())
    time.sleep(0.002)


@kind("speak oddly")
def odd(tenant: Tenant, random: random.Random) -> None:
    """Use sockets of another type, shut down halves, peek at answers, send urgent data, change the peer by options."""
    if random.random() < 0.3:
        with socket.socket(socket.AF_UNIX, random.choice((socket.SOCK_STREAM, socket.SOCK_DGRAM))) as other:
            other.connect(tenant.door)
    with tenant.connect() as connection:
        random.choice(
            (
                lambda: connection.shutdown(random.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR))),
                lambda: connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1),
                lambda: connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1),
                lambda: connection.send(b"x", socket.MSG_OOB),
                lambda: connection.bind(b"\0hostile%d" % random.getrandbits(30)),
                lambda: connection.listen(1),
            )
        )()
        connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())
        connection.recv(SIZE, socket.MSG_PEEK)
