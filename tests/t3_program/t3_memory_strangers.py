"""Memory turns beside CUDA programs that do not bring their memory as the library does, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
import trio

from backend.door.wire import Message, Op
from tests.support.cuda_session import GIB, Drive, Rig
from tests.support.cuda_session import drive as drive
from tests.support.prepared import PIECE, Busy, come, start

ASKED_MOST = 1000
"""Times that a program answers at once: no time passes between two of them."""
LOOK_S = 0.01
"""Seconds between two looks at the gates of programs."""


class Pretending(Busy):
    """Says at once that all has come of which nothing did."""

    asked: list[float]
    """When it was asked for that, by trio's clock."""

    async def library(self, message: Message) -> Message | None:
        if message.op != Op.PREPARE:
            return await super().library(message)
        self.asked.append(trio.current_time())
        return message.answer(message.args[0], 1) if len(self.asked) < ASKED_MOST else None


class Slow(Busy):
    """Takes long for little of what it is asked for."""

    async def library(self, message: Message) -> Message | None:
        if message.op != Op.PREPARE:
            return await super().library(message)
        if (await self.ask(Op.MOVE_IN, PIECE, 1000)).status:
            return message.answer(0, 1)
        await trio.sleep(0.3)
        self.resident += PIECE
        self.swapped -= PIECE
        self.show()
        return message.answer(PIECE, 1)


class Late(Busy):
    """Says, after some time, that some came of which nothing did."""

    async def library(self, message: Message) -> Message | None:
        if message.op != Op.PREPARE:
            return await super().library(message)
        await trio.sleep(0.45)
        return message.answer(min(message.args[0], PIECE), 1)


@attrs.define
class Wait:
    """How long a program waits for its turns."""

    longest_s: float = 0.0
    since: float = attrs.field(factory=trio.current_time)


async def waits(programs: Sequence[Busy], seconds: float) -> Sequence[float]:
    """Return the longest wait of each program in so many seconds."""
    found = [Wait() for _ in programs]
    until = trio.current_time() + seconds
    while (now := trio.current_time()) < until:
        for one, wait in zip(programs, found, strict=True):
            wait.since = wait.since if one.is_closed else now
            wait.longest_s = max(wait.longest_s, now - wait.since)
        await trio.sleep(LOOK_S)
    return [wait.longest_s for wait in found]


def test_one_that_says_that_all_came_is_not_asked_again_and_again(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it was booked: nothing came, and it is asked again a little later, as of others."""

    async def test(rig: Rig) -> None:
        start(rig, monkeypatch)
        for number in range(2):
            await come(rig, Busy, f"/user{number}", 35 * GIB)
        Pretending.asked = []
        await come(rig, Pretending, "/other", 0, 30 * GIB)
        for _ in range(10):
            before = len(Pretending.asked)
            await trio.sleep(1)
            assert len(Pretending.asked) - before <= 50
        assert Pretending.asked

    drive(test, scheduler=True)


@pytest.mark.parametrize("kind", [Busy, Slow, Late])
def test_one_whose_memory_comes_slowly_has_others_wait_no_longer(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, kind: type[Busy]
) -> None:
    """Its turn begins without: first after as long as its memory would take by the bus, and then at once. The bus is
    taken to carry half as much as it does at least."""

    async def test(rig: Rig) -> None:
        start(rig, monkeypatch)
        programs = [await come(rig, Busy, f"/user{number}", 35 * GIB) for number in range(2)]
        await come(rig, kind, "/other", 0, 30 * GIB)
        assert max(await waits(programs, 10)) <= 3.5
        assert max(await waits(programs, 20)) <= 2.5
        bounds = rig.h.controller._schedulers._levels.bounds()
        if kind is not Late:  # nothing of that one comes: it is taken to lack nothing
            assert len(bounds) == 3
        assert max(bounds.values(), default=0) <= 2_500_000

    drive(test, scheduler=True)
