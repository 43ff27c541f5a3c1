"""What a program says of its memory takes none from others, and no turns, that it does not follow."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import trio

from backend.cuda.page import LINE
from backend.door.wire import Message, Op
from backend.process.identity import Member
from tests.support.cuda_session import GIB, Drive, Rig, drive
from tests.support.prepared import Busy, Prepared, come, start

__all__ = ["drive"]  # a fixture

CAPACITY = 80 * GIB
"""Bytes of memory of the GPU."""


class Liar(Prepared):
    """A program that says that it has memory in the host, and answers some requests alone."""

    mute: Collection[int] = ()

    async def library(self, message: Message) -> Message | None:
        return None if message.op in self.mute else await super().library(message)


async def lie(rig: Rig, cgroup: str, mute: Collection[int]) -> None:
    """Start a program that says that it uses 16 times what the GPU has, of which it has nothing there."""
    liar = await come(rig, Liar, cgroup, 0, 15 * CAPACITY)
    liar.mute = mute
    liar.tell(16 * CAPACITY, 0)
    assert liar.page is not None
    LINE.pack_into(liar.page, 0, 5, 0, 0)


def turns(rig: Rig, one: Prepared) -> int:
    """Return the number of turns of memory that a program has had."""
    turned = rig.h.controller.population.record(Member(one.process, 0)).scheduled.turned
    return 0 if turned is None else turned.turns


@pytest.mark.parametrize("mute", [(Op.END_TURN, Op.BEGIN_TURN, Op.PREPARE), (Op.PREPARE,)], ids=["all", "prepare"])
def test_what_one_has_in_the_host_by_its_word_takes_nothing_of_others(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, mute: Collection[int]
) -> None:
    """Where it does not follow. Others stand for it for a moment, and seldom."""

    async def test(rig: Rig) -> None:
        start(rig, monkeypatch)
        honest = [await come(rig, Busy, f"/user{number}", 10 * GIB) for number in range(3)]
        await trio.sleep(3)
        assert not any(turns(rig, one) for one in honest)
        await lie(rig, "/liar", mute)
        closed, lost, looks = 0, 0, 6000
        for _ in range(looks):
            await trio.sleep(0.01)
            closed += sum(one.is_closed for one in honest)
            lost += sum(one.swapped for one in honest)
        assert closed / (looks * len(honest)) <= 0.15
        assert lost / (looks * 30 * GIB) <= 0.05

    drive(test, scheduler=True)


def test_limits_of_its_slice_bound_what_its_word_takes(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a swap.max of 0 it can have nothing in the host."""

    async def test(rig: Rig) -> None:
        start(rig, monkeypatch)
        honest = [await come(rig, Busy, f"/user{number}", 10 * GIB) for number in range(3)]
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"liar", 0o755, rig.h.ctx)
        await rig.h.write("slice/liar/0/gmem.swap.max", 0)
        await trio.sleep(1)
        await lie(rig, "/liar", (Op.END_TURN, Op.BEGIN_TURN, Op.PREPARE))
        await trio.sleep(12)
        assert not any(turns(rig, one) for one in honest)
        assert not any(one.reclaims for one in honest)

    drive(test, scheduler=True)
