"""Level 3: CUDA programs with the library move between GPUs: the messages that they get, and the books."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import pytest
import trio

from backend.cuda.migrations import DEPART_S, HOME_S, RETURN_S, RETURN_WAIT_S, Standby
from backend.door.wire import Message, Op
from backend.process.running import is_stopped
from tests.support.cuda_session import CONTEXT, GIB, LOOKS, MIB, Drive, Program, Rig, drive, pieces, takes, until_then
from tests.support.fake_nvidia import FakeNvml
from tests.support.harness import but_time, until

__all__ = ("drive", "pieces")

HIGH = 3 * GIB


async def begin(rig: Rig) -> Program:
    """Start a program of 4 GiB, of which 1 GiB plus the size of its context is in the host."""
    program = await rig.program(4 * GIB)
    await trio.sleep(1)  # until the driver's figure is in the books
    await rig.h.write(program.file + "gmem.limit.high", HIGH)
    assert program.swapped >= GIB
    program.obey = stands_by
    return program


async def stands_by(request: Message) -> Message:
    """Answer as the library does when it is asked to stand by."""
    return request.answer()


def moved_by(
    rig: Rig, act: Callable[[Program, Standby], Awaitable[None]], program: Program, near: bool = True, intact: int = 0
) -> None:
    """Have `act` be the agent, as the daemon sees it. `intact` bytes that the library could move go through the
    host."""

    async def move(*words: object) -> None:
        held, standby = program.resident + CONTEXT, words[-1]
        places = program.process, rig.gpu.info, rig.others[0].info
        assert words[:-1] == (*places, held, CONTEXT + intact if near else held)
        assert isinstance(standby, Standby)
        try:
            await act(program, standby)
        finally:
            standby.over.set()

    rig.gpu.mover.move = move  # type: ignore[method-assign]


async def again(rig: Rig, program: Program, gpu: int) -> Program:
    """Connect a program once more, and report what it has."""
    found = rig.connect(program.process)
    found.gpu, found.context = gpu, program.context
    return await found.manage(program.resident, program.swapped)


@pytest.mark.parametrize("early", [False, True])
def test_what_the_library_has_placed_goes_along(drive: Drive, early: bool) -> None:
    """While the program stands by, nothing is asked of it and nothing granted; its books arrive before it does. It may
    connect on the other GPU before the agent has ended, and is then answered after the agent's end."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)
        before = {name: await rig.h.read(program.file + name) for name in ("gmem.current", "gmem.swap.current")}
        asked = len(program.reclaims)

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            with trio.move_on_after(1) as waits:
                await program.alloc(2 * MIB)
            assert waits.cancelled_caught, "it is granted by the end of the connection"
            assert await rig.h.refused(program.file + "gmem.reclaim", GIB) == errno.EAGAIN
            assert len(program.reclaims) == asked
            program.gpu = 1
            program.show()
            if early:
                standby.end()
                await until_then(program.ended.is_set)
                rig.nursery.start_soon(again, rig, program, 1)
                await trio.sleep(1)
                assert program.process not in rig.gpu.managed
                assert program.process not in rig.others[0].managed

        moved_by(rig, act, program)
        await rig.h.write(f"{program.process.pid}/0/compute.migrate", 1)
        await until_then(program.ended.is_set)
        assert {name: await rig.h.read(program.file + name) for name in before} == before
        assert await rig.h.read(program.file + "gmem.limit.high") == f"{HIGH}\n"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.write, program.file + "gmem.limit.high", 2 * GIB)
            await trio.sleep(0.5)
            program = rig.programs[-1] if early else await again(rig, program, 1)
        assert program.resident <= 2 * GIB, "who wrote waited for it"
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["resident"], stat["swapped"]) == (program.resident + CONTEXT, program.swapped)

    drive(test, count=2)


