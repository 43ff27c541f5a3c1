"""Programs that wait for their turn: a drained program gives memory as if it ran, and no other gives in its stead."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
from collections import Counter
from typing import Any

import attrs
import pytest
import trio

import backend.core.reasons
import backend.cuda.managed
import backend.scheduler.parts
from backend.core.records import Activity, Capability, Place
from backend.core.turns import AHEAD_S, AHEAD_US, TurnEnd
from backend.cuda.gates import ANSWER_S, MUTE_S, WAIT_US
from backend.cuda.managed import DISTRUST_S, RECLAIM_S, SHORT_S
from backend.cuda.migrations import Standby
from backend.cuda.server import Session
from backend.door.wire import CUDA, Feature, Message, Op
from backend.nvidia.proven import GR_ALONE
from backend.process.identity import Member, Process
from backend.process.running import is_stopped
from backend.scheduler.ends import DRAIN_MOST_US, DRAIN_SLICE_US, DRAIN_US, UNDRAINED_S
from backend.scheduler.scheduler import Scheduler
from tests.support.cuda_session import GIB, LOOKS, MIB, Drive, Program, Rig, drive, pieces, takes, until_then
from tests.support.harness import Harness, Spawn, StubGpu, answers, refuses, running, settle, until, virtual
from tests.support.turns import (
    BOUND_US,
    GIVEN_UP_S,
    LOOK_S,
    Gated,
    begin_turn,
    coming_back,
    drain,
    end_turn,
    follower,
    gated,
    without,
)

__all__ = ["drive", "pieces"]  # fixtures

SLICE = "slice/job/0/"


def engines(rig: Rig, program: Program) -> tuple[bool, bool]:
    """Return whether a program is without GR, and without its copy engines."""
    return without(rig.fake.programs[program.process.pid])


def said(rig: Rig, program: Program) -> TurnEnd | None:
    """Return how its last turn ended, as gcgroup.record shows it."""
    return rig.h.controller.population.record(Member(program.process, 0)).compute.turn_end


async def pair(rig: Rig) -> tuple[Gated, Gated]:
    """Start two programs of 8 GiB in one slice."""
    return await gated(rig, 8 * GIB, "/job", 0), await gated(rig, 8 * GIB, "/job", 0)


# Drained


def test_a_program_that_waits_for_its_turn_is_brought_under_its_limit(drive: Drive) -> None:
    """This happens without EBUSY, by its own limit, by gmem.reclaim, and by a limit that still holds in its next
    turns.
    """

    async def test(rig: Rig) -> None:
        program, _ = await pair(rig)
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED
        assert engines(rig, program) == (True, False)
        assert program.is_closed
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident == 6 * GIB
        await rig.h.write(program.file + "gmem.reclaim", GIB)
        assert program.resident == 5 * GIB
        assert (await rig.stat(program.file + "gmem.events"))["fail"] == 0
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)
        assert not program.is_closed
        assert await program.alloc(4 * GIB) == 0
        assert program.resident == 6 * GIB

    drive(test)


def test_a_protected_neighbour_gives_nothing_in_its_stead(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        waits, protected = await pair(rig)
        await rig.h.write(protected.file + "gmem.limit.low", "max")
        assert await end_turn(rig.h, waits) is TurnEnd.DRAINED
        await rig.h.write(SLICE + "gmem.limit.high", "12G")
        assert (waits.resident, protected.resident) == (4 * GIB, 8 * GIB)
        assert protected.reclaims == []
        assert (await rig.stat(protected.file + "gmem.events"))["low"] == 0

    drive(test)


def test_a_slice_holds_its_limit_in_all_turns(drive: Drive) -> None:
    """While one program waits, the other allocates more: the excess is moved out before the allocation is granted."""

    async def test(rig: Rig) -> None:
        both = await pair(rig)
        await rig.h.write(SLICE + "gmem.limit.high", "16G")
        for turn in range(4):
            waits, runs = both if turn % 2 else both[::-1]
            assert await end_turn(rig.h, waits) is TurnEnd.DRAINED
            assert await runs.alloc(GIB) == 0
            assert await rig.number(SLICE + "gmem.current") <= 16 * GIB
            await begin_turn(rig.h, waits)
        assert (await rig.stat(SLICE + "gmem.events"))["fail"] == 0

    drive(test)


def test_a_program_with_a_bounded_run_ahead_gets_rid_of_the_bound(drive: Drive) -> None:
    """The bound ends some time after its last turn."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, GIB)
        for _ in range(2):
            await end_turn(rig.h, program)
            await begin_turn(rig.h, program)
            assert program.ahead_us == AHEAD_US
        await trio.sleep(AHEAD_S / 2)
        assert program.ahead_us == AHEAD_US
        await trio.sleep(AHEAD_S / 2 + LOOKS)
        assert program.ahead_us == 0
        assert program.told == [(Op.END_TURN, BOUND_US), (Op.BEGIN_TURN, AHEAD_US)] * 2 + [(Op.BEGIN_TURN, 0)]

    drive(test)


