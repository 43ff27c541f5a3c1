"""A CUDA program whose library tells a working set, and has it come."""

from __future__ import annotations

import trio

from backend.cuda.page import ALONE, USED, USED_AT
from backend.door.wire import CUDA_ALL, Message, Op
from tests.support.cuda_session import MIB
from tests.support.turns import Gated

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
