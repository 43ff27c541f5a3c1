"""The moves that the daemon asks of one CUDA program: of its memory, out and in, and of all of it to another GPU.

Each is a message that the program answers when it is done. What it moved out is booked by its answer, however late that
is; what comes in is booked as the program asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping

import attrs
import trio

from backend.common.tracing import TRACE
from backend.cuda.gates import Gates
from backend.cuda.holding import Holding
from backend.cuda.managed import Managed
from backend.door.tenants import Line
from backend.door.wire import Message, Op
from backend.process.identity import Process

log = logging.getLogger(__name__)

STAYS = (errno.EBUSY, errno.EOPNOTSUPP, errno.EMFILE, errno.ENOMEM)
"""What a program may say to a DEPART that it does not follow (departure.c)."""

LAST_S = 0.2
"""Seconds for which an answer to the last PREPARE is waited for by the next: it was given up as its phase was over, and
what comes by it is as good."""


@attrs.define(eq=False)
class Asked:
    """A RECLAIM that was sent and not answered."""

    holding: Holding
    nbytes: int
    until: float
    """When it is overdue, by trio's clock."""
    answered: bool = False
    """Whether it was, by something that makes sense."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""
    late: bool = False
    """Whether no caller waits any more."""


@attrs.define(eq=False)
class Departing:
    """A DEPART that was sent."""

    status: int | None = None
    """What was answered: 0 or a negated errno."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