@pytest.mark.parametrize("early", [False, True])
def test_what_follows_is_not_counted_twice(drive: Drive, early: bool) -> None:
    """The driver counts the program's memory on the new GPU from the first moment on, and twice while it is copied
    there. That is no additional memory, unless the count stays; and a stopped program copies nothing."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            program.gpu = 1
            program.show()
            if early:
                standby.end()
                await until_then(program.ended.is_set)
                rig.nursery.start_soon(again, rig, program, 1)
                await trio.sleep(1)

        moved_by(rig, act, program)
        await rig.h.write(f"{program.process.pid}/0/compute.migrate", 1)
        await until_then(program.ended.is_set)
        program = rig.programs[-1] if early else await again(rig, program, 1)
        await trio.sleep(LOOKS)
        current = await rig.number(program.file + "gmem.current")
        assert current == program.resident + CONTEXT
        for _ in range(2):
            program.lag = 2 * program.resident + CONTEXT
            program.show()
            await trio.sleep(LOOKS)
            assert await rig.number(program.file + "gmem.current") == current
            program.lag = None
            program.show()
            await trio.sleep(LOOKS)
            assert await rig.number(program.file + "gmem.current") == current
            os.kill(program.process.pid, signal.SIGSTOP)
            await until(lambda: is_stopped(program.process.pid), "it is stopped")
            await trio.sleep(HOME_S)
            os.kill(program.process.pid, signal.SIGCONT)
        assert not program.reclaims
        program.context += 100 * MIB
        program.show()
        await trio.sleep(HOME_S + LOOKS)
        assert (await rig.stat(program.file + "gmem.stat"))["implicit"] == CONTEXT + 100 * MIB

    drive(test, count=2)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EBUSY, errno.EIO])
def test_one_that_is_not_moved_goes_on(drive: Drive, code: int) -> None:
    """A program that stood by connects again, and its books are unchanged; nothing was moved to the host."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)
        before = but_time(await rig.h.read(program.file + "gmem.stat"))

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            raise OSError(code, "it failed")

        moved_by(rig, act, program)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == code
        await until_then(program.ended.is_set)
        program = await again(rig, program, 0)
        await trio.sleep(1)
        assert but_time(await rig.h.read(program.file + "gmem.stat")) == before
        await rig.h.write(program.file + "gmem.limit.high", 2 * GIB)
        assert program.resident <= 2 * GIB

    drive(test, count=2)


def test_one_that_refuses_to_stand_by_is_let_be(drive: Drive) -> None:
    """The refusal carries a reason; the connection stays."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def refuses(request: Message) -> Message:
            return request.refuse(errno.EOPNOTSUPP)

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()

        program.obey = refuses
        moved_by(rig, act, program)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EOPNOTSUPP
        program.obey = program.move
        await rig.h.write(program.file + "gmem.limit.high", 2 * GIB)
        assert program.resident <= 2 * GIB

    drive(test, count=2)


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ESRCH, errno.ENOSYS, errno.ETIMEDOUT, 512, 600, 4095])
def test_no_number_of_a_programs_choice_reaches_who_writes(drive: Drive, code: int) -> None:
    """The kernel rejects some numbers as an answer, and others have a meaning of our own: the writer gets EIO."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def says(request: Message) -> Message:
            return request.refuse(code)

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()

        program.obey = says
        moved_by(rig, act, program)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EIO
        program.obey = program.move
        await rig.h.write(program.file + "gmem.limit.high", 2 * GIB)
        assert program.resident <= 2 * GIB, "its connection stays"

    drive(test, count=2)


