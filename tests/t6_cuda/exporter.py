"""An exporter of legacy IPC in Python (backend/cuda/library/memory/ipc.h), honest or not. It is run as a program of its
own, so that it has a pid and a user: it prints a handle, and then for each connection whether memory was requested."""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import signal
import socket
import struct
import sys
import time
from pathlib import Path

HANDLE = struct.Struct("=8s6QII")
PART = struct.Struct("=II32Q")
CHUNK = 2 << 20
FIRST = 1000
"""First word of the memory; each later word is one more."""
SLOW_S = 2.0
"""Seconds between two messages of a slow exporter: less than an importer waits for one, three exceed its whole wait."""


def chunks(count: int) -> list[int]:
    """Return descriptors of the memory."""
    made = []
    for index in range(count):
        first = FIRST + index * CHUNK // 8
        made.append(os.memfd_create("chunk"))
        os.write(made[-1], array.array("Q", range(first, first + CHUNK // 8)))
    return made


def send(connection: socket.socket, count: int, last: bool, descriptors: list[int], behind: bytes = b"") -> None:
    """Send one part, and what follows it in the same message."""
    message = PART.pack(count, last, *[CHUNK] * count, *[0] * (32 - count)) + behind
    socket.send_fds(connection, [message], descriptors)


def interrupt(connection: socket.socket) -> None:
    """Send the importer a signal while it waits for the answer."""
    pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()
    os.kill(pid, signal.SIGUSR1)


def answer(connection: socket.socket, kind: str, memory: list[int]) -> None:
    """Answer a request for that memory."""
    match kind:
        case "silent":
            connection.recv(1)  # until the other end hangs up
        case "slow":
            for index, descriptor in enumerate(memory):
                time.sleep(SLOW_S if index else 0)
                send(connection, 1, index == len(memory) - 1, [descriptor])
        case "no descriptor":
            send(connection, len(memory), True, [])
        case "one too many":
            send(connection, len(memory), True, [*memory, memory[0]])
        case "a longer message":
            send(connection, len(memory), True, memory, b"more")
        case _:
            if kind == "interrupts":
                interrupt(connection)
            send(connection, len(memory), True, memory)


def main(kind: str, count: str, pid: str, pid_namespace: str) -> None:
    """`pid` and `pid_namespace` go into the handle; 0 for the true value; a `pid` of -1 for none, as in 0.1."""
    token = secrets.randbits(64)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0ggroup-cuda-ipc-%016x" % token)
    listener.listen()
    memory = chunks(int(count))
    named = int(pid) or os.getpid(), int(pid_namespace) or os.stat("/proc/self/ns/pid").st_ino
    if int(pid) < 0:
        named = 0, 0
    handle = HANDLE.pack(b"ggroupIP", token, secrets.randbits(64), 1 << 40, 1, CHUNK * len(memory), 0, *named)
    print(handle.hex(), flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            asked = connection.recv(HANDLE.size)
            print("asked" if asked == handle else "not asked", flush=True)
            if asked == handle:
                with contextlib.suppress(ConnectionError):  # the importer did not wait
                    answer(connection, kind, memory)


if __name__ == "__main__":
    main(*sys.argv[1:])
