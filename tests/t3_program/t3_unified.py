"""Managed memory in the books: charged by what a program says, and counted by no driver."""

from __future__ import annotations

import random

import pytest
import trio

from backend.door.wire import CUDA, Feature, Message, Op
from tests.support.cuda_session import CONTEXT, GIB, MIB, Drive, Program, Rig, drive, pieces

__all__ = ["drive", "pieces"]  # fixtures

LOOKS = 0.7
"""Seconds after which what the driver counts has been seen, and judged."""


class Unified(Program):
    """A program whose memory is managed: NVML has its context alone."""

    managed = 0
    """Bytes that may be on the GPU."""

    async def say(self) -> None:
        (await self.ask(Op.HOST, 0, 0, 0, 0, self.managed)).check()

    async def alloc(self, nbytes: int) -> int:
        self.lag = self.context
        status = await super().alloc(nbytes)
        if not status:
            self.managed += nbytes
            await self.say()
        return status

    async def free(self, resident: int, swapped: int = 0) -> int:
        self.managed -= resident
        status = await super().free(resident, swapped)
        await self.say()
        return status

    async def move(self, request: Message) -> Message:
        reply = await super().move(request)
        if request.op == Op.RECLAIM:
            self.managed = self.resident
            await self.send(Message(Op.HOST, 0, self.gpu, (0, 0, 0, 0, self.managed)))
        return reply


async def started(rig: Rig, cgroup: str = "/job", kind: type[Program] = Unified) -> Program:
    program = rig.connect(rig.process(cgroup), kind)
    program.lag = CONTEXT
    await program.manage()
    await trio.sleep(LOOKS)
    return program


async def stands(rig: Rig, program: Program, charged: int) -> None:
    """The books have so much, and the context: nothing of it is disputed."""
    stat = await rig.stat(program.file + "gmem.stat")
    assert (stat["resident"], stat["implicit"], stat["disputed"]) == (charged + CONTEXT, CONTEXT, 0)


def test_it_is_charged_though_the_driver_counts_none_of_it(drive: Drive) -> None:
    """Whenever a look falls; and what the driver counts besides is found as ever."""

    async def test(rig: Rig) -> None:
        program = await started(rig)
        assert await program.alloc(8 * GIB) == 0
        await stands(rig, program, 8 * GIB)
        await trio.sleep(3 * LOOKS)
        await stands(rig, program, 8 * GIB)
        rng = random.Random(7)
        for _ in range(40):
            nbytes = rng.randrange(1, 200) * 2 * MIB
            if rng.random() < 0.5:
                assert await program.free(nbytes) == 0
            else:
                assert await program.alloc(nbytes) == 0
            await trio.sleep(rng.random() * 0.2)
            await stands(rig, program, program.resident)
        program.context = 700 * MIB
        program.lag = program.context
        program.show()
        await trio.sleep(3 * LOOKS)
        assert (await rig.stat(program.file + "gmem.stat"))["implicit"] == 700 * MIB

    drive(test)


def test_a_limit_holds_by_what_it_says(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await started(rig)
        assert await program.alloc(8 * GIB) == 0
        await rig.h.write("slice/job/0/gmem.limit.high", "4G")
        assert await rig.number("slice/job/0/gmem.current") <= 4 * GIB
        await trio.sleep(3 * LOOKS)
        await stands(rig, program, program.resident)
        assert await rig.number("slice/job/0/gmem.swap.current") == program.swapped
        await rig.h.write("slice/job/0/gmem.limit.high", "max")
        await trio.sleep(LOOKS)
        assert program.rooms
        back = program.swapped
        (await program.ask(Op.MOVE_IN, back, 0)).check()
        program.resident, program.swapped = program.resident + back, 0
        program.managed = program.resident
        await program.say()
        await trio.sleep(3 * LOOKS)
        await stands(rig, program, 8 * GIB)

    drive(test)


def test_another_connection_says_it_anew(drive: Drive) -> None:
    """As with the next daemon: what there is comes with MANAGE, and what of that is managed behind it."""

    async def test(rig: Rig) -> None:
        program = rig.connect(rig.process("/job"), Unified)
        program.lag = CONTEXT
        rig.driver_says(program.process.pid, CONTEXT)
        await program.manage(8 * GIB)
        program.managed = 8 * GIB
        await program.say()
        await trio.sleep(3 * LOOKS)
        await stands(rig, program, 8 * GIB)

    drive(test)


@pytest.mark.logs("past its library")
def test_a_lie_is_found(drive: Drive) -> None:
    """What it says is managed, and the driver counts: it is in the books twice, and past its library."""

    async def test(rig: Rig) -> None:
        program = await started(rig)
        assert await program.alloc(4 * GIB) == 0
        program.lag = CONTEXT + 4 * GIB
        program.show()
        await trio.sleep(3 * LOOKS)
        assert await rig.number(program.file + "gmem.current") == 8 * GIB + CONTEXT
        (await program.ask(Op.HOST, 0, 0, 0, 0, 1 << 60)).check()
        await trio.sleep(3 * LOOKS)
        assert await rig.number(program.file + "gmem.current") == 8 * GIB + CONTEXT, "no more than it has charged"

    drive(test)


@pytest.mark.logs("its library is older than this daemon and lacks managed")
def test_an_older_library_has_none(drive: Drive) -> None:
    """The word means nothing of it."""

    class Older(Unified):
        features = CUDA & ~Feature.MANAGED

    async def test(rig: Rig) -> None:
        program = await started(rig, kind=Older)
        assert await program.alloc(4 * GIB) == 0
        await trio.sleep(3 * LOOKS)
        assert (await rig.stat(program.file + "gmem.stat"))["disputed"] == 4 * GIB - CONTEXT

    drive(test)