@attrs.define(eq=False)
class Preparing:
    """A PREPARE that was sent and not answered."""

    gpu: int
    nbytes: int
    granted: int = 0
    """Bytes that were booked for it: they have come, or are coming."""
    moved: int = 0
    """Bytes that came: as was answered, and no more than were booked."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


class Moves:
    """See the module."""

    def __init__(
        self, process: Process, line: Line, numbers: Iterator[int], gpus: Mapping[int, Managed], gates: Gates
    ) -> None:
        """`numbers` are those of messages that are answered."""
        self._process = process
        self._line = line
        self._numbers = numbers
        self._gpus = gpus
        self._gates = gates
        self._asked: dict[int, Asked] = {}
        self._departing: dict[int, Departing] = {}
        self._preparing: dict[int, Preparing] = {}

    @property
    def are_waited_for(self) -> bool:
        """Whether the program was asked to move memory out, and that is not overdue."""
        now = trio.current_time()
        return any(now < one.until for one in self._asked.values())

    async def out(self, holding: Holding, nbytes: int, seconds: float) -> bool:
        """Have memory go to the host; see :meth:`backend.cuda.program.Mover.move_out`."""
        seq, asked = next(self._numbers), Asked(holding, nbytes, trio.current_time() + seconds)
        holding.ask(nbytes)
        self._asked[seq] = asked
        sent = False
        try:
            with contextlib.suppress(OSError), trio.move_on_after(seconds):  # ENOBUFS: it is not asked
                sent = await self._line.send(Message(Op.RECLAIM, seq, holding.gpu, (0, 0, 0, nbytes)))
                if sent:
                    await asked.done.wait()
        finally:
            asked.late = True
            if not sent and seq in self._asked:
                del self._asked[seq]
                holding.ask(-nbytes)
        return asked.answered

    async def prepare(self, gpu: int, nbytes: int) -> int:
        """Have memory of the working set come; see :meth:`backend.cuda.program.Mover.prepare`. A program that has not
        answered the last time is not asked again: what it was asked for then is waited for, for LAST_S."""
        for last in list(self._preparing.values()):
            with trio.move_on_after(LAST_S):
                await last.done.wait()
            return last.moved if last.gpu == gpu else 0
        seq, preparing = next(self._numbers), Preparing(gpu, nbytes)
        self._preparing[seq] = preparing
        sent = False
        try:
            with contextlib.suppress(OSError):  # its end is near
                sent = await self._line.send(Message(Op.PREPARE, seq, gpu, (nbytes,)))
        finally:
            if not sent:
                self._preparing.pop(seq, None)
        if sent:
            await preparing.done.wait()
        return preparing.moved

    def granted(self, gpu: int, nbytes: int) -> None:
        """Take note that memory of the program may come: while it prepares, it is for that."""
        for one in self._preparing.values():
            one.granted += nbytes if one.gpu == gpu else 0

    def coming(self, gpu: int) -> int:
        """Return the bytes of the working set that are booked on a GPU, and of which the program has yet to tell that
        they have come."""
        return sum(one.granted for one in self._preparing.values() if one.gpu == gpu)

    async def depart(self, gpu: int, near: bool, seconds: float) -> None:
        """Have the program stand by to be moved; see :meth:`backend.cuda.program.Mover.depart`. It opens the gate."""
        ahead_us = self._gates.depart(gpu)
        seq, departing = next(self._numbers), Departing()
        self._departing[seq] = departing
        sent = False
        try:
            with trio.move_on_after(seconds):
                sent = await self._line.send(Message(Op.DEPART, seq, gpu, (int(near),)))
                if not sent:
                    departing.done.set()
                await departing.done.wait()
        finally:
            self._departing.pop(seq, None)
            if not sent:
                self._gates.stay(gpu, ahead_us)
        if departing.status is None and departing.done.is_set():
            raise OSError(errno.EBUSY, "the program speaks no more")
        if departing.status is None:
            raise OSError(errno.ETIMEDOUT, "the program does not come to a rest")
        if departing.status:
            # A writer is told what a program may say, and no number of its choice: ENODEV or ESRCH, say, would
            # be taken for the GPU's loss, or its own end.
            code = -departing.status if -departing.status in STAYS else errno.EIO
            raise OSError(code, f"the program cannot stand by: {os.strerror(-departing.status)}")

    def answered(self, reply: Message) -> bool:
        """Take an answer, and book what the program says that it moved; False where it was not asked, or cannot
        have."""
        if reply.op == Op.DEPART and (departing := self._departing.pop(reply.seq, None)):
            departing.status = reply.status
            departing.done.set()
            return True
        if (preparing := self._preparing.pop(reply.seq, None)) is not None:
            return self._prepared(preparing, reply)
        asked = self._asked.pop(reply.seq, None)
        if asked is None or reply.op != Op.RECLAIM or reply.gpu != asked.holding.gpu:
            return False
        return self._reclaimed(asked, reply)

    def close(self) -> None:
        """Let go of all that wait for an answer: the connection has ended."""
        waiting: list[Asked | Departing | Preparing] = [
            *self._asked.values(),
            *self._departing.values(),
            *self._preparing.values(),
        ]
        for one in waiting:
            one.done.set()
        self._asked.clear()
        self._departing.clear()
        self._preparing.clear()

    def _prepared(self, preparing: Preparing, reply: Message) -> bool:
        preparing.done.set()
        moved = 0 if reply.status else reply.args[0]
        self._trace("prepared", reply)
        if (reply.op, reply.gpu) != (Op.PREPARE, preparing.gpu) or moved > preparing.nbytes:
            return False
        preparing.moved = min(moved, preparing.granted)  # nothing comes that was not asked for (MOVE_IN)
        return True

    def _reclaimed(self, asked: Asked, reply: Message) -> bool:
        self._trace("reclaimed", reply)
        holding, nbytes = asked.holding, 0 if reply.status else reply.args[0]
        holding.ask(-asked.nbytes)
        try:
            if not holding.closed and self._gpus[holding.gpu].booked.knows(self._process, holding.gpu):
                holding.moved_out(nbytes, reply.args[1])
        except OSError as error:
            log.debug("process %d: moved %d: %s", self._process.pid, nbytes, error.strerror)
            asked.done.set()
            return False
        asked.answered = True
        asked.done.set()
        if asked.late:
            self._gpus[holding.gpu].answered(holding, nbytes)
        return True

    def _trace(self, what: str, reply: Message) -> None:
        """Trace where the time of a move went, by the program's word: moving, waiting for what ran, with its gate
        closed, and making memory of the host."""
        us, waited, closed, made = reply.args[1:5]
        TRACE.add(f"{what} {self._process.pid}", us=us, waited=waited, closed=closed, made=made)
