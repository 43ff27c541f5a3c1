"""Programs with unfinished work at the end of their turn: they drain on the runlist, and go off once they are done."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import trio

from backend.core.turns import TurnEnd
from backend.cuda.gates import ANSWER_S, WAIT_US
from backend.cuda.migrations import Standby
from backend.door.wire import Message, Op
from backend.process.identity import Member
from tests.support.cuda_session import GIB, Drive, Rig, drive, pieces, until_then
from tests.support.turns import BOUND_US, Gated, begin_turn, drain, end_turn, gated, without

__all__ = ["drive", "pieces"]  # fixtures

LONG_US = 2_000_000
"""Bound of a drain in these tests, in microseconds."""


def engines(rig: Rig, program: Gated) -> tuple[bool, bool]:
    """Return whether a program is without GR, and without its copy engines."""
    return without(rig.fake.programs[program.process.pid])


async def draining(rig: Rig, drain_s: float = 0.5) -> Gated:
    """Start a program of 8 GiB that drains for `drain_s` seconds."""
    program = await gated(rig, 8 * GIB, "/job", 0)
    program.drain_s = drain_s
    assert await end_turn(rig.h, program, stays=True) is TurnEnd.LATE
    assert engines(rig, program) == (False, False)
    assert program.is_closed
    return program


def turn_end(rig: Rig, program: Gated) -> TurnEnd | None:
    """Return how a program's turn ended, as the daemon knows it; None while it has its turn."""
    return rig.h.controller.population.record(Member(program.process, 0)).compute.turn_end


def test_what_drains_gives_memory_and_goes_off_once_it_is_drained(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig)
        began = trio.current_time() - BOUND_US / 1e6
        await rig.h.write(program.file + "gmem.limit.high", "7G")
        assert program.resident == 7 * GIB, "as if it ran: once nothing runs"
        assert trio.current_time() - began == pytest.approx(0.5 + 1 / 32, abs=0.03)
        assert await drain(rig.h, program, LONG_US) is TurnEnd.DRAINED
        assert trio.current_time() - began == pytest.approx(0.5 + 1 / 32, abs=0.03)
        assert engines(rig, program) == (True, False)
        assert program.is_closed
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident == 6 * GIB
        asked = [us for op, us in program.told if op == Op.END_TURN]
        assert all(us <= WAIT_US for us in asked), "what its library does nothing else in"
        assert len(asked) <= 0.5e6 / WAIT_US + 2
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)
        assert not program.is_closed

    drive(test)


def test_what_does_not_drain_goes_off_as_it_is(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        assert await drain(rig.h, program, LONG_US) is TurnEnd.LATE
        assert engines(rig, program) == (True, False)
        assert rig.gpu.footprint(program.process).movable == 0
        assert await rig.h.refused(program.file + "gmem.limit.high", "6G") == errno.EBUSY
        await begin_turn(rig.h, program)
        assert rig.gpu.footprint(program.process).movable == 8 * GIB

    drive(test)


def test_its_next_turn_begins_while_it_drains(drive: Drive) -> None:
    """No lever is needed, since it is on the runlist, and nothing closes the gate again."""

    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        found: list[TurnEnd | None] = []

        async def wait() -> None:
            found.append(await drain(rig.h, program, LONG_US))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.12)
            await begin_turn(rig.h, program)
            await trio.sleep(WAIT_US / 1e6)
        assert found == [None]
        assert engines(rig, program) == (False, False)
        await trio.sleep(1)
        assert not program.is_closed
        assert program.told[-1][0] == Op.BEGIN_TURN
        assert turn_end(rig, program) is None
        program.drain_s = 0.0
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED, "and it is asked again"

    drive(test)


def test_a_wait_that_is_given_up_and_begun_again(drive: Drive) -> None:
    """The earlier answer is waited for, and the program is not taken to be mute."""

    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        with trio.move_on_after(0.12):
            await drain(rig.h, program, LONG_US)
        assert await drain(rig.h, program, 0) is TurnEnd.LATE
        assert engines(rig, program) == (True, False)
        await begin_turn(rig.h, program)
        assert not program.is_closed

    drive(test)