def test_a_bound_does_not_end_in_the_middle_of_the_end_of_a_turn(drive: Drive) -> None:
    """The message that removes the bound also opens the gate."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, GIB)
        await end_turn(rig.h, program)
        await begin_turn(rig.h, program)
        await trio.sleep(AHEAD_S - 0.2)
        program.drain_s = 0.8
        assert await end_turn(rig.h, program, 1_000_000) is TurnEnd.DRAINED
        assert program.is_closed
        assert (Op.BEGIN_TURN, 0) not in program.told
        await begin_turn(rig.h, program)
        await trio.sleep(AHEAD_S + LOOKS)
        assert program.told[-1] == (Op.BEGIN_TURN, 0)

    drive(test)


# A GPU that is lost


@pytest.mark.logs("GPU 0 is lost", "GPU 0 is back")
@pytest.mark.parametrize("how", ["drained", "late", "drains", "asked", "runs"])
def test_a_gpu_that_is_lost_opens_every_gate(drive: Drive, how: str) -> None:
    """A launch fails with the driver's error, and none waits for a turn or for work that never ends. Once the GPU is
    back, turns end as before.
    """

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB, "/", 0)
        program.drain_s = 0.0 if how == "drained" else 60.0
        ended: list[TurnEnd | None] = []

        async def end() -> None:
            with contextlib.suppress(OSError):  # the engines are gone
                ended.append(await end_turn(rig.h, program, BOUND_US if how != "asked" else 5_000_000))

        async with trio.open_nursery() as nursery:
            if how == "drains":
                await end_turn(rig.h, program, stays=True)
                nursery.start_soon(drained, rig.h, program)
            elif how == "runs":
                await end_turn(rig.h, program)
                await begin_turn(rig.h, program)
            else:
                nursery.start_soon(end)
            await trio.sleep(0.2)
            assert program.is_closed is (how != "runs")
            await rig.lose()
            await trio.sleep(LOOK_S)
        assert not program.is_closed
        assert program.told[-1] == (Op.BEGIN_TURN, 0), "nor is its run-ahead bounded"
        assert not program.ended.is_set()
        assert ended == {"drained": [TurnEnd.DRAINED], "late": [TurnEnd.LATE]}.get(how, [])
        await trio.sleep(1)
        assert not program.is_closed
        await rig.restore()
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)
        program.drain_s = 0.0
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED
        assert program.is_closed
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident == 6 * GIB
        await begin_turn(rig.h, program)
        assert not program.is_closed
        assert program.ahead_us == AHEAD_US

    drive(test)


async def drained(h: Harness, program: Gated) -> None:
    """Wait for a program that drains, on a GPU that may be lost."""
    with contextlib.suppress(OSError):
        await drain(h, program, 5_000_000)


# Not drained


def test_a_program_whose_kernel_goes_on_keeps_its_memory_until_its_turn(drive: Drive) -> None:
    """The write fails with EBUSY, and others give memory. With its next turn the program gives its excess."""

    async def test(rig: Rig) -> None:
        late, other = await pair(rig)
        late.drain_s = 60.0
        async with takes(BOUND_US / 1e6, BOUND_US / 1e6 + 0.1):
            assert await end_turn(rig.h, late) is TurnEnd.LATE
        assert engines(rig, late) == (True, False), "its copies go on"
        assert late.is_closed
        assert rig.gpu.footprint(late.process).movable == 0
        assert await rig.h.refused(late.file + "gmem.limit.high", "6G") == errno.EBUSY
        await rig.h.write(late.file + "gmem.limit.high", "max")
        await rig.h.write(SLICE + "gmem.limit.high", "12G")
        assert (late.reclaims, other.resident) == ([], 4 * GIB)
        assert await rig.h.refused(SLICE + "gmem.limit.high", "6G") == errno.EBUSY
        assert other.resident == 4 * GIB, "nothing moves for what cannot be"
        await rig.h.write(SLICE + "gmem.limit.high", "max")
        await begin_turn(rig.h, late)
        assert rig.gpu.footprint(late.process).movable == 8 * GIB
        await rig.h.write(SLICE + "gmem.limit.high", "6G")
        assert late.resident == other.resident == 3 * GIB

    drive(test)


def test_what_a_program_had_too_much_it_gives_with_its_turn(drive: Drive) -> None:
    """The driver allocated the excess while the program was late: no write asked for it, and no other program can
    give.
    """

    async def test(rig: Rig) -> None:
        late = await gated(rig, 8 * GIB, "/job", 0)
        await rig.h.write(SLICE + "gmem.limit.high", "8G")
        late.drain_s = 60.0
        assert await end_turn(rig.h, late) is TurnEnd.LATE
        late.context = GIB
        late.show()
        await trio.sleep(LOOKS)
        assert await rig.number(SLICE + "gmem.current") == 9 * GIB
        assert (late.resident, late.reclaims) == (8 * GIB, [])
        late.drain_s = 0.0
        await begin_turn(rig.h, late)
        await settle()
        assert (late.resident, late.reclaims) == (7 * GIB, [GIB])
        assert await rig.number(SLICE + "gmem.current") == 8 * GIB

    drive(test)


class Older(Gated):
    """A program whose library is older than turns."""

    features = CUDA & ~Feature.TURNS


@pytest.mark.parametrize(
    "why",
    [
        "silent",
        pytest.param("older", marks=pytest.mark.logs("older than this daemon and lacks turns")),
        "unproven",
        "capture",
        "stopped",
    ],
)
def test_a_program_without_a_gate_is_off_with_all_engines(drive: Drive, why: str) -> None:
    """It goes off at once, and no request is sent that it cannot answer."""

    async def test(rig: Rig) -> None:
        if why == "silent":
            program = rig.connect(rig.process())
            program.rig.driver_says(program.process.pid, GIB)
            await trio.sleep(LOOKS)
        elif why == "older":
            program = await rig.connect(rig.process(), Older).manage(8 * GIB)
        else:
            program = await gated(rig, 8 * GIB)
        if why == "unproven":
            capabilities: Any = rig.gpu.capabilities()
            capabilities[GR_ALONE] = Capability.ADVISORY
        if why == "stopped":
            os.kill(program.process.pid, signal.SIGSTOP)
            await until(lambda: is_stopped(program.process.pid), "it is stopped")
        if why == "capture":
            program.obey = busy
        async with takes(0, ANSWER_S):
            assert await end_turn(rig.h, program) is TurnEnd.UNGATED
        assert engines(rig, program) == (True, True)
        assert rig.gpu.footprint(program.process).movable == 0
        if isinstance(program, Gated):
            assert program.told == []
            assert await rig.h.refused(program.file + "gmem.limit.high", "6G") == errno.EBUSY
        os.kill(program.process.pid, signal.SIGCONT)
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)

    drive(test)


async def busy(request: Message) -> Message:
    """Answer as a program does that captures a stream."""
    return request.refuse(errno.EBUSY) if request.op == Op.END_TURN else request.answer()


# Programs that lie, or do not answer


def slow(program: Gated, seconds: float) -> None:
    """Delay every answer of a program from now on."""

    async def late(request: Message) -> Message | None:
        await trio.sleep(seconds)
        return await program.library(request)

    program.obey = late


def test_a_program_that_does_not_answer_in_time_is_waited_for_less_and_less(drive: Drive) -> None:
    """A later answer is accepted, and has no effect. After the first failure the program is asked again in its next
    turn, and after that only some time later.
    """

    async def test(rig: Rig) -> None:
        program, asked_s = await gated(rig, 8 * GIB), BOUND_US / 1e6 + ANSWER_S

        async def is_waited_for() -> bool:
            began = trio.current_time()
            assert await end_turn(rig.h, program) is TurnEnd.UNGATED
            took = trio.current_time() - began
            assert took < 0.02 or asked_s <= took < asked_s + 0.02
            assert engines(rig, program) == (True, True)
            await begin_turn(rig.h, program)
            await trio.sleep(1)
            assert not program.is_closed
            return took >= asked_s

        slow(program, asked_s + 0.1)
        assert await is_waited_for()
        assert await is_waited_for(), "it may have been once"
        assert not await is_waited_for()
        await trio.sleep(MUTE_S)
        assert not await is_waited_for()
        await trio.sleep(MUTE_S)
        assert await is_waited_for(), "for twice as long"
        await trio.sleep(2 * MUTE_S + 2)
        assert not await is_waited_for()
        await trio.sleep(2 * MUTE_S)
        program.obey = program.library
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED
        assert engines(rig, program) == (True, False)
        await begin_turn(rig.h, program)
        slow(program, asked_s + 0.1)
        assert await is_waited_for()
        program.obey = program.library
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED, "as if it had never been"
        await begin_turn(rig.h, program)
        assert not program.is_closed

    drive(test)


def test_a_program_that_never_answers_is_asked_no_more(drive: Drive) -> None:
    """So it cannot make the daemon remember more and more requests."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        asked: list[Message] = []

        async def mute(request: Message) -> None:
            asked.append(request)

        program.obey = mute
        for _ in range(4):
            await end_turn(rig.h, program)
            await begin_turn(rig.h, program)
            await trio.sleep(2 * MUTE_S)
        assert [request.op for request in asked] == [Op.END_TURN, Op.BEGIN_TURN, Op.BEGIN_TURN], "the last: no bound"
        assert not program.ended.is_set()

    drive(test)


