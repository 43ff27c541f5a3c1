"""What a CUDA program tells of its working set, and how that comes back before its turn: the daemon's end of it. What
the library does (t6_sets.py), a program of these tests does."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import trio

from backend.core.turns import TurnEnd
from backend.core.workingset import ANY, WorkingSet
from backend.cuda.page import ALONE, SHARES
from backend.door.wire import CUDA, CUDA_ALL, Message, Op
from tests.support.cuda_session import GIB, MIB, Drive, Rig
from tests.support.cuda_session import drive as drive
from tests.support.prepared import PIECE, Prepared
from tests.support.turns import Gated, begin_turn, end_turn, proven


class Older(Gated):
    """A program with a library of before there were working sets."""

    features = CUDA


async def prepared(rig: Rig, resident: int, swapped: int = 0) -> Prepared:
    proven(rig.gpu)
    rig.peers.offers = CUDA_ALL
    program = rig.connect(rig.process(), Prepared)
    assert isinstance(program, Prepared)
    await program.manage(resident, swapped)
    return program


def test_the_page_tells_what_a_program_used(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await prepared(rig, 2 * GIB)
        process = program.process
        assert rig.gpu.working_set(process) is None
        assert rig.gpu.shares(process) is None, "not told"
        program.tell(GIB, MIB, 3)
        assert rig.gpu.working_set(process) == WorkingSet(GIB, MIB, 3)
        assert rig.gpu.shares(process) == frozenset()
        program.tell(GIB, 2 * GIB, 1 << 63)
        assert rig.gpu.working_set(process) == WorkingSet(GIB, GIB, (1 << 63) - 1), "no more of it than it is"
        program.tell(GIB, GIB, 0, ALONE, MIB, 1 << 63)
        assert rig.gpu.working_set(process) == WorkingSet(GIB, GIB, 0, MIB, (1 << 63) - 1)
        program.tell(GIB, GIB, 0, SHARES)
        assert rig.gpu.shares(process) == {ANY}, "with which other one is not told"
        program.tell(GIB, GIB, 0, 77)
        assert rig.gpu.working_set(process) is None
        assert rig.gpu.shares(process) is None

    drive(test)


def test_a_program_is_told_what_goes_and_has_time_to_look_at_it(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await prepared(rig, GIB)
        program.marks_s = 0.03
        assert await rig.gpu.end_turn(program.process, 0, 64 * MIB) is TurnEnd.DRAINED
        assert program.left == 64 * MIB
        await rig.gpu.begin_turn(program.process)
        await trio.sleep(1)
        assert await rig.gpu.end_turn(program.process, 0) is TurnEnd.UNGATED, "nothing goes, and it takes as long"
        assert program.left == 0

    drive(test)


@pytest.mark.logs("older than this daemon and lacks sets")
def test_an_older_library_tells_nothing_and_is_not_asked(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        proven(rig.gpu)
        rig.peers.offers = CUDA_ALL
        program = rig.connect(rig.process(), Older)
        assert isinstance(program, Older)
        await program.manage(GIB)
        await end_turn(rig.h, program)
        assert rig.gpu.working_set(program.process) is None
        assert await rig.gpu.prepare(program.process, GIB) == 0

    drive(test)


def test_what_a_program_lacks_comes_before_its_turn(drive: Drive) -> None:
    """It is booked, and its gate stays closed."""

    async def test(rig: Rig) -> None:
        program = await prepared(rig, GIB, 2 * GIB)
        assert await rig.gpu.prepare(program.process, GIB) == 0, "not one whose turn it is"
        await end_turn(rig.h, program)
        assert await rig.gpu.prepare(program.process, GIB) == GIB
        assert program.is_closed
        current = await rig.number(program.file + "gmem.current")
        assert current >= program.resident == 2 * GIB
        assert await rig.number(program.file + "gmem.swap.current") == GIB
        await rig.h.write(program.file + "gmem.limit.high", current + 2 * PIECE)
        assert await rig.gpu.prepare(program.process, GIB) == 2 * PIECE, "as far as there is room"
        await begin_turn(rig.h, program)
        assert not program.is_closed

    drive(test)


def test_what_is_coming_is_not_asked_for_again(drive: Drive) -> None:
    """The page tells what has come once all of it has; meanwhile more is planned."""

    async def test(rig: Rig) -> None:
        program = await prepared(rig, GIB, 3 * GIB)
        program.tell(2 * GIB, GIB)
        await end_turn(rig.h, program)
        seen: list[int] = []

        async def look() -> None:
            while True:
                found = rig.gpu.working_set(program.process)
                assert found is not None
                seen.append(found.missing)
                await trio.sleep(0.0005)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            assert await rig.gpu.prepare(program.process, GIB // 2) == GIB // 2
            nursery.cancel_scope.cancel()
        assert seen[0] == GIB
        assert seen[-1] <= GIB // 2 + PIECE
        assert seen == sorted(seen, reverse=True)
        assert rig.gpu.working_set(program.process) == WorkingSet(2 * GIB, GIB), "from then on by its own word"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            assert await rig.gpu.prepare(program.process, 2 * GIB) > GIB
            nursery.cancel_scope.cancel()
        assert min(seen) == 0, "no less than nothing"

    drive(test)


def silent(message: Message) -> Message | None:
    return None


def test_what_was_given_up_is_waited_for_by_the_next(drive: Drive) -> None:
    """The end of a phase gives a piece up, which goes on: the one after it says what came."""

    async def test(rig: Rig) -> None:
        program = await prepared(rig, GIB, GIB)
        await end_turn(rig.h, program)
        library, asked = program.library, list[int]()

        async def slow(message: Message) -> Message | None:
            if message.op == Op.PREPARE:
                asked.append(message.args[0])
                await trio.sleep(0.1)
            return await library(message)

        program.obey = slow
        with trio.move_on_after(0.05):
            await rig.gpu.prepare(program.process, 4 * PIECE)
        assert await rig.gpu.prepare(program.process, 2 * PIECE) == 4 * PIECE
        assert await rig.gpu.prepare(program.process, 2 * PIECE) == 2 * PIECE
        assert asked == [4 * PIECE, 2 * PIECE]

    drive(test)


def too_much(message: Message) -> Message | None:
    return message.answer(message.args[0] + 1)


def busy(message: Message) -> Message | None:
    return message.refuse(errno.EBUSY)


def unasked(message: Message) -> Message | None:
    return message.answer(message.args[0], 1)


@pytest.mark.parametrize(
    ("answer", "stays"),
    [
        (silent, True),
        (busy, True),
        (unasked, True),
        pytest.param(too_much, False, marks=pytest.mark.logs("an answer to nothing")),
    ],
)
def test_a_program_that_does_not_do_it_keeps_none_waiting(
    drive: Drive, answer: Callable[[Message], Message | None], stays: bool
) -> None:
    """One that says so, and did not ask for it, had nothing come either."""

    async def test(rig: Rig) -> None:
        program = await prepared(rig, GIB, GIB)
        await end_turn(rig.h, program)
        library = program.library

        async def obey(message: Message) -> Message | None:
            return answer(message) if message.op == Op.PREPARE else await library(message)

        program.obey = obey
        with trio.fail_after(1):
            assert await rig.gpu.prepare(program.process, GIB) == 0
            assert await rig.gpu.prepare(program.process, GIB) == 0
        with trio.move_on_after(1):
            await program.ended.wait()
        assert program.ended.is_set() != stays

    drive(test)