def test_a_library_that_is_busy_is_waited_for(drive: Drive) -> None:
    """Memory that comes back occupies the thread that answers, for up to 2 s."""

    async def test(rig: Rig) -> None:
        program = await draining(rig, 0.3)

        async def busy(message: Message) -> Message | None:
            await trio.sleep(1)
            return await program.library(message)

        program.obey = busy
        assert await drain(rig.h, program, LONG_US) is TurnEnd.DRAINED
        assert engines(rig, program) == (True, False)
        program.obey = program.library
        await begin_turn(rig.h, program)
        assert await end_turn(rig.h, program, stays=True) is TurnEnd.LATE
        program.obey = busy
        program.drain_s = 60.0
        assert await drain(rig.h, program, BOUND_US) is TurnEnd.LATE, "nothing says that its gate is open"
        await trio.sleep(1 + ANSWER_S)
        await begin_turn(rig.h, program)

    drive(test)


def test_frozen_and_thawed_while_it_drains(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig, 0.5)
        await rig.h.write(program.file + "compute.freeze", 1)
        assert engines(rig, program) == (True, True)
        assert "frozen 1\n" in await rig.h.read(program.file + "compute.events")
        await rig.h.write(program.file + "compute.freeze", 0)
        assert engines(rig, program) == (False, False)
        assert program.is_closed
        assert await drain(rig.h, program, LONG_US) is TurnEnd.DRAINED
        assert engines(rig, program) == (True, False)

    drive(test)


def test_a_freeze_is_not_kept_waiting_by_a_drain(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await draining(rig, 60)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drain, rig.h, program, LONG_US)
            await trio.sleep(0.1)
            began = trio.current_time()
            await rig.h.write(program.file + "compute.freeze", 1)
            assert trio.current_time() - began < 0.1
            assert engines(rig, program) == (True, True)
        assert turn_end(rig, program) is TurnEnd.LATE
        await rig.h.write(program.file + "compute.freeze", 0)
        assert engines(rig, program) == (True, False), "its wait is over"
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)

    drive(test)


@pytest.mark.parametrize("how", ["moved", "dies", "disconnects", "captures"])
def test_what_else_may_become_of_it_while_it_drains(drive: Drive, how: str) -> None:
    async def test(rig: Rig) -> None:
        program, found = await draining(rig, 60), list[TurnEnd | None]()
        group = Member(program.process, 0)

        async def move(*words: Any) -> None:
            standby = words[-1]
            assert isinstance(standby, Standby)
            await standby.begin()
            assert not program.is_closed, "it left its turn"
            standby.over.set()
            raise OSError(errno.EBUSY, "it does not come to a rest")

        async def refuse(message: Message) -> Message | None:
            return message.refuse(errno.EBUSY) if message.op == Op.END_TURN else await program.library(message)

        async def wait() -> None:
            found.append(await rig.h.controller._follower.turning.drain(group, LONG_US))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.sleep(0.12)
            match how:
                case "moved":
                    rig.gpu.mover.move = move  # type: ignore[method-assign]
                    with trio.fail_after(1):
                        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY
                case "dies":
                    await rig.die(program)
                case "disconnects":
                    program.socket.close()
                    await until_then(lambda: program.process not in rig.gpu.managed)
                case _:
                    program.obey = refuse
        if how in ("moved", "dies"):
            assert found == [None]
            await trio.sleep(1)
            assert not program.is_closed, "nor is it closed again by what waited"
            assert program.process not in rig.gpu.managed
            assert rig.h.controller.population.holds(group) is (how == "moved")
            if how == "moved":
                assert engines(rig, program) == (False, False)
                assert turn_end(rig, program) is None
                assert not rig.h.controller._follower.place(group).off
            return
        await rig.h.controller._follower.apply(group)
        assert found == [TurnEnd.UNGATED], "its gate is open"
        assert engines(rig, program) == (True, True)

    drive(test, 2)