def test_a_program_that_says_at_once_that_it_is_late_is_asked_as_often_as_another(drive: Drive) -> None:
    """The program drains: it cannot make the daemon do nothing but ask."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        asked: list[float] = []

        async def at_once(request: Message) -> Message:
            if request.op == Op.END_TURN:
                asked.append(trio.current_time())
            return request.answer(0)

        program.obey = at_once
        assert await end_turn(rig.h, program, stays=True) is TurnEnd.LATE
        async with takes(DRAIN_MOST_US / 1e6, DRAIN_MOST_US / 1e6 + 0.1):
            assert await drain(rig.h, program, DRAIN_MOST_US) is TurnEnd.LATE
        assert len(asked) <= DRAIN_MOST_US / WAIT_US + 2
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)

    drive(test)


@pytest.mark.logs("an answer to nothing")
@pytest.mark.parametrize("wrong", ["word", "op", "gpu", "status"])
def test_an_answer_that_makes_no_sense_ends_the_connection(drive: Drive, wrong: str) -> None:
    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)

        async def lie(request: Message) -> Message:
            reply = request.answer(2 if wrong == "word" else 1)
            changes: dict[str, dict[str, Any]] = {
                "word": {},
                "op": {"op": Op.BEGIN_TURN},
                "gpu": {"gpu": 1},
                "status": {"status": 5},
            }
            return attrs.evolve(reply, **changes[wrong])

        program.obey = lie
        assert await end_turn(rig.h, program) is TurnEnd.UNGATED
        await until_then(program.ended.is_set)
        assert engines(rig, program) == (True, True)
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (False, False)

    drive(test)


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENODEV, errno.ENOSYS, 4095])
def test_a_refusal_is_that_of_an_open_gate(drive: Drive, code: int) -> None:
    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)

        async def refuse(request: Message) -> Message:
            return request.refuse(code) if request.op == Op.END_TURN else request.answer()

        program.obey = refuse
        assert await end_turn(rig.h, program) is TurnEnd.UNGATED
        assert engines(rig, program) == (True, True)
        assert not program.ended.is_set()
        await begin_turn(rig.h, program)

    drive(test)


@pytest.mark.parametrize("answers_s", [None, GIVEN_UP_S], ids=["mute", "nothing"])
def test_a_program_that_says_that_it_is_drained_and_is_not(drive: Drive, answers_s: float | None) -> None:
    """The lie costs a neighbour one piece of a reclaim, and the program is not believed for some time, whether its
    library waits for its turn, or gives up and answers that nothing has moved.
    """

    async def test(rig: Rig) -> None:
        liar, other = await pair(rig)

        async def lie(request: Message) -> Message | None:
            if request.op == Op.RECLAIM and engines(rig, liar)[0]:
                if answers_s is not None:
                    await trio.sleep(answers_s)
                    return request.answer()
                await until_then(lambda: not engines(rig, liar)[0])
            return await liar.library(request)

        liar.obey = lie
        assert await end_turn(rig.h, liar) is TurnEnd.DRAINED
        least_s = RECLAIM_S if answers_s is None else answers_s
        async with takes(least_s, least_s + 0.5):
            await rig.h.write(SLICE + "gmem.limit.high", "12G")
        assert (liar.resident, other.resident) == (8 * GIB, 4 * GIB)
        assert rig.gpu.footprint(liar.process).movable == 0
        assert said(rig, liar) is TurnEnd.LATE
        await trio.sleep(2 * SHORT_S)
        async with takes(0, 0.2):
            await rig.h.write(SLICE + "gmem.limit.high", "11G")
        assert (liar.resident, other.resident) == (8 * GIB, 3 * GIB)
        assert len(liar.reclaims) == 1
        await begin_turn(rig.h, liar)
        await rig.h.write(SLICE + "gmem.limit.high", "10G")
        await trio.sleep(1)
        assert liar.resident < 8 * GIB, "it gives in its turn"
        assert await end_turn(rig.h, liar) is TurnEnd.LATE
        await begin_turn(rig.h, liar)
        liar.obey = liar.library
        await trio.sleep(DISTRUST_S)
        assert await end_turn(rig.h, liar) is TurnEnd.DRAINED

    drive(test)


def test_one_that_is_slow_to_move_is_believed_again(drive: Drive) -> None:
    """Memory of the host has to be made for what goes, say. It moved that while it waited, so nothing of it ran."""

    async def test(rig: Rig) -> None:
        slow, _ = await pair(rig)

        async def obey(request: Message) -> Message | None:
            if request.op == Op.RECLAIM:
                await trio.sleep(RECLAIM_S + 0.5)
            return await slow.library(request)

        slow.obey = obey
        assert await end_turn(rig.h, slow) is TurnEnd.DRAINED
        async with takes(RECLAIM_S, RECLAIM_S + 0.5):
            await rig.h.write(SLICE + "gmem.limit.high", "12G")
        assert said(rig, slow) is TurnEnd.LATE, "as long as it does not answer"
        await trio.sleep(1)
        assert slow.resident < 8 * GIB
        await begin_turn(rig.h, slow)
        assert await end_turn(rig.h, slow) is TurnEnd.DRAINED

    drive(test)


def test_what_a_program_cannot_give_in_its_turn_says_nothing_of_its_end(drive: Drive) -> None:
    """The request came while it ran, and the answer comes when it is drained."""

    async def test(rig: Rig) -> None:
        program, other = await pair(rig)
        closed = trio.Event()

        async def obey(request: Message) -> Message | None:
            if request.op == Op.RECLAIM and not closed.is_set():
                await closed.wait()
                return request.answer()
            if request.op == Op.END_TURN:
                closed.set()
            return await program.library(request)

        program.obey = obey
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.write, SLICE + "gmem.limit.high", "12G")
            await until_then(lambda: bool(program.reclaims))
            assert await end_turn(rig.h, program) is TurnEnd.DRAINED
        assert (program.resident, other.resident) == (8 * GIB, 4 * GIB)
        await trio.sleep(2 * SHORT_S)
        assert said(rig, program) is TurnEnd.DRAINED
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident == 6 * GIB

    drive(test)


# Memory that moves as a turn ends: the library does one thing at a time


async def changing_places(program: Gated) -> None:
    """Exchange cold memory for hot."""
    async with program.listens:
        (await program.ask(Op.REPORT, 0, 0, GIB)).check()
        await trio.sleep(0.3)
        (await program.ask(Op.REPORT, 0, GIB, 0)).check()


@pytest.mark.parametrize("begun", ["end", "begin"])
@pytest.mark.parametrize("why", ["limit", "back", "exchange"])
def test_a_turn_that_ends_while_memory_moves(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, why: str, begun: str
) -> None:
    """The program drains until the library has finished the move and closed the gate. The move continues, no write is
    refused, and the next turn ends as usual; also if the last turn had begun meanwhile.
    """
    monkeypatch.setattr(backend.cuda.managed, "PIECE", 4 * GIB)

    async def test(rig: Rig) -> None:
        program = await gated(rig, 16 * GIB, "/", 0)
        await rig.h.write(program.file + "gmem.limit.high", "12G")
        await rig.h.write(program.file + "gmem.limit.high", "max")
        codes: list[int] = []

        async def move() -> None:
            if why == "limit":
                codes.append(await answers(rig.h.write(program.file + "gmem.limit.high", "4G")))
            else:
                await (coming_back if why == "back" else changing_places)(program)

        async with trio.open_nursery() as nursery:
            if begun == "begin":
                assert await end_turn(rig.h, program) is TurnEnd.DRAINED
            nursery.start_soon(move)
            await trio.sleep(0.02)
            assert program.listens.locked()
            if begun == "begin":
                follower(rig.h).schedule(Member(program.process, 0), Place())
                await follower(rig.h).apply(Member(program.process, 0))
            assert await end_turn(rig.h, program, DRAIN_US, stays=True) is TurnEnd.LATE
            assert engines(rig, program) == (False, False)
            assert rig.gpu.footprint(program.process).movable > 0
            assert await drain(rig.h, program, DRAIN_MOST_US) is TurnEnd.DRAINED
            assert engines(rig, program) == (True, False)
            assert program.is_closed
        assert codes == ([0] if why == "limit" else [])
        assert why != "limit" or program.resident == 4 * GIB
        await begin_turn(rig.h, program)
        assert not program.is_closed
        assert await end_turn(rig.h, program, DRAIN_US) is TurnEnd.DRAINED
        await begin_turn(rig.h, program)

    drive(test)


@pytest.mark.parametrize("turns", [2, 6])
def test_turns_that_are_shorter_than_a_move(drive: Drive, turns: int) -> None:
    """Each turn ends late, with the engines on, and the program drains: the move continues, and no write is refused.
    After the move, the library's answers about earlier turns have no effect on the last one.
    """

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB, "/", 0)

        async def long(request: Message) -> Message | None:
            if request.op == Op.RECLAIM:
                async with program.listens:
                    await trio.sleep(0.6)
            return await program.library(request)

        program.obey = long
        codes: list[int] = []

        async def move() -> None:
            codes.append(await answers(rig.h.write(program.file + "gmem.limit.high", "6G")))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(move)
            await trio.sleep(0.02)
            for turn in range(turns):
                assert await end_turn(rig.h, program, DRAIN_US, stays=True) is TurnEnd.LATE
                assert engines(rig, program) == (False, False)
                if turn < turns - 1:
                    await trio.sleep(0.4 / turns)
                    follower(rig.h).schedule(Member(program.process, 0), Place())
                    await follower(rig.h).apply(Member(program.process, 0))
                    await trio.sleep(0.01)
            assert not codes, "the move is under way"
            assert await drain(rig.h, program, DRAIN_MOST_US) is TurnEnd.DRAINED
            assert program.is_closed
        assert engines(rig, program) == (True, False)
        assert (codes, program.resident) == ([0], 6 * GIB)
        await begin_turn(rig.h, program)
        assert not program.is_closed
        program.obey = program.library
        assert await end_turn(rig.h, program, DRAIN_US) is TurnEnd.DRAINED

    drive(test)


def test_a_program_that_is_busy_with_memory_and_never_answers(drive: Drive) -> None:
    """It goes off with all engines once the wait is over, and is asked no more."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB, "/", 0)
        told: list[Op] = []

        async def hang(request: Message) -> None:
            told.append(Op(request.op))

        program.obey = hang
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.refused, program.file + "gmem.limit.high", "6G")
            await trio.sleep(0.1)
            assert await end_turn(rig.h, program, DRAIN_US, stays=True) is TurnEnd.LATE
            async with takes(DRAIN_MOST_US / 1e6, DRAIN_MOST_US / 1e6 + 0.1):
                assert await drain(rig.h, program, DRAIN_MOST_US) is TurnEnd.UNGATED
        assert engines(rig, program) == (True, True)
        for _ in range(3):
            await begin_turn(rig.h, program)
            async with takes(0, 0.01):
                assert await end_turn(rig.h, program, DRAIN_US, stays=True) is TurnEnd.UNGATED
        assert told == [Op.RECLAIM, Op.END_TURN, Op.BEGIN_TURN]

    drive(test)


