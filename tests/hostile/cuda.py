"""Messages of hostile programs in place of the CUDA library: about memory that they have, or do not have."""

from __future__ import annotations

import random
import socket
import time

from backend.door.wire import SIZE, Message, Op
from tests.hostile.messages import ASKED, EDGES, RECEIVED, STATUSES, answer, ask, say, word
from tests.hostile.registry import CUDA, Tenant, kind

MIB, GIB = 1 << 20, 1 << 30


def amount(random: random.Random) -> int:
    return random.choice((MIB, 64 * MIB, GIB, 8 * GIB, 80 * GIB, 81 * GIB, random.choice(EDGES)))


@kind("be managed", CUDA)
def managed(tenant: Tenant, random: random.Random) -> None:
    """Report memory: on one connection, on two at once, and anew."""
    if random.random() < 0.5:
        say(tenant, Op.MANAGE, amount(random), random.choice((0, amount(random))), gpu=random.choice((0, 0, 1, 7)))
        return
    with tenant.connect() as connection:
        ask(tenant, connection, Op.HELLO, *tenant.greeting)
        ask(tenant, connection, Op.MANAGE, amount(random), 0, gpu=random.choice((0, 1)))


def begun(tenant: Tenant) -> None:
    """Become managed, if not managed yet."""
    if tenant.line is None:
        say(tenant, Op.MANAGE, 64 * MIB, 0)


@kind("charge", CUDA)
def charge(tenant: Tenant, random: random.Random) -> None:
    begun(tenant)
    say(tenant, Op.CHARGE, amount(random), gpu=random.choice((0, 0, 0, 1)))


@kind("uncharge", CUDA)
def uncharge(tenant: Tenant, random: random.Random) -> None:
    """Uncharge memory that another thread is about to charge, or that was never charged."""
    begun(tenant)
    say(tenant, Op.UNCHARGE, amount(random), random.choice((0, amount(random))))


@kind("come back and report", CUDA)
def report(tenant: Tenant, random: random.Random) -> None:
    begun(tenant)
    if random.random() < 0.5:
        say(tenant, Op.MOVE_IN, amount(random), word(random))
    else:
        say(tenant, random.choice((Op.REPORT, Op.LIMITS)), amount(random), word(random), amount(random))


@kind("give memory, and lie about it", CUDA)
def give(tenant: Tenant, random: random.Random) -> None:
    """Answer requests for memory: right, late, with too much, with another status, twice."""
    with tenant.connect() as connection:
        ask(tenant, connection, Op.HELLO, *tenant.greeting).check()
        ask(tenant, connection, Op.MANAGE, GIB, 0).check()
        ask(tenant, connection, Op.CHARGE, random.choice((GIB, 8 * GIB)))
        request = next_request(connection)
        given = random.choice((request.args[3], 0, MIB, 1 << 40, (1 << 64) - 1))
        answer(connection, request, random.choice((0, 0, 0, *STATUSES)), given, word(random))
        if random.random() < 0.2:
            answer(connection, request, 0, given, 0)
        connection.recv(SIZE)


@kind("stand by, and refuse it", CUDA)
def depart(tenant: Tenant, random: random.Random) -> None:
    """Answer a request to stand by: agree, and not be moved; refuse, with any status; or never answer."""
    with tenant.connect() as connection:
        ask(tenant, connection, Op.HELLO, *tenant.greeting).check()
        ask(tenant, connection, Op.MANAGE, GIB, 0).check()
        connection.settimeout(0.1)
        waits = tenant.page.place(tenant.number, 0) + 3
        tenant.page.words[waits] = 1
        try:
            request = next_request(connection)
        finally:
            tenant.page.words[waits] = 0
        if random.random() < 0.9:
            answer(connection, request, random.choice((0, *STATUSES)), word(random))
        time.sleep(0.01)


def next_request(connection: socket.socket) -> Message:
    """Return the daemon's next request. TimeoutError if none comes."""
    for _ in range(RECEIVED):
        raw = connection.recv(SIZE)
        if not raw:
            raise ConnectionResetError
        message = Message.decode(raw)
        if not message.reply and message.op in (Op.RECLAIM, Op.DEPART):
            return message
        if not message.reply and message.op in ASKED:
            answer(connection, message, 0, 1)  # claims to be drained
    raise TimeoutError
