"""Kinds about descriptors: using them up, passing them on, and having ones that are not what they seem."""

from __future__ import annotations

import array
import contextlib
import os
import random
import resource
import socket
import time

from backend.door.wire import SIZE, Message, Op
from tests.hostile.registry import Tenant, child, kind


@kind("use up descriptors")
def exhaust(tenant: Tenant, random: random.Random) -> None:
    """Use up all descriptors for a moment, in which the other half makes its calls."""
    taken: list[int] = []
    try:
        while len(taken) < 600:
            taken.append(os.dup(2))
        time.sleep(0.002)
    except OSError:
        time.sleep(0.002)
    finally:
        for descriptor in taken:
            os.close(descriptor)


@kind("lower limits")
def limits(tenant: Tenant, random: random.Random) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (random.choice((0, 3, 20, hard)), hard))
    try:
        os.listdir(tenant.mount)
        with tenant.connect():
            time.sleep(0.001)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@kind("pass descriptors")
def passes(tenant: Tenant, random: random.Random) -> None:
    """Send as many with each message as possible: of a tree's files, of the connection itself, of pipes and sockets."""
    ends = os.pipe()
    try:
        with tenant.connect() as connection:
            some = [*ends, connection.fileno(), *tenant.held[-20:]]
            rights = array.array("i", (some * 253)[: random.choice((1, 16, 253))]).tobytes()
            message = random.choice((Message(Op.HELLO, 1, 0, tenant.greeting).encode(), b"", b"x", bytes(SIZE)))
            for _ in range(random.choice((1, 5))):
                with contextlib.suppress(BlockingIOError):
                    connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_DONTWAIT)
    finally:
        os.close(ends[0])
        os.close(ends[1])


@kind("hand over connections")
def hand_over(tenant: Tenant, random: random.Random) -> None:
    """Connect in a process that dies, or is about to, while another one speaks."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def connect() -> None:
            with tenant.connect() as connection:
                socket.send_fds(theirs, [b"x"], [connection.fileno()])
            if random.random() < 0.5:
                time.sleep(0.02)

        child(connect, 0.02)
        ours.settimeout(0.02)
        _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    for descriptor in descriptors:
        with socket.socket(fileno=descriptor) as connection:
            connection.settimeout(0.02)
            connection.send(Message(Op.HELLO, 1, 0, tenant.greeting).encode())
            connection.recv(SIZE)


@kind("queue sockets in themselves")
def loops(tenant: Tenant, random: random.Random) -> None:
    """Put descriptors in flight that no process receives, for the kernel to collect."""
    one, other = socket.socketpair()
    with one, other, tenant.connect() as connection:
        for _ in range(20):
            with contextlib.suppress(BlockingIOError):
                rights = array.array("i", [one.fileno(), other.fileno(), connection.fileno()]).tobytes()
                one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_DONTWAIT)
