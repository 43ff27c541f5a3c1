"""An honest program of another user, beside hostile ones: it reads, writes and charges, and each call is timed."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from backend.door import wire
from backend.door.wire import FORMAT, REPLY, SIZE, VERSION, Message, Op
from backend.soft.client import Device
from ggroupfs.client.reading import content
from tests.hostile.page import Page, Timed, Word
from tests.hostile.processes import LIBC, PR_SET_DUMPABLE, PR_SET_PDEATHSIG

USER = 1000
MIB = 1 << 20
PIECE = 4 * MIB
MOST = 16
"""Largest number of pieces that it has."""
CONTEXT = 256 * MIB
GRANTED_S = 20.0
"""Seconds within which a charge is granted: against false claims of memory the driver's figure wins within a second,
and programs that are asked to give are waited for 3 s (docs/security.md)."""
GREETED_S = 30
"""Seconds within which a new connection is greeted: it waits while the daemon has no descriptor."""
PAUSE_S = 0.002

CALLS = ("read current", "read gcgroup.stat", "list its directory", "stat the tree", "write a weight", "poll")
HUNG_UP = errno.ECONNRESET


class Memory(Protocol):
    """Its memory on the GPU."""

    def take(self) -> None:
        """Take one more piece. OSError(ENOMEM)."""

    def give(self) -> None:
        """Give one piece back."""


class Soft:
    """Memory on the software GPU."""

    def __init__(self, mount: str, page: Page) -> None:
        self._device = Device(mount)
        self._device.join()
        self._pieces: list[range] = []

    def take(self) -> None:
        pages = self._device.alloc(PIECE)
        self._device.write(pages, len(self._pieces))
        self._pieces.append(pages)

    def give(self) -> None:
        pages = self._pieces.pop()
        assert list(self._device.read(pages)) == [len(self._pieces) + n for n in range(len(pages))], "not its memory"
        self._device.free(pages)


class Cuda:
    """Memory as a CUDA program with the library; the driver in memory counts it."""

    def __init__(self, door: str, page: Page) -> None:
        self._words = page.words
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(GRANTED_S)
        self._resident = self._swapped = 0
        self._seq = 0
        self._count()
        page.words[Word.NEIGHBOUR_PLACE] = os.getpid()
        self._socket.connect(door)
        self._ask(Op.HELLO, VERSION, wire.CUDA)
        self._ask(Op.MANAGE, 0, 0)

    def take(self) -> None:
        self._ask(Op.CHARGE, PIECE)
        self._resident += PIECE
        self._count()

    def give(self) -> None:
        if self._resident:
            self._resident -= PIECE
            self._count()
            self._ask(Op.UNCHARGE, PIECE, 0)
        else:
            self._swapped -= PIECE
            self._ask(Op.UNCHARGE, 0, PIECE)

    def _count(self) -> None:
        self._words[Word.NEIGHBOUR_PLACE + 1] = CONTEXT + self._resident

    def _ask(self, op: int, *args: int) -> None:
        self._seq += 1
        self._socket.send(Message(op, self._seq, 0, args).encode())
        while True:
            raw = self._socket.recv(SIZE)
            if not raw:
                raise ConnectionResetError(HUNG_UP, "the daemon hung up on an honest program")
            message = Message.decode(raw)
            if message.reply and message.seq == self._seq:
                message.check()
                return
            if message.op == Op.RECLAIM:
                nbytes = min(self._resident, -(-message.args[3] // PIECE) * PIECE)
                self._resident -= nbytes
                self._swapped += nbytes
                self._count()
                self._answer(message, nbytes, 100)
            elif message.op in (Op.END_TURN, Op.BEGIN_TURN):  # it runs no kernels
                self._answer(message, 1)

    def _answer(self, request: Message, *args: int) -> None:
        words = (*args, 0, 0, 0, 0, 0)[:5]
        self._socket.send(FORMAT.pack(request.op | REPLY, 0, request.seq, request.gpu, 0, *words))


def main() -> None:
    """Run the program; arguments are the descriptor of the page, the mountpoint, the door and the protocol."""
    page, mount, door, protocol = Page(int(sys.argv[1])), sys.argv[2], sys.argv[3], sys.argv[4]
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)
    LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
    memory: Memory = Soft(mount, page) if protocol == "soft" else Cuda(door, page)
    page.words[Word.NEIGHBOUR_PID] = os.getpid()
    threading.Thread(target=_newcomers, args=(page, door), daemon=True).start()
    print("ready", flush=True)
    own = f"{mount}/{os.getpid()}/0"
    calls, charges = page.meter(Timed.CALLS), page.meter(Timed.CHARGES)
    pieces = 0
    for turn in _turns(page):
        for at in range(len(CALLS)):
            try:
                with calls.call(at):
                    _call(mount, own, at, turn)
            except OSError as error:
                calls.failed(at, error.errno or errno.EIO)
        more = pieces < MOST if turn // MOST % 2 == 0 else pieces == 0
        with charges.call(0):
            if more:
                _granted(memory, charges)
                pieces += 1
            else:
                memory.give()
                pieces -= 1
        page.words[Word.NEIGHBOUR_HOLDS] = pieces * PIECE


def _turns(page: Page) -> Iterator[int]:
    """Yield numbers, one whenever it may go on."""
    turn = 0
    while True:
        if quiet := int(page.words[Word.QUIET]):
            page.words[Word.NEIGHBOUR_QUIET] = quiet
        else:
            yield (turn := turn + 1)
        time.sleep(PAUSE_S)


def _call(mount: str, own: str, at: int, turn: int) -> None:
    if at == 0:
        int(content(f"{own}/gmem.current"))
    elif at == 1:
        content(f"{own}/gcgroup.stat")
    elif at == 2:
        os.listdir(own)
    elif at == 3:
        os.stat(f"{mount}/ggroup.backend")
        os.readlink(f"{mount}/self")
    elif at == 4:
        with open(f"{own}/compute.weight", "w", encoding="ascii") as file:
            file.write(str(100 + turn % 10))
    else:
        descriptor = os.open(f"{own}/gmem.events", os.O_RDONLY)
        try:
            poller = select.poll()
            poller.register(descriptor, select.POLLPRI)
            poller.poll(0)
        finally:
            os.close(descriptor)


def _granted(memory: Memory, charges: object) -> None:
    """Charge until it is granted."""
    until = time.monotonic() + GRANTED_S
    while True:
        try:
            return memory.take()
        except OSError as error:
            if error.errno != errno.ENOMEM or time.monotonic() > until:
                raise
        time.sleep(0.05)


def _newcomers(page: Page, door: str) -> None:
    """Connect anew, all the time. The daemon drops no program that has said nothing wrong."""
    meter = page.meter(Timed.NEWCOMERS)
    while True:
        try:
            with (
                meter.call(0),
                contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection,
            ):
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # Python's own would not block
                    connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", GREETED_S, 0))
                connection.connect(door)
                connection.send(Message(Op.HELLO, 1, 0, (VERSION,)).encode())
                if not connection.recv(SIZE):
                    raise ConnectionResetError(HUNG_UP, "hung up")
        except OSError as error:
            meter.failed(0, error.errno or errno.ETIMEDOUT)
        time.sleep(0.02)


if __name__ == "__main__":
    main()