@pytest.mark.logs("an answer to nothing")
@pytest.mark.parametrize("op", [Op.DEPART, Op.RECLAIM])
@pytest.mark.parametrize("status", [1, 5, 2**31 - 1, -4096, -200_000, -(2**31)])
def test_a_status_that_is_no_errno_ends_the_connection(drive: Drive, op: Op, status: int) -> None:
    """A caller that waits for the answer gets an error at once."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def says(request: Message) -> Message:
            return attrs.evolve(request.answer(), status=status)

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()

        program.obey = says
        moved_by(rig, act, program)
        async with takes(0, 0.1):
            if op == Op.DEPART:
                assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY
            else:
                assert await rig.h.refused(program.file + "gmem.limit.high", GIB) == errno.EAGAIN
        await until_then(program.ended.is_set)

    drive(test, count=2)


def test_one_that_hangs_up_instead_of_standing_by_is_not_waited_for(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def hangs_up(request: Message) -> None:
            program.socket.close()

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()

        program.obey = hangs_up
        moved_by(rig, act, program)
        async with takes(0, 0.1):
            assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY

    drive(test, count=2)


def test_one_that_hangs_up_before_it_is_asked_is_not_moved(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller that asked for the move gets EBUSY."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def hangs_up(*_: object) -> bool:
            program.socket.close()
            await until_then(lambda: program.process not in rig.gpu.managed)
            return True

        monkeypatch.setattr(rig.gpu._nvml, "are_near", hangs_up)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY

    drive(test, count=2)


@pytest.mark.parametrize("late", [False, True])
def test_one_that_does_not_come_to_a_rest_is_let_go(drive: Drive, late: bool) -> None:
    """The program may still stand by later; the end of its connection makes it go on."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def never(request: Message) -> Message | None:
            if late:
                await trio.sleep(DEPART_S + 0.01)
            return request.answer() if late else None

        async def act(program: Program, standby: Standby) -> None:
            async with takes(DEPART_S, DEPART_S + 0.1):
                await standby.begin()

        program.obey = never
        moved_by(rig, act, program)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.ETIMEDOUT
        await until_then(program.ended.is_set)

    drive(test, count=2)