@pytest.mark.parametrize("seed", range(2))
def test_limits_that_are_written_every_200_ms_hold_in_all_turns(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The limits change at each moment of a turn; no write is refused, and no turn ends with the gate open."""
    monkeypatch.setattr(backend.cuda.managed, "PIECE", 4 * GIB)

    async def test(rig: Rig) -> None:
        both, rng, ends = [await gated(rig, 8 * GIB, "/job", 0) for _ in range(2)], random.Random(seed), Counter[str]()

        async def write() -> None:
            while True:
                program, limit = rng.choice(both), rng.randrange(1, 9)
                await rig.h.write(program.file + "gmem.limit.high", limit * GIB)
                assert program.resident <= limit * GIB
                await rig.h.write(program.file + "gmem.limit.high", "max")
                back = min(program.swapped, 4 * GIB)
                if back:
                    async with program.listens:  # the program fetches it, as there is room
                        (await program.ask(Op.MOVE_IN, back, 0)).check()
                        program.swapped, program.resident = program.swapped - back, program.resident + back
                        await trio.sleep(back / (32 * GIB))
                        program.show()
                await trio.sleep(0.2 * rng.random())

        async def off(program: Gated) -> None:
            end: TurnEnd | None = await end_turn(rig.h, program, DRAIN_US, stays=True)
            ends[f"first {end}"] += 1
            if end is TurnEnd.LATE:
                end = await drain(rig.h, program, DRAIN_MOST_US)
            assert end in (TurnEnd.DRAINED, None), end
            ends[f"{end}"] += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for turn in range(40):
                waits = both[turn % 2]
                waits.drain_s = 0.02 * rng.random()
                nursery.start_soon(off, waits)
                await trio.sleep(0.5)
                await begin_turn(rig.h, waits)
            nursery.cancel_scope.cancel()
        assert ends["first TurnEnd.LATE"] >= 5, "some were in the middle of a move"
        assert ends["TurnEnd.DRAINED"] >= 35

    drive(test)


# With all other requests


def test_a_freeze_of_a_program_that_waits_takes_all_and_a_thaw_leaves_gr_off(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        await end_turn(rig.h, program)
        await rig.h.write(program.file + "compute.freeze", 1)
        assert engines(rig, program) == (True, True)
        assert await rig.h.refused(program.file + "gmem.limit.high", "6G") == errno.EBUSY
        await rig.h.write(program.file + "compute.freeze", 0)
        assert engines(rig, program) == (True, False)
        assert program.is_closed
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident == 6 * GIB
        await rig.h.write(program.file + "compute.freeze", 1)
        await begin_turn(rig.h, program)
        assert engines(rig, program) == (True, True)
        assert not program.is_closed, "what holds it is the freeze alone"
        await rig.h.write(program.file + "compute.freeze", 0)
        assert engines(rig, program) == (False, False)

    drive(test)


def test_a_program_that_is_moved_leaves_its_turn(drive: Drive) -> None:
    """Its gate is open and all of its engines are on before it is asked to prepare; if that fails, they stay so."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        await end_turn(rig.h, program)
        seen: list[tuple[bool, tuple[bool, bool]]] = []

        async def move(*words: Any) -> None:
            standby = words[-1]
            assert isinstance(standby, Standby)
            seen.append((program.is_closed, engines(rig, program)))
            await standby.begin()
            standby.over.set()
            raise OSError(errno.EBUSY, "it does not come to a rest")

        rig.gpu.mover.move = move  # type: ignore[method-assign]
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY
        assert [one[1] for one in seen] == [(False, False)]
        await until_then(program.ended.is_set)
        assert not program.is_closed
        assert await rig.stat(program.file + "gcgroup.stat") | {"off_turn": 0, "off_gr": 0} == await rig.stat(
            program.file + "gcgroup.stat"
        )
        assert rig.h.controller.population.record(Member(program.process, 0)).compute.turn_end is None

    drive(test, 2)


@pytest.mark.parametrize("how", ["late", "cancelled"])
def test_a_departure_that_is_not_sent_loses_no_beginning_of_a_turn(drive: Drive, how: str) -> None:
    """The program is slow to read its messages, and its turn has begun meanwhile."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        assert await end_turn(rig.h, program) is TurnEnd.DRAINED
        session = rig.gpu.managed._programs[program.process].mover
        assert isinstance(session, Session)
        send, has_room = session._line.send, trio.Event()

        async def send_slowly(*words: Any) -> bool:
            await has_room.wait()
            return await send(*words)

        session._line.send = send_slowly  # type: ignore[method-assign]
        session.room(0, MIB)
        await settle()
        session.begin_turn(0, AHEAD_US)
        if how == "late":
            with pytest.raises(OSError, match="does not come to a rest"):
                await session.depart(0, near=True, seconds=1)
        else:
            with trio.move_on_after(1) as scope:
                await session.depart(0, near=True, seconds=5)
            assert scope.cancelled_caught
        has_room.set()
        with trio.fail_after(1):
            await until_then(lambda: not program.is_closed)
        assert program.told[-1] == (Op.BEGIN_TURN, AHEAD_US)
        assert not program.departs

    drive(test)


def test_the_end_of_the_connection_opens_the_gate_and_nothing_moves_until_the_turn(drive: Drive) -> None:
    """Its launches wait for the GR engine instead. A program that connects again is not known to be drained."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        await end_turn(rig.h, program)
        program.socket.close()
        await until_then(lambda: program.process not in rig.gpu.managed)
        again = rig.connect(program.process, Gated)
        await again.manage(8 * GIB)
        assert engines(rig, program) == (True, False)
        assert rig.gpu.footprint(program.process).movable == 0
        await begin_turn(rig.h, again)
        assert engines(rig, program) == (False, False)
        assert isinstance(again, Gated)
        assert again.told == []
        await rig.h.write(again.file + "gmem.limit.high", "6G")
        assert again.resident == 6 * GIB

    drive(test)


def test_a_program_that_dies_in_its_wait(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program, other = await pair(rig)
        await end_turn(rig.h, program)
        await rig.die(program)
        await rig.h.write(SLICE + "gmem.limit.high", "6G")
        assert other.resident == 6 * GIB

    drive(test)


def test_a_lever_that_fails_leaves_no_gate_closed(drive: Drive) -> None:
    """The Follower falls back, and the program continues."""

    async def test(rig: Rig) -> None:
        program = await gated(rig, 8 * GIB)
        group, follower = Member(program.process, 0), rig.h.controller._follower
        assert await follower.turning.end(group, Place(off=True), BOUND_US) is TurnEnd.DRAINED
        assert program.is_closed
        follower.fall_back(group)
        await until_then(lambda: not program.is_closed)
        assert engines(rig, program) == (False, False)

    drive(test)


# The scheduler


def scheduler_of(h: Harness, gpu: StubGpu, nursery: trio.Nursery | None = None) -> Scheduler:
    """Return a scheduler that acts only on request of the test; it waits for draining programs in a nursery."""
    controller = h.controller
    scheduler = Scheduler(gpu, h.ledger, controller.population, controller._follower, 1.0)
    scheduler._ends.nursery = nursery
    return scheduler


def places(*off: Process) -> Any:
    """Return a core that decides on these places."""

    def decide(window: int, contenders: Any, samples: Any, waiting: Any) -> Any:
        yield
        return {process: Place(100, off=True) for process in off}

    return decide


@virtual
async def test_a_program_that_does_not_drain_is_waited_for_less_and_less(spawn: Spawn) -> None:
    gpu = StubGpu()
    async with running(gpu) as h, trio.open_nursery() as nursery:
        who = await h.arrive(spawn().pid)
        scheduler, group = scheduler_of(h, gpu, nursery), Member(who, 0)

        async def turn() -> list[int]:
            """Return for how long its end was waited for each time, microseconds."""
            await scheduler._change(who, Place(100, off=True))
            if who not in gpu.without_gr:
                assert gpu.timeslices[who] == DRAIN_SLICE_US
                await trio.sleep(DRAIN_MOST_US / 1e6 + 0.01)
            assert gpu.without_gr == {who}
            assert gpu.timeslices[who] == 100
            await scheduler._change(who, Place(100))
            assert gpu.without_gr == gpu.detached == set()
            assert h.controller._follower.applied(group).off == backend.core.reasons.ON
            (*ends, begin), gpu.turns = gpu.turns, []
            assert begin == ("begin", who.pid, 0)
            assert {end[:2] for end in ends} == {("end", who.pid)}
            return [end[2] for end in ends]

        gpu.works[who] = Activity(tsgs=1, attached=1, managed=True, gpu_usec=0)
        gpu.ends[who] = TurnEnd.LATE, 10.0
        assert [await turn(), await turn()] == [[DRAIN_US, DRAIN_MOST_US], [0]]
        await trio.sleep(UNDRAINED_S)
        assert [await turn(), await turn()] == [[DRAIN_US, DRAIN_MOST_US], [0]]
        await trio.sleep(UNDRAINED_S)
        assert await turn() == [0], "for twice as long"
        await trio.sleep(UNDRAINED_S)
        gpu.ends[who] = TurnEnd.DRAINED, 0.001
        assert [await turn(), await turn()] == [[DRAIN_US], [DRAIN_US]]
        gpu.ends[who] = TurnEnd.LATE, 10.0
        assert [await turn(), await turn()] == [[DRAIN_US, DRAIN_MOST_US], [0]]
        gpu.ends[who] = TurnEnd.DRAINED, 0.0
        assert [await turn(), await turn()] == [[0], [DRAIN_US]], "it was drained at once"
        del gpu.works[who]
        gpu.ends[who] = TurnEnd.LATE, 10.0
        assert [await turn(), await turn()] == [[DRAIN_US, DRAIN_MOST_US, 0], [0]], "less long where no use is told"


@virtual
async def test_no_end_of_a_turn_waits_for_another(spawn: Spawn) -> None:
    """Turns that end in the same look end together, after others have begun."""
    gpu = StubGpu()
    async with running(gpu) as h:
        first, *others = [await h.arrive(spawn().pid) for _ in range(4)]
        scheduler = scheduler_of(h, gpu)
        await scheduler._change(first, Place(100, off=True))
        gpu.ends.update((one, (TurnEnd.DRAINED, 1.0)) for one in others)
        gpu.calls.clear()
        scheduler._core.decide = places(*others)  # type: ignore[method-assign]
        async with takes(DRAIN_US / 1e6, DRAIN_US / 1e6 + 0.01):
            await scheduler._step(backend.scheduler.parts.Pace())
        assert gpu.without_gr == set(others)
        levers = [(lever, pid) for lever, pid, _ in gpu.calls if lever in ("attach", "detach")]
        assert levers[0] == ("attach", first.pid)
        assert sorted(levers[1:]) == sorted(("detach", one.pid) for one in others)


@virtual
@pytest.mark.logs("cannot be scheduled")
async def test_a_turn_that_cannot_end_goes_on(spawn: Spawn) -> None:
    """A lever fails, and the gate opens again."""
    gpu = StubGpu()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid)
        gpu.ends[who] = TurnEnd.DRAINED, 0.0
        gpu.script("detach", refuses(errno.EIO))
        scheduler = scheduler_of(h, gpu)
        await scheduler._change(who, Place(off=True))
        await settle()
        assert [what for what, _, _ in gpu.turns] == ["end", "begin"]
        assert gpu.without_gr == gpu.detached == set()
        assert h.controller.population.record(Member(who, 0)).compute.turn_end is None
