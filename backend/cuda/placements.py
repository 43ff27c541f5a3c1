"""The placements of one CUDA program's kernels: on which groups of SMs of each GPU they are to run.

Each is a message that the program answers once its next launch runs there, or with the split of the SMs alone. Those
for which no caller waits are told by the task that tells all news of a session (:mod:`backend.cuda.news`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence

import attrs
import trio

from backend.cuda.sms import Shape
from backend.door.tenants import Line
from backend.door.wire import Message, Op

PLACE_S = 3.5
"""Seconds for a program to say that its kernels run where they were told to: it may be busy with memory for three of
them (RECLAIM_S of ``managed.py``); else it takes milliseconds."""

UNPLACED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EBUSY, errno.ENODEV)
"""What a program may say to an SMS that it does not follow."""

GROUPS_MOST = 64
"""Groups of SMs that a message can name."""


@attrs.define(eq=False)
class Placing:
    """An SMS that was sent and not answered."""

    gpu: int
    status: int | None = None
    """What was answered: 0 or a negated errno."""
    words: tuple[int, ...] = ()
    """What came with it: the number of groups, SMs in each, and of the GPU."""
    told: Callable[[Shape], None] | None = None
    """What is called with them."""
    done: trio.Event = attrs.field(factory=trio.Event)
    """It was, or will not be."""


class Placements:
    """See the module."""

    def __init__(self, line: Line, numbers: Iterator[int], wake: Callable[[], None]) -> None:
        """`numbers` are those of messages that are answered. `wake` has :meth:`tell` called, soon."""
        self._line = line
        self._numbers = numbers
        self._wake = wake
        self._placing: dict[int, Placing] = {}
        self._groups: dict[int, int] = {}  # gpu -> groups of SMs, not told yet
        self._shapes: dict[int, Callable[[Shape], None]] = {}  # gpu -> what is called with its split, not asked yet

    async def place(self, gpu: int, groups: int, *, ask: bool = False) -> Shape:
        """Have kernels run on some SMs alone, or `ask` for their split; see
        :meth:`backend.cuda.program.Mover.place`."""
        if not ask:
            self._groups.pop(gpu, None)
        seq, placing = next(self._numbers), Placing(gpu)
        self._placing[seq] = placing
        sent = False
        try:
            with trio.move_on_after(PLACE_S):
                sent = await self._line.send(Message(Op.SMS, seq, gpu, (groups, int(ask))))
                if sent:
                    await placing.done.wait()
        finally:
            if not sent:
                self._placing.pop(seq, None)
                placing.done.set()
        if placing.status is None and placing.done.is_set():
            raise OSError(errno.EBUSY, "the program speaks no more")
        if placing.status is None:  # what it answers later is an answer all the same, and says nothing
            raise OSError(errno.ETIMEDOUT, "the program does not say that its kernels run there")
        if placing.status:
            code = -placing.status if -placing.status in UNPLACED else errno.EIO
            raise OSError(code, f"the kernels of the program cannot be placed: {os.strerror(-placing.status)}")
        shape = _shape(placing.words)
        if shape is None and (groups or ask):
            raise OSError(errno.EOPNOTSUPP, "its driver has no green contexts")
        return shape or Shape(0, 0, 0)

    def place_soon(self, gpu: int, groups: int) -> None:
        """Have kernels run on these groups of SMs, 0 for all, soon."""
        self._groups[gpu] = groups
        self._wake()

    def shape_soon(self, gpu: int, told: Callable[[Shape], None]) -> None:
        """Ask how the SMs are split, soon, and call `told` with the answer."""
        self._shapes[gpu] = told
        self._wake()

    def answered(self, reply: Message) -> bool | None:
        """Take an answer, and return whether it is to what was asked. None for one that is not about SMs."""
        placing = self._placing.pop(reply.seq, None)
        if placing is None:
            return None
        placing.status, placing.words = reply.status, reply.args[:3]
        placing.done.set()
        if placing.told is not None and not reply.status and (shape := _shape(placing.words)) is not None:
            placing.told(shape)
        return (reply.op, reply.gpu) == (Op.SMS, placing.gpu)

    async def tell(self) -> None:
        """Send what is due."""
        while self._shapes:
            gpu, told = self._shapes.popitem()
            seq = next(self._numbers)
            self._placing[seq] = Placing(gpu, told=told)
            await self._line.send(Message(Op.SMS, seq, gpu, (0, 1)))
        while self._groups:
            gpu, groups = self._groups.popitem()
            seq = next(self._numbers)
            self._placing[seq] = Placing(gpu)
            await self._line.send(Message(Op.SMS, seq, gpu, (groups, 0)))

    def close(self) -> None:
        """Let go of all that wait for an answer: the connection has ended."""
        for placing in self._placing.values():
            placing.done.set()
        self._placing.clear()


def _shape(words: Sequence[int]) -> Shape | None:
    """Return the split of a GPU's SMs, as a program says it; None where it says what no GPU has."""
    count, each, sms = words
    return Shape(count, each, sms) if 0 < count <= GROUPS_MOST and 0 < each <= sms else None