def test_one_that_does_not_come_back_is_one_without_the_library(drive: Drive) -> None:
    """It is waited for only for some seconds."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            program.gpu = 1
            program.show()

        moved_by(rig, act, program)
        await rig.h.write(f"{program.process.pid}/0/compute.migrate", 1)
        async with takes(RETURN_WAIT_S - 0.1, RETURN_WAIT_S + 0.1):
            assert await rig.h.refused(program.file + "gmem.limit.high", GIB) == errno.EAGAIN
        async with takes(0, 0.1):
            assert await rig.h.refused(program.file + "gmem.limit.high", GIB) == errno.EBUSY
            assert await rig.h.refused(program.file + "gmem.reclaim", GIB) == errno.EAGAIN
        await trio.sleep(RETURN_S - RETURN_WAIT_S)
        assert await rig.h.refused(program.file + "gmem.limit.high", GIB) == errno.EOPNOTSUPP

    drive(test, count=2)


@pytest.mark.parametrize("stopped", [False, True])
def test_one_that_does_not_come_back_does_not_keep_its_slice_from_a_limit(drive: Drive, stopped: bool) -> None:
    """Other members give memory in its place: at once if it is stopped, else after it was waited for."""

    async def test(rig: Rig) -> None:
        program, other = await rig.program(8 * GIB, "/job"), await rig.program(4 * GIB, "/job", 0)
        program.obey = stands_by

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            raise OSError(errno.EBUSY, "it does not come to a rest")

        moved_by(rig, act, program)
        await trio.sleep(1)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EBUSY
        await until_then(program.ended.is_set)
        if stopped:
            os.kill(program.process.pid, signal.SIGSTOP)
            await until(lambda: is_stopped(program.process.pid), "it is stopped")
        limit = await rig.number("slice/job/0/gmem.current") - 2 * GIB
        least = 0.0 if stopped else RETURN_WAIT_S - 0.5
        async with takes(least, least + 0.8):
            await rig.h.write("slice/job/0/gmem.limit.high", limit)
        assert other.resident <= 2 * GIB
        os.kill(program.process.pid, signal.SIGCONT)
        await again(rig, program, 0)
        await trio.sleep(RETURN_S)
        assert await rig.number("slice/job/0/gmem.current") <= limit

    drive(test, count=2)


def test_one_that_has_more_in_the_host_than_it_may_is_moved(drive: Drive) -> None:
    """Its swap limit goes along: it may keep what it has in the host, and no more goes there."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)
        await rig.h.write(program.file + "gmem.swap.max", GIB // 2)
        swapped = await rig.number(program.file + "gmem.swap.current")
        assert swapped > GIB // 2

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            program.gpu = 1
            program.show()

        moved_by(rig, act, program)
        await rig.h.write(f"{program.process.pid}/0/compute.migrate", 1)
        await until_then(program.ended.is_set)
        assert await rig.number(program.file + "gmem.swap.current") == swapped
        assert await rig.number(program.file + "gmem.swap.max") == GIB // 2
        program = await again(rig, program, 1)
        assert await rig.h.refused(program.file + "gmem.limit.high", GIB) == errno.EBUSY

    drive(test, count=2)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(("fixed", "said"), [(0, 2 * GIB), (GIB // 2, GIB), (0, 0), (0, 1 << 60)])
def test_what_is_as_the_program_made_it_is_carried(drive: Drive, near: bool, fixed: int, said: int) -> None:
    """Such memory can be moved, and the driver moves it, so the host needs room for it. Memory that cannot be moved
    counts once, and a program that reports too much has all of its memory carried."""

    async def test(rig: Rig) -> None:
        program = await begin(rig)
        rig.nvml.p2p = 0 if near else FakeNvml.NVML_P2P_STATUS_NOT_SUPPORTED

        async def act(program: Program, standby: Standby) -> None:
            raise OSError(errno.EIO, "so far")

        (await program.ask(Op.REPORT, fixed, 0, 0, said)).check()
        moved_by(rig, act, program, near, min(fixed + said, program.resident))
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EIO

    drive(test, count=2)


@pytest.mark.parametrize("near", [False, True])
def test_what_the_other_gpu_could_not_use_is_carried(drive: Drive, near: bool) -> None:
    async def test(rig: Rig) -> None:
        program, asked = await begin(rig), list[Message]()
        rig.nvml.p2p = 0 if near else FakeNvml.NVML_P2P_STATUS_NOT_SUPPORTED

        async def hears(request: Message) -> Message:
            asked.append(request)
            return request.answer()

        async def act(program: Program, standby: Standby) -> None:
            await standby.begin()
            assert [request.args[0] for request in asked] == [near]
            raise OSError(errno.EIO, "so far")

        program.obey = hears
        moved_by(rig, act, program, near)
        assert await rig.h.refused(program.file + "compute.migrate", 1) == errno.EIO

    drive(test, count=2)


def test_one_that_has_just_moved_is_waited_for(drive: Drive) -> None:
    """It is not connected yet when it has to go back."""

    async def test(rig: Rig) -> None:
        program, moves = await begin(rig), list[tuple[int, int]]()

        async def move(*words: Any) -> None:
            _, source, target, *_, standby = words
            await standby.begin()
            moves.append((source.index, target.index))
            rig.programs[-1].gpu = target.index
            rig.programs[-1].show()
            standby.end()
            standby.over.set()

        for gpu in (rig.gpu, *rig.others):
            gpu.mover.move = move  # type: ignore[method-assign]
        await rig.h.write(f"{program.process.pid}/0/compute.migrate", 1)
        await until_then(program.ended.is_set)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rig.h.write, f"{program.process.pid}/1/compute.migrate", 0)
            await trio.sleep(0.5)
            assert moves == [(0, 1)]
            back = rig.connect(program.process)
            back.gpu, back.context, back.obey = 1, program.context, stands_by
            await back.manage(program.resident, program.swapped)
        assert moves == [(0, 1), (1, 0)]

    drive(test, count=2)
