"""The client of the software GPU, for programs: blocking Python, for plain processes."""

from __future__ import annotations

import collections
import errno
import os
import select
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from backend.common.errors import fail
from backend.door import environment
from backend.door.client import facts_of
from backend.door.wire import ARGS, SIZE, SOFT, STATUSES, VERSION, Feature, Message, Op, met

GONE = "the software GPU is gone"


TOTALS: dict[tuple[int, int, str], int] = {}
"""Total bytes of a GPU, as a process was told first: by its pid, the index of the GPU and the mountpoint."""


def socket_of(mount: str | os.PathLike[str]) -> Path:
    """Return the socket of a mounted tree, from its ``ggroup.backend``. Raises LookupError where it has
    no software GPU.
    """
    facts = facts_of(mount)
    if facts.get("gpu") != "soft" or "socket" not in facts:
        raise LookupError(f"{os.fspath(mount)} is not a ggroup tree with a software GPU")
    return Path(facts["socket"])


class Device:
    """A connection to the software GPU. Every method raises the OSError that the GPU answers with."""

    def __init__(self, mount: str | os.PathLike[str], gpu: int = 0) -> None:
        """Connect, and put this process into the families that its environment asks for. Raises
        :class:`backend.door.environment.Refused` for an invalid or refused value there, unless it is to be lenient.
        """
        self._gpu = gpu
        self._mount = os.fspath(mount)
        self._seq = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(os.fspath(socket_of(mount)))
            self.finished: collections.Counter[int] = collections.Counter()
            """Kernels finished so far, by TSG, as far as reported."""
            levels, _ = environment.families(os.environ)
            _, self.page, self.timeslice_us, said = self._ask(Op.HELLO, VERSION, SOFT)[:4]
            if not met(Feature.ENGINE, said):
                raise OSError(errno.EOPNOTSUPP, "the daemon does not speak as this program does of the software GPU")
            if Feature.FAMILY in met(Feature.FAMILY, said):
                self._limit(levels)
            self._is_sized = Feature.TOTAL in met(Feature.TOTAL, said)
        except BaseException:
            self._socket.close()
            raise

    def _limit(self, levels: Sequence[environment.Level]) -> None:
        """Put this process into families. Raises Refused, unless it is to be lenient."""
        try:
            for op, args in environment.messages(levels):
                self._ask(op, *args)
        except OSError as error:
            if not environment.is_lenient(os.environ):
                raise environment.Refused(environment.refusal(levels, error)) from None

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; everything that was opened on the GPU goes with it."""
        self._socket.close()

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there is progress to take."""
        return self._socket.fileno()

    def join(self, channels: int = 8) -> int:
        """Open a context; return the number of its TSG."""
        return self._ask(Op.JOIN, channels)[0]

    def leave(self, tsg: int) -> None:
        """Close a context."""
        self._ask(Op.LEAVE, tsg)

    def memory(self) -> tuple[int, int]:
        """Return the bytes of the GPU that are free for this process, and that it has in all, as cudaMemGetInfo does.

        The second is what it was at the first call; the first follows the limits and never exceeds it. Raises
        OSError(EOPNOTSUPP) with an older daemon.
        """
        if not self._is_sized:
            raise fail(errno.EOPNOTSUPP)
        key = os.getpid(), self._gpu, self._mount
        if key not in TOTALS:
            TOTALS[key] = self._ask(Op.TOTAL)[0]
        return min(self._ask(Op.LIMITS)[1], TOTALS[key]), TOTALS[key]

    def alloc(self, nbytes: int) -> range:
        """Allocate memory; return its pages."""
        first, count = self._ask(Op.ALLOC, nbytes)[:2]
        return range(first, first + count)

    def free(self, pages: range) -> None:
        """Free an allocation."""
        self._ask(Op.FREE, pages.start, len(pages))

    def write(self, pages: range, stamp: int, step: int = 1) -> None:
        """Write ``stamp + i * step`` into page i of `pages`."""
        self._ask(Op.WRITE, pages.start, len(pages), stamp, step)

    def read(self, pages: range) -> Iterator[int]:
        """Yield the stamps in `pages`."""
        for start in range(pages.start, pages.stop, ARGS):
            count = min(ARGS, pages.stop - start)
            yield from self._ask(Op.READ, start, count)[:count]

    def launch(self, tsg: int, kernels: int, us: int, touched: range = range(0)) -> None:
        """Queue kernels of `us` microseconds, each of which touches some pages of one allocation. Returns when they
        are queued, which may take until the program's next turn.
        """
        self._ask(Op.LAUNCH, tsg, kernels, us, touched.start, len(touched))

    def take_progress(self, seconds: float) -> None:
        """Wait up to `seconds` for progress, and take it into :attr:`finished`."""
        while select.select([self._socket], [], [], seconds)[0]:
            self._event(self._receive())
            seconds = 0

    def _ask(self, op: Op, *args: int) -> tuple[int, ...]:
        self._seq += 1
        try:
            self._socket.sendall(Message(op, self._seq, self._gpu, args).encode())
        except BrokenPipeError:
            raise ConnectionResetError(GONE) from None
        while True:
            message = self._receive()
            if message.reply and message.seq == self._seq:
                return message.check().args
            self._event(message)

    def _receive(self) -> Message:
        raw = self._socket.recv(SIZE)
        if not raw:
            raise ConnectionResetError(GONE)
        message = Message.decode(raw)
        if message.status not in STATUSES:
            self.close()
            raise fail(errno.EPROTO)
        return message

    def _event(self, message: Message) -> None:
        if message.op == Op.PROGRESS:
            self.finished[message.args[0]] = message.args[1]
