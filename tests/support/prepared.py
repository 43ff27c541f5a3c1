"""CUDA programs whose library tells a working set, and has it come before a turn; and an engine that they share."""

from __future__ import annotations

from typing import TypeVar

import pytest
import trio

from backend.cuda.page import ALONE, LINE, USED, USED_AT
from backend.door.wire import CUDA_ALL, Message, Op
from tests.support.cuda_session import MIB, Rig
from tests.support.nvidia_rig import MS, Clock
from tests.support.turns import Gated, proven

PIECE = 64 * MIB
"""Bytes that the program asks for at a time."""


class Prepared(Gated):
    """A program whose library tells a working set, and has it come."""

    features = CUDA_ALL
    refuses = 0
    marks_s = 0.0
    """Seconds that it takes to find out what need not be written of what is to go."""
    left = 0
    """Bytes that were to go, as it was told last."""

    def tell(self, used: int, resident: int, clean: int = 0, told: int = ALONE, missed: int = 0, over: int = 0) -> None:
        """What stands on its page."""
        assert self.page is not None
        USED.pack_into(self.page, USED_AT, used, resident, clean, told, missed, over)

    async def library(self, message: Message) -> Message | None:
        if message.op == Op.END_TURN:
            self.left = message.args[1]
            await trio.sleep(self.marks_s)
        if message.op != Op.PREPARE:
            return await super().library(message)
        if self.refuses:
            return message.refuse(self.refuses)
        moved = 0
        while moved + PIECE <= min(message.args[0], self.swapped):
            if (await self.ask(Op.MOVE_IN, PIECE, 1000)).status:
                break
            await trio.sleep(0.001)
            moved += PIECE
            self.resident += PIECE
            self.swapped -= PIECE
            self.show()
        return message.answer(moved, 1000)


P = TypeVar("P", bound=Prepared)


class Busy(Prepared):
    """Uses all that it has, all the time, and says so."""

    def show(self) -> None:
        super().show()
        if self.page is not None:
            self.tell(self.resident + self.swapped, self.resident)
            LINE.pack_into(self.page, 0, 5, 0, 0)  # it has launched more than has finished


async def come(rig: Rig, kind: type[P], cgroup: str, resident: int, swapped: int = 0) -> P:
    """Start a program with so much on the GPU, and in the host."""
    proven(rig.gpu)
    rig.peers.offers = CUDA_ALL
    program = rig.connect(rig.process(cgroup), kind)
    assert isinstance(program, kind)
    await program.manage(resident, swapped)
    return program


async def engine(rig: Rig, clock: Clock) -> None:
    """Have those whose gates are open share the engine."""
    while True:
        on = [one for one in rig.programs if isinstance(one, Busy) and not one.is_closed]
        for number, one in enumerate(on):
            part = 10 * MS // len(on)
            rig.fake.trace.stay(one.process.pid, clock.ns + number * part, clock.ns + (number + 1) * part)
        clock.ns += 10 * MS
        await trio.sleep(0.01)


def start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the engine."""
    clock = rig.fake.trace.clock = Clock()
    monkeypatch.setattr("backend.nvidia.trace.time.monotonic_ns", clock)
    rig.nursery.start_soon(engine, rig, clock)
