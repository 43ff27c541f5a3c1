"""CUDA programs at the daemon's socket, in virtual time: their messages, the daemon's, and the driver's figures."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import backend.process.identity
import backend.process.running
from backend.core.reclaimer import IGNORED_S, USERMEM_S
from backend.cuda.holding import USEC_MOST
from backend.cuda.managed import RECLAIM_S, SHORT_S
from backend.cuda.server import WAITING_MOST, Session, words
from backend.door import tenants
from backend.door.wire import CUDA, FORMAT, VERSION, Message, Op
from backend.process.identity import Member, Process, Slice
from tests.support.cgroups import cgroup, enter, frozen
from tests.support.cuda_session import (
    CONTEXT,
    GIB,
    LOOKS,
    MIB,
    U64,
    Drive,
    Program,
    Rig,
    drive,
    pieces,
    takes,
    until_then,
)
from tests.support.harness import Spawn, StubGpu, answers, running, settle, until, virtual

__all__ = ["drive", "pieces"]  # fixtures


def test_a_program_is_told_which_gpu_is_which(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = rig.connect(rig.process())
        raw = bytes.fromhex("50f7990000004000800000000000") + bytes(2)
        first, last = struct.unpack("<QQ", raw)
        assert (await program.ask(Op.LOCATE, first, last)).status == -errno.EPROTO, "a greeting comes first"
        assert (await program.ask(Op.HELLO, VERSION + 1)).status == -errno.EPROTO
        assert (await program.ask(Op.HELLO, VERSION, CUDA)).check().args[:3] == (VERSION, 2 * MIB, 2048)
        assert (await program.ask(Op.LOCATE, first, last)).check().args[0] == 0
        assert (await program.ask(Op.LOCATE, first, last + 1)).status == -errno.ENODEV
        assert (await program.ask(Op.CHARGE, 2 * MIB)).status == -errno.ENODEV, "it did not say what it has"
        assert (await program.ask(Op.MANAGE, 0, 0, gpu=1)).status == -errno.ENODEV
        assert (await program.ask(99)).status == -errno.ENOSYS
        assert words("GPU-0") is None

    drive(test)


def test_what_it_charges_is_in_the_books_at_once(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(cgroup="/job")
        assert rig.gpu.manages(program.process)
        assert await program.alloc(6 * GIB) == 0
        assert await rig.number(program.file + "gmem.current") == 6 * GIB
        assert await rig.number("slice/job/0/gmem.current") == 6 * GIB
        assert await program.free(2 * GIB) == 0
        assert await rig.number("slice/job/0/gmem.current") == 4 * GIB
        assert (await rig.stat(program.file + "gcgroup.stat"))["managed"] == 1

    drive(test)


def test_a_first_allocation_is_granted_beside_the_context(drive: Drive) -> None:
    """The driver counts the context before the program allocates: so a limit holds at once, before the next look."""

    async def test(rig: Rig) -> None:
        program = await rig.program(2 * GIB, cgroup="/job")
        await trio.sleep(LOOKS)
        limit = 3 * GIB + 2 * program.context
        await rig.h.write("slice/job/0/gmem.limit.high", str(limit))
        other = rig.connect(rig.process("/job"))
        other.show()
        await other.manage()
        assert await rig.number(other.file + "gmem.current") == other.context
        assert await other.alloc(2 * GIB) == 0
        assert sum(one.resident + one.context for one in rig.programs) <= limit
        current = await rig.number("slice/job/0/gmem.current")
        assert current == sum(one.resident + one.context for one in rig.programs)
        await trio.sleep(LOOKS)
        assert await rig.number("slice/job/0/gmem.current") == current

    drive(test)


def test_counts_come_from_the_page(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program()
        stat = await rig.stat(program.file + "gcgroup.stat")
        assert (stat["submitted"], stat["finished"], stat["pending"]) == (0, 0, 0)
        assert program.page is not None
        struct.pack_into("<QQ", program.page, 0, 70, 63)
        stat = await rig.stat(program.file + "gcgroup.stat")
        assert (stat["submitted"], stat["finished"], stat["pending"]) == (70, 63, 7)
        struct.pack_into("<QQ", program.page, 0, 5, U64)  # a lie: more finished than submitted
        stat = await rig.stat(program.file + "gcgroup.stat")
        assert (stat["submitted"], stat["finished"], stat["pending"]) == (5, 5, 0)
        program.socket.close()
        await until(lambda: not rig.gpu.manages(program.process), "the end of the connection")
        stat = await rig.stat(program.file + "gcgroup.stat")
        assert "submitted" not in stat, "nobody says any more"
        assert stat["managed"] == 0

    drive(test)


# Limits


def test_a_limit_moves_memory_in_pieces_and_holds_when_the_write_returns(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(8 * GIB)
        async with takes(0.12, 0.2):
            await rig.h.write(program.file + "gmem.limit.high", "4G")
        assert program.reclaims == [GIB] * 4
        assert program.resident == program.swapped == 4 * GIB
        stat = await rig.stat(program.file + "gmem.stat")
        assert stat["resident"] == stat["swapped"] == stat["swapout_bytes"] == 4 * GIB
        assert stat["swapout"] == 4
        assert stat["move_usec"] == 125_000

    drive(test)


def test_an_allocation_over_the_limit_makes_room_first(drive: Drive) -> None:
    """The allocation is answered once there is room; messages of other threads are served meanwhile."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await rig.h.write(program.file + "gmem.limit.high", "4G")
        free_while_waiting: list[int] = []

        async def move(request: Message) -> Message:
            free_while_waiting.append(await program.free(2 * MIB))
            return await program.move(request)

        program.obey = move
        assert await program.alloc(2 * GIB) == 0
        assert free_while_waiting == [0]
        assert await rig.number(program.file + "gmem.current") <= 4 * GIB
        assert program.resident <= 4 * GIB

    drive(test)


def test_an_allocation_that_swap_max_leaves_no_room_for_is_refused(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await rig.h.write(program.file + "gmem.swap.max", "0")
        await rig.h.write(program.file + "gmem.limit.high", "4G")
        assert await program.alloc(2 * GIB) == errno.ENOMEM
        assert await program.alloc(1 * GIB) == 0
        assert program.reclaims == []
        assert await rig.number(program.file + "gmem.current") == 4 * GIB
        assert await program.free(4 * GIB) == 0, "what was refused is not there to be freed"
        assert (await rig.stat(program.file + "gmem.events"))["oom"] == 1

    drive(test)


def test_one_allocation_larger_than_the_limit_leaves_again(drive: Drive) -> None:
    """Memory that does not exist yet cannot be moved: it is asked for once it does."""

    async def test(rig: Rig) -> None:
        program = await rig.program()
        await rig.h.write(program.file + "gmem.limit.high", "1G")
        assert await program.alloc(3 * GIB) == 0
        await trio.sleep(0.5)
        assert await rig.number(program.file + "gmem.current") == 1 * GIB
        assert program.resident == 1 * GIB

    drive(test)


def test_limits_are_what_the_program_is_to_see(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        assert (await program.ask(Op.LIMITS)).check().args == (U64, 0, 0, 0, 0)
        await rig.h.write("slice/job/0/gmem.limit.high", "4G")
        await rig.h.write(program.file + "gmem.limit.high", "8G")
        assert (await program.ask(Op.LIMITS)).check().args[:3] == (4 * GIB, 3 * GIB, 0)
        await rig.h.write(program.file + "gmem.reclaim", "512M")
        assert (await program.ask(Op.LIMITS)).check().args[:3] == (4 * GIB, 3 * GIB + 512 * MIB, 512 * MIB)

    drive(test)


def test_memory_comes_back_when_there_is_room(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        await rig.h.write(program.file + "gmem.limit.high", "1G")
        assert (await program.ask(Op.MOVE_IN, 2 * MIB, 0)).status == -errno.EAGAIN
        assert program.rooms == []
        await rig.h.write(program.file + "gmem.limit.high", "2G")
        await trio.sleep(0.05)
        assert program.rooms == [1 * GIB]
        (await program.ask(Op.MOVE_IN, 1 * GIB, 1234)).check()
        program.resident, program.swapped = 2 * GIB, 2 * GIB
        program.show()
        assert (await program.ask(Op.MOVE_IN, 2 * MIB, 0)).status == -errno.EAGAIN
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["swapin_bytes"], stat["swapped"]) == (1 * GIB, 2 * GIB)
        assert await program.free(0, 2 * GIB) == 0
        assert (await rig.stat(program.file + "gmem.stat"))["swapped"] == 0

    drive(test)


@pytest.mark.parametrize("how", ["free", "exit", "leave"])
def test_a_neighbour_that_goes_makes_room(drive: Drive, how: str) -> None:
    async def test(rig: Rig) -> None:
        neighbour = await rig.program(2 * GIB, "/job")
        program = await rig.program(3 * GIB, "/job")
        await rig.h.write("slice/job/0/gmem.limit.high", "4G")
        assert program.swapped + neighbour.swapped == 1 * GIB
        held = neighbour.resident
        await trio.sleep(0.1)
        program.rooms.clear()
        if how == "free":
            assert await neighbour.free(held) == 0
        elif how == "exit":
            await rig.die(neighbour)
        else:
            rig.h.world.cgroups[neighbour.process.pid] = Slice("/other")
            await trio.sleep(1)
        await trio.sleep(0.1)
        assert program.rooms
        assert max(program.rooms) <= program.swapped

    drive(test)


# Other programs


def test_limits_of_a_program_without_the_library_are_refused(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        plain = rig.process()
        rig.driver_says(plain.pid, GIB)
        await trio.sleep(1)
        for name, value in (("gmem.limit.high", "1G"), ("gmem.limit.low", "1G"), ("gmem.swap.max", "0")):
            assert await rig.h.refused(f"{plain.pid}/0/{name}", value) == errno.EOPNOTSUPP
        assert await rig.h.refused(f"{plain.pid}/0/gmem.reclaim", "1M") == errno.EOPNOTSUPP
        assert await answers(rig.h.open(f"{plain.pid}/0/usermemfd")) == errno.EOPNOTSUPP
        stat = await rig.stat(f"{plain.pid}/0/gmem.stat")
        assert (stat["implicit"], stat["unmovable"], stat["disputed"]) == (GIB, GIB, 0)

    drive(test)


def test_a_limit_may_be_set_before_the_program_comes(drive: Drive) -> None:
    """`ggroupfs run` does so; the limit holds from the first allocation on."""

    async def test(rig: Rig) -> None:
        process = rig.process()
        await rig.h.controller.make_process(process.pid)
        await rig.h.write(f"{process.pid}/0/gmem.limit.high", "1G")
        program = await rig.connect(process).manage()
        assert await program.alloc(GIB) == 0
        assert await program.alloc(GIB) == 0
        assert program.reclaims == [GIB]

    drive(test)


def test_a_slice_takes_from_those_that_can_give(drive: Drive) -> None:
    """The largest holder cannot be moved and is not asked; nor are the contexts of those that can be."""

    async def test(rig: Rig) -> None:
        plain = rig.process("/job")
        rig.driver_says(plain.pid, 20 * GIB)
        small = await rig.program(1 * GIB, "/job")
        large = await rig.program(3 * GIB, "/job")
        await trio.sleep(LOOKS)
        held = await rig.number("slice/job/0/gmem.current")
        assert held == 24 * GIB + 2 * CONTEXT
        await rig.h.write("slice/job/0/gmem.limit.high", held - 2 * GIB)
        assert (small.swapped, large.swapped) == (0, 2 * GIB)
        assert await rig.number("slice/job/0/gmem.current") == held - 2 * GIB
        assert await rig.h.refused("slice/job/0/gmem.limit.high", "20G") == errno.EBUSY, "more than they have"
        assert (small.swapped, large.swapped) == (0, 2 * GIB)

    drive(test)


@contextlib.contextmanager
def signalled(pid: int) -> Iterator[None]:
    """Stop a process as Ctrl-Z or a debugger does."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process as ``docker pause`` or ``systemctl freeze`` does."""
    with cgroup() as path:
        enter(pid, path)
        with frozen(path):
            yield


@pytest.mark.parametrize("halted", [signalled, paused])
def test_a_stopped_program_is_not_waited_for(
    drive: Drive, halted: Callable[[int], contextlib.AbstractContextManager[None]]
) -> None:
    async def test(rig: Rig) -> None:
        stopped = await rig.program(4 * GIB, "/job")
        runs = await rig.program(2 * GIB, "/job")

        async def never(request: Message) -> None:
            await trio.sleep_forever()

        stopped.obey = never
        with halted(stopped.process.pid):
            await until(lambda: backend.process.running.is_stopped(stopped.process.pid), "it is stopped")
            async with takes(0, 0.1):
                await rig.h.write("slice/job/0/gmem.limit.high", "5G")
            assert (runs.swapped, stopped.reclaims) == (1 * GIB, [])
            async with takes(0, 0.1):
                assert await runs.alloc(512 * MIB) == 0

    drive(test)


def test_a_program_that_is_stopped_while_it_moves_is_let_go_of(drive: Drive) -> None:
    """Its neighbour does not wait for it; what it moves after it goes on is booked then."""

    async def test(rig: Rig) -> None:
        stopped = await rig.program(4 * GIB, "/job", context=0)
        runs = await rig.program(2 * GIB, "/job", context=0)
        go = trio.Event()

        async def stops(request: Message) -> Message:
            os.kill(stopped.process.pid, signal.SIGSTOP)
            await go.wait()
            return await stopped.move(request)

        stopped.obey = stops
        async with takes(0, 0.2):
            await rig.h.write("slice/job/0/gmem.limit.high", "5G")
        assert (runs.swapped, stopped.reclaims) == (1 * GIB, [GIB])
        async with takes(0, 0.1):
            assert await runs.alloc(512 * MIB) == 0
        assert stopped.reclaims == [GIB], "it is not asked again"
        os.kill(stopped.process.pid, signal.SIGCONT)
        await until(lambda: not backend.process.running.is_stopped(stopped.process.pid), "it goes on")
        go.set()
        await trio.sleep(0.1)
        assert (await rig.stat(stopped.file + "gmem.stat"))["swapped"] == GIB

    drive(test)


def test_a_frozen_program_cannot_move(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        await rig.h.write(program.file + "compute.freeze", "1")
        assert await rig.h.refused(program.file + "gmem.limit.high", "2G") == errno.EBUSY
        assert program.reclaims == []
        await rig.h.write(program.file + "compute.freeze", "0")
        await rig.h.write(program.file + "gmem.limit.high", "2G")
        assert program.resident == 2 * GIB

    drive(test)


def test_a_frozen_program_holds_no_room_for_what_cannot_come(drive: Drive) -> None:
    """Its memory could not come back before the thaw, for which a neighbour need not wait."""

    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        await rig.h.write(program.file + "gmem.limit.high", "2G")
        away = program.swapped
        assert away
        await rig.h.write(program.file + "gmem.limit.high", "max")
        await rig.h.write(program.file + "compute.freeze", "1")
        assert (await program.ask(Op.MOVE_IN, away, 0)).status == -errno.EAGAIN
        assert await rig.number(program.file + "gmem.swap.current") == away
        await rig.h.write(program.file + "compute.freeze", "0")
        (await program.ask(Op.MOVE_IN, away, 0)).check()
        program.resident, program.swapped = program.resident + away, 0
        program.show()
        assert await rig.number(program.file + "gmem.swap.current") == 0

    drive(test)


# Answers that come late, or never


def test_a_late_answer_is_booked_and_nobody_waits_for_it_twice(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        slow = await rig.program(4 * GIB, "/job", context=0)
        other = await rig.program(2 * GIB, "/job", context=0)
        go = trio.Event()

        async def late(request: Message) -> Message:
            await go.wait()
            return await slow.move(request)

        slow.obey = late
        async with takes(RECLAIM_S, RECLAIM_S + 0.3):
            await rig.h.write("slice/job/0/gmem.limit.high", "5G")
        assert slow.reclaims == [GIB], "it has more, so it was asked first"
        assert other.swapped == GIB, "and the other gave, when it did not"
        async with takes(0, 0.1):
            await rig.h.write("slice/job/0/gmem.limit.high", "4608M")
        assert slow.reclaims == [GIB], "it was not asked again"
        before = await rig.stat(slow.file + "gmem.stat")
        assert (before["resident"], before["swapped"]) == (4 * GIB, 0)
        go.set()
        await trio.sleep(0.1)
        stat = await rig.stat(slow.file + "gmem.stat")
        assert (stat["resident"], stat["swapped"]) == (3 * GIB, GIB)
        slow.obey = slow.move
        await rig.h.write("slice/job/0/gmem.limit.high", "2G")
        assert len(slow.reclaims) > 1, "it answers again"

    drive(test)


def test_after_a_late_answer_it_is_asked_for_what_is_still_too_much(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB, context=0)
        await rig.h.write(program.file + "gmem.limit.high", "4G")
        go = trio.Event()

        async def late(request: Message) -> Message:
            await go.wait()
            return await program.move(request)

        program.obey = late
        async with takes(RECLAIM_S, RECLAIM_S + 0.3):
            assert await program.alloc(2 * GIB) == 0, "charged is charged"
        await trio.sleep(1)
        assert program.reclaims == [GIB]
        go.set()
        await trio.sleep(1)
        assert await rig.number(program.file + "gmem.current") == 4 * GIB

    drive(test)


def test_a_program_that_gives_less_is_let_be_and_others_give(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        pinned = await rig.program(4 * GIB, "/job")
        other = await rig.program(2 * GIB, "/job")

        async def little(request: Message) -> Message:
            return request.answer(0, 1)

        pinned.obey = little
        await rig.h.write("slice/job/0/gmem.limit.high", "5G")
        assert other.swapped == GIB
        assert len(pinned.reclaims) == 1

    drive(test)


def test_a_program_that_has_more_to_give_later_is_asked_again(drive: Drive) -> None:
    """Its allocation may not be there yet when it is asked for memory, and it makes no other charge."""

    async def test(rig: Rig) -> None:
        program = await rig.program(context=0)
        await rig.h.write(program.file + "gmem.limit.high", "1G")

        async def nothing(request: Message) -> Message:
            program.obey = program.move
            return request.answer(0, 0)

        program.obey = nothing
        assert await program.alloc(3 * GIB) == 0
        await trio.sleep(LOOKS + SHORT_S)
        assert len(program.reclaims) > 1
        assert await rig.number(program.file + "gmem.current") == 1 * GIB

    drive(test)


def test_what_the_library_frees_instead_counts(drive: Drive) -> None:
    """The library frees memory that it keeps unused, and reports that before it answers that it moved the rest."""

    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)

        async def trim(request: Message) -> Message:
            program.resident -= GIB
            await program.send(Message(Op.UNCHARGE, 0, 0, (GIB, 0)))
            return request.answer(0, 5)

        program.obey = trim
        await rig.h.write(program.file + "gmem.limit.high", "2G")
        assert program.reclaims == [GIB, GIB]
        assert (await rig.stat(program.file + "gmem.stat"))["swapped"] == 0

    drive(test)


def test_swap_max_that_shrinks_meanwhile_does_not_lose_what_moved(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB, "/job")
        await rig.h.write("slice/job/0/gmem.swap.max", "4G")

        async def shrink(request: Message) -> Message:
            await rig.h.write("slice/job/0/gmem.swap.max", "512M")
            return await program.move(request)

        program.obey = shrink
        await rig.h.write(program.file + "gmem.reclaim", "1G")
        stat = await rig.stat("slice/job/0/gmem.stat")
        assert (stat["resident"], stat["swapped"]) == (3 * GIB, GIB)
        assert await rig.number("slice/job/0/gmem.swap.max") == 512 * MIB

    drive(test)


# Figures of the driver


def test_the_context_is_counted_and_figures_do_not_flap(drive: Drive) -> None:
    """The driver counts charged memory later, and stops counting it before it is uncharged; the books show neither."""

    async def test(rig: Rig) -> None:
        program = await rig.program(GIB)
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == GIB + CONTEXT
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["implicit"], stat["unmovable"], stat["disputed"]) == (CONTEXT, 0, 0)
        rng = random.Random(7)
        for _ in range(60):
            nbytes = rng.randrange(1, 200) * 2 * MIB
            if rng.random() < 0.5 and program.resident > nbytes:
                program.resident -= nbytes
                program.show()  # freed at the driver, and not reported yet
                await trio.sleep(rng.random() * 0.1)
                (await program.ask(Op.UNCHARGE, nbytes, 0)).check()
            else:
                (await program.ask(Op.CHARGE, nbytes)).check()
                await trio.sleep(rng.random() * 0.15)  # granted, and not allocated yet
                program.resident += nbytes
                program.show()
            assert await rig.number(program.file + "gmem.current") == program.resident + CONTEXT
        await rig.h.write(program.file + "gmem.limit.high", 2 * GIB)
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == program.resident + CONTEXT
        program.context = 700 * MIB  # as if it had loaded more code
        program.show()
        (await program.ask(Op.REPORT, 200 * MIB, 3 * GIB)).check()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == program.resident + 700 * MIB
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["implicit"], stat["unmovable"], stat["disputed"]) == (700 * MIB, 200 * MIB, 0)
        assert stat["exchanged_bytes"] == 3 * GIB

    drive(test)


def test_what_changes_places_leaves_no_room(drive: Drive) -> None:
    """Cold memory goes out in exchange for hot memory. In between, the driver counts less, which is no free room."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await trio.sleep(LOOKS)
        await rig.h.write(program.file + "gmem.limit.high", 2 * GIB + CONTEXT)
        await trio.sleep(LOOKS)
        current = await rig.number(program.file + "gmem.current")
        program.rooms.clear()
        for done in range(1, 4):
            (await program.ask(Op.REPORT, 0, (done - 1) * 256 * MIB, 256 * MIB)).check()
            program.lag = program.resident + CONTEXT - 256 * MIB
            program.show()
            await trio.sleep(LOOKS)
            assert await rig.number(program.file + "gmem.current") == current
            assert (await program.ask(Op.MOVE_IN, 2 * MIB, 0)).status == -errno.EAGAIN
            program.lag = None
            program.show()
            (await program.ask(Op.REPORT, 0, done * 256 * MIB, 0)).check()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == current
        assert program.rooms == []
        program.context -= 100 * MIB  # but this is free room
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == current - 100 * MIB

    drive(test)


def test_what_lives_by_descriptors_alone_stays_charged(drive: Drive) -> None:
    """The driver counts such memory for no process: until its last descriptor closes it is neither free nor
    disputed."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await trio.sleep(LOOKS)
        current = await rig.number(program.file + "gmem.current")
        (await program.ask(Op.REPORT, GIB, 0, 0, 0, GIB)).check()
        program.lag = program.resident + CONTEXT - GIB
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == current
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["implicit"], stat["unmovable"], stat["disputed"]) == (CONTEXT, GIB, 0)
        program.lag = None
        assert await program.free(GIB) == 0
        (await program.ask(Op.REPORT, 0, 0, 0, 0, 0)).check()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == current - GIB
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["implicit"], stat["unmovable"], stat["disputed"]) == (CONTEXT, 0, 0)

    drive(test)


async def let_back(rig: Rig, *pieces: int) -> Program:
    """Start a program of 4 GiB, of which 2 GiB were moved out and `pieces` (bytes) were let back but have not come."""
    program = await rig.program(4 * GIB)
    await trio.sleep(LOOKS)
    await rig.h.write(program.file + "gmem.limit.high", 2 * GIB + CONTEXT)
    await trio.sleep(LOOKS)
    await rig.h.write(program.file + "gmem.limit.high", "max")
    for nbytes in pieces:
        (await program.ask(Op.MOVE_IN, nbytes, 0)).check()
    return program


def test_what_was_let_back_counts_until_it_comes(drive: Drive) -> None:
    """Work of the program is off the runlist, so a granted batch cannot come in; it comes with a later turn,
    unannounced. A limit that is written at that time is held by the driver's figures."""

    async def test(rig: Rig) -> None:
        program = await let_back(rig, GIB)
        await trio.sleep(3 * LOOKS)
        assert await rig.number(program.file + "gmem.current") == 3 * GIB + CONTEXT
        program.resident, program.swapped = 3 * GIB, GIB
        program.show()
        await rig.h.write(program.file + "gmem.limit.high", GIB + CONTEXT)
        assert program.resident <= GIB
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == GIB + CONTEXT
        program.lag = CONTEXT  # it is there, and this is no part of it any more
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == CONTEXT

    drive(test)


def test_what_was_let_back_and_freed_is_due_no_more(drive: Drive) -> None:
    """It is let back in pieces, and some of it is freed before it comes; then less is outstanding than was granted."""

    async def test(rig: Rig) -> None:
        program = await let_back(rig, GIB, GIB)
        await trio.sleep(LOOKS)
        (await program.ask(Op.UNCHARGE, GIB, 0)).check()  # a part that did not come
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == 3 * GIB + CONTEXT
        program.resident, program.swapped = 3 * GIB, 0
        program.show()
        await trio.sleep(LOOKS)
        stat = await rig.stat(program.file + "gmem.stat")
        assert (stat["implicit"], stat["disputed"]) == (CONTEXT, 0)
        program.context -= 100 * MIB
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == 3 * GIB + CONTEXT - 100 * MIB

    drive(test)


def test_implicit_memory_counts_towards_the_limit(drive: Drive) -> None:
    """Memory that grows past the library pushes out movable memory, without a write or an allocation."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await trio.sleep(LOOKS)
        await rig.h.write(program.file + "gmem.limit.high", 4 * GIB)
        assert program.swapped == 0
        program.context += 2 * GIB
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") <= 4 * GIB
        assert 1.4 * GIB < program.swapped < 1.6 * GIB

    drive(test)


def test_a_charge_that_waits_is_not_taken_for_a_lie(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        await trio.sleep(LOOKS)
        await rig.h.write(program.file + "gmem.limit.high", 4 * GIB + CONTEXT)

        async def slowly(request: Message) -> Message:
            await trio.sleep(2)
            return await program.move(request)

        program.obey = slowly
        async with takes(2, 2.3):
            assert await program.alloc(GIB) == 0
        assert (await rig.stat(program.file + "gmem.stat"))["implicit"] == CONTEXT

    drive(test)


@pytest.mark.logs("past its library")
@pytest.mark.parametrize("busy", [False, True])
def test_a_liar_is_found_out(drive: Drive, busy: bool) -> None:
    """It charges less than it has, or more; the books follow the driver, however busy the program keeps itself."""

    async def test(rig: Rig) -> None:
        program = await rig.program(GIB)
        await trio.sleep(LOOKS)

        async def fuss() -> None:
            while busy:
                (await program.ask(Op.CHARGE, 2 * MIB)).check()
                (await program.ask(Op.UNCHARGE, 2 * MIB, 0)).check()
                await trio.sleep(0.05)

        rig.nursery.start_soon(fuss)
        program.lag = 9 * GIB
        program.show()
        await trio.sleep(3)  # two looks at what is past the library have seen it
        assert abs(await rig.number(program.file + "gmem.current") - 9 * GIB) <= 16 * MIB
        program.lag = CONTEXT
        program.show()
        await trio.sleep(2)
        assert abs(await rig.number(program.file + "gmem.current") - CONTEXT) <= 16 * MIB
        assert abs((await rig.stat(program.file + "gmem.stat"))["disputed"] - (GIB - CONTEXT)) <= 16 * MIB

    drive(test)


def test_what_is_disputed_can_be_freed_and_moved(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(8 * GIB)
        program.lag = 1 * GIB
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == 1 * GIB
        await rig.h.write(program.file + "gmem.limit.high", "512M")
        assert await program.free(program.resident) == 0
        assert await rig.number(program.file + "gmem.current") in range(1 * GIB + 1)
        program.lag = 0
        program.show()
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == 0

    drive(test)


# Liars and floods


def test_nobody_frees_or_takes_back_more_than_he_has(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(GIB)
        assert (await program.ask(Op.UNCHARGE, GIB + 1, 0)).status == -errno.EINVAL
        assert (await program.ask(Op.UNCHARGE, 0, 1)).status == -errno.EINVAL
        assert (await program.ask(Op.UNCHARGE, U64, U64)).status == -errno.EINVAL
        assert (await program.ask(Op.MOVE_IN, 1, 0)).status == -errno.EINVAL
        assert (await program.ask(Op.MOVE_IN, 0, U64)).status == -errno.EINVAL
        assert (await program.ask(Op.CHARGE, 0)).status == -errno.EINVAL
        assert (await program.ask(Op.CHARGE, U64)).status == -errno.ENOMEM
        assert (await program.ask(Op.CHARGE, 81 * GIB)).status == -errno.ENOMEM, "more than the GPU has"
        assert (await program.ask(Op.MANAGE, 0, 0)).status == -errno.EBUSY
        (await program.ask(Op.REPORT, U64)).check()
        assert (await rig.stat(program.file + "gmem.stat"))["unmovable"] == 80 * GIB
        assert await rig.number(program.file + "gmem.current") == GIB
        liar = rig.connect(rig.process())
        (await liar.ask(Op.HELLO, VERSION, CUDA)).check()
        assert (await liar.ask(Op.MANAGE, 81 * GIB, 0)).status == -errno.EINVAL
        assert (await liar.ask(Op.MANAGE, U64, U64)).status == -errno.EINVAL
        assert not rig.gpu.manages(liar.process)
        (await liar.ask(Op.MANAGE, 0, 0)).check()

    drive(test)


def test_a_move_that_is_said_to_take_for_ever_took_a_minute(drive: Drive) -> None:
    """The reported time, in either direction, is added to that of every slice above."""

    async def test(rig: Rig) -> None:
        program = await rig.program(2 * GIB, "/job")

        async def says(request: Message) -> Message:
            return request.answer((await program.move(request)).args[0], U64)

        program.obey = says
        await rig.h.write(program.file + "gmem.limit.high", "1G")
        await rig.h.write(program.file + "gmem.limit.high", "max")
        moves = (await rig.stat(program.file + "gmem.stat"))["swapout"]
        assert moves >= 1
        assert (await rig.stat("slice/job/0/gmem.stat"))["move_usec"] == moves * USEC_MOST
        (await program.ask(Op.MOVE_IN, MIB, U64)).check()
        for file in (program.file, "slice/job/0/"):
            assert (await rig.stat(file + "gmem.stat"))["move_usec"] == (moves + 1) * USEC_MOST

    drive(test)


def test_the_sum_of_what_one_has_is_bounded(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program()
        program.context = total = 0
        while (code := await program.alloc(80 * GIB)) == 0:
            total += 80 * GIB
            await rig.h.write(program.file + "gmem.reclaim", "80G")
            assert total <= 2000 * GIB
        assert code == errno.ENOMEM
        assert total == 16 * 80 * GIB

    drive(test)


@pytest.mark.logs("an answer to nothing")
@pytest.mark.parametrize("how", ["unasked", "too much", "other gpu", "other op"])
def test_an_answer_that_makes_no_sense_ends_the_connection(drive: Drive, how: str) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(2 * GIB)

        async def lie(request: Message) -> Message:
            match how:
                case "too much":
                    return request.answer(3 * GIB, 1)
                case "other gpu":
                    return attrs.evolve(request.answer(GIB, 1), gpu=1)
                case "other op":
                    return attrs.evolve(request.answer(GIB, 1), op=Op.CHARGE)
                case _:
                    return attrs.evolve(request.answer(GIB, 1), seq=77)

        program.obey = lie
        await trio.sleep(LOOKS)
        assert await rig.h.refused(program.file + "gmem.limit.high", "1G") == errno.EAGAIN
        await program.ended.wait()
        assert not rig.gpu.manages(program.process)
        assert await rig.h.read(program.file + "gmem.limit.high") == "max\n"

    drive(test)


def test_a_limit_below_what_cannot_be_moved(drive: Drive) -> None:
    """Exported memory stays on the GPU and is charged as any other: one try is enough."""

    async def test(rig: Rig) -> None:
        program = await rig.program(2 * GIB)
        (await program.ask(Op.REPORT, GIB)).check()

        async def stay(request: Message) -> Message:
            nbytes = min(request.args[3], program.resident - GIB)
            return await program.move(attrs.evolve(request, args=(0, 0, 0, nbytes)))

        program.obey = stay
        await trio.sleep(LOOKS)
        high = program.file + "gmem.limit.high"
        assert await rig.h.refused(high, CONTEXT + GIB // 2) == errno.EBUSY
        assert await rig.h.read(high) == "max\n"
        await rig.h.write(high, CONTEXT + GIB)
        assert program.resident == GIB

    drive(test)


@pytest.mark.parametrize(
    "other", ["exports", pytest.param("without the library", marks=pytest.mark.logs("over its gmem.limit.high"))]
)
def test_a_limit_that_could_hold_and_does_not_yet(drive: Drive, other: str) -> None:
    """A program that moves less than it could may move the rest next time, however much of its group cannot move."""

    async def test(rig: Rig) -> None:
        program = await rig.program(2 * GIB, "/job")
        if other == "exports":
            (await program.ask(Op.REPORT, GIB)).check()
        else:
            rig.driver_says(rig.process("/job").pid, GIB)

        async def stay(request: Message) -> Message:
            return request.answer(0, 1)

        program.obey = stay
        await trio.sleep(LOOKS)
        high, current = "slice/job/0/gmem.limit.high", await rig.number("slice/job/0/gmem.current")
        assert await rig.h.refused(high, current - GIB // 2) == errno.EAGAIN
        program.obey = program.move
        await trio.sleep(LOOKS)
        await rig.h.write(high, current - GIB // 2)
        assert program.resident == 3 * GIB // 2

    drive(test)


@pytest.mark.logs("not a message")
def test_what_is_no_message_ends_the_connection(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(2 * GIB)
        await program.socket.send(b"x" * 63)
        await program.ended.wait()

    drive(test)


def test_a_flood_is_bounded_and_keeps_nobody_else_waiting(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        flood, victim = await rig.program(4 * GIB), await rig.program(GIB)
        await rig.h.write(flood.file + "gmem.limit.high", "4G")
        go = trio.Event()

        async def wait(request: Message) -> Message:
            await go.wait()
            return await flood.move(request)

        flood.obey = wait
        codes: list[int] = []

        async def charge() -> None:
            codes.append(-(await flood.ask(Op.CHARGE, 2 * MIB)).status)

        for _ in range(WAITING_MOST + 10):
            rig.nursery.start_soon(charge)
        await until(lambda: len(codes) == 10, "the bound")
        assert codes == [errno.EBUSY] * 10
        assert await victim.alloc(2 * MIB) == 0
        go.set()
        await trio.sleep(RECLAIM_S + 1)
        assert len(codes) == WAITING_MOST + 10
        assert codes.count(0) == WAITING_MOST

    drive(test)


def test_random_requests(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        rng = random.Random(4243)
        program = await rig.program(4 * GIB)
        interesting = (0, 1, 2 * MIB, GIB, 1 << 31, 1 << 32, 1 << 40, 1 << 63, U64)
        for seq in range(3000):
            op = rng.choice([*range(0, 12), 20, 64, 66, 99])
            gpu = rng.choice([0] * 9 + [1])
            raw = FORMAT.pack(op, rng.choice([0] * 9 + [5]), 10_000 + seq, gpu, 0, *rng.choices(interesting, k=5))
            await program.socket.send(raw)
        await trio.sleep(1)
        assert not program.ended.is_set()
        assert len(program._answers) == 3000
        assert await rig.number(program.file + "gmem.current") >= 0

    drive(test)


# Death, and other ends


@pytest.mark.parametrize("when", ["charge", "reclaim", "manage", "idle"])
def test_death_in_the_middle(drive: Drive, when: str) -> None:
    async def test(rig: Rig) -> None:
        keeper = await rig.program(GIB, "/job")
        await rig.h.write("slice/job/0/gmem.limit.low", 0)
        await trio.sleep(LOOKS)
        await settle()
        start = rig.h.leftovers()
        current = await rig.number("slice/job/0/gmem.current")
        victim = await rig.program(4 * GIB, "/job")

        async def die(request: Message) -> None:
            await rig.die(victim)

        victim.obey = die
        match when:
            case "charge":
                await rig.h.write("slice/job/0/gmem.limit.high", "6G")
                with pytest.raises((ConnectionResetError, OSError)):
                    (await victim.ask(Op.CHARGE, 4 * GIB)).check()
            case "reclaim":
                await rig.h.write("slice/job/0/gmem.limit.high", "3G")
            case "manage":
                again = rig.connect(victim.process)
                (await again.ask(Op.HELLO, VERSION, CUDA)).check()
                await rig.die(victim)
                assert (await again.ask(Op.MANAGE, GIB, 0)).status in (-errno.ESRCH, -errno.ENODEV)
                again.socket.close()
            case _:
                await rig.die(victim)
        with trio.fail_after(10):
            await victim.ended.wait()
        await trio.sleep(LOOKS)
        assert not rig.gpu.manages(victim.process)
        assert rig.gpu.manages(keeper.process)
        assert await rig.number("slice/job/0/gmem.current") in (current, current - keeper.swapped)
        rig.h.world.cgroups.pop(victim.process.pid, None)
        after = rig.h.leftovers()
        after["directories"] = start["directories"]
        assert after == start

    drive(test)


def test_who_hangs_up_but_lives_is_as_the_driver_says(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        await rig.h.write(program.file + "gmem.limit.high", "3G")
        await trio.sleep(LOOKS)
        program.socket.close()
        await until(lambda: not rig.gpu.manages(program.process), "the end of the connection")
        assert await rig.number(program.file + "gmem.current") == program.resident + CONTEXT
        assert await rig.number(program.file + "gmem.swap.current") == 0
        await trio.sleep(LOOKS)
        assert await rig.number(program.file + "gmem.current") == program.resident + CONTEXT
        assert await rig.h.refused(program.file + "gmem.limit.high", "1G") == errno.EOPNOTSUPP

    drive(test)


@pytest.mark.parametrize("noticed", [False, True])
def test_who_connects_anew_says_what_he_has(drive: Drive, noticed: bool) -> None:
    async def test(rig: Rig) -> None:
        first = await rig.program(4 * GIB)
        await rig.h.write(first.file + "gmem.limit.high", "3G")
        await trio.sleep(LOOKS)
        if noticed:
            first.socket.close()
            await until(lambda: not rig.gpu.manages(first.process), "the end of the connection")
        second = rig.connect(first.process)
        await second.manage(first.resident, first.swapped)
        assert rig.gpu.manages(first.process)
        stat = await rig.stat(first.file + "gmem.stat")
        assert (stat["resident"], stat["swapped"]) == (first.resident + CONTEXT, first.swapped)
        if not noticed:
            await first.ended.wait()
        await trio.sleep(LOOKS)
        stat = await rig.stat(first.file + "gmem.stat")
        assert (stat["resident"], stat["swapped"]) == (first.resident + CONTEXT, first.swapped)
        assert (await second.ask(Op.MOVE_IN, 2 * MIB, 0)).status == -errno.EAGAIN
        assert await second.free(0, second.swapped) == 0

    drive(test)


# usermemfd


@pytest.mark.parametrize("ledger", ["soft"])
def test_a_program_that_listens_may_give_back_by_itself(drive: Drive, ledger: str) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        fh = await rig.h.open(program.file + "usermemfd")

        async def drop_a_cache() -> None:
            await trio.sleep(0.03)
            assert await rig.h.operations.read(fh, 0, 16) == struct.pack("<QQ", GIB, 1)
            assert await program.free(GIB // 2) == 0
            assert await program.free(GIB // 2) == 0

        rig.nursery.start_soon(drop_a_cache)
        async with takes(0.03, 0.04):
            await rig.h.write(program.file + "gmem.limit.high", "3G")
        assert program.reclaims == [], "all the rest stays where it is"
        assert (await rig.stat(program.file + "gmem.stat"))["swapped"] == 0
        await rig.h.operations.release(fh)

    drive(test)


def test_a_program_that_ignores_it_is_waited_for_once(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        ignores, neighbour = await rig.program(9 * GIB, "/job"), await rig.program(3 * GIB, "/job")
        fh = await rig.h.open(ignores.file + "usermemfd")
        async with takes(USERMEM_S, USERMEM_S + 0.05):
            await rig.h.write("slice/job/0/gmem.limit.high", "11G")
        assert ignores.swapped == GIB
        async with takes(0, 0.04):
            assert await neighbour.alloc(GIB) == 0
        assert ignores.swapped == 2 * GIB, "it is the one that gives"
        await trio.sleep(IGNORED_S)
        async with takes(USERMEM_S, USERMEM_S + 0.1):
            await rig.h.write("slice/job/0/gmem.limit.high", "10G")
        await rig.h.operations.release(fh)

    drive(test)


def test_nobody_is_waited_for_whose_file_is_closed_or_a_strangers(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        fh = await rig.h.open(program.file + "usermemfd")
        await rig.h.operations.release(fh)
        rig.h.ctx.uid = 65534
        stranger = await rig.h.open(program.file + "usermemfd")
        rig.h.ctx.uid = 0
        async with takes(0, 0.04):
            await rig.h.write(program.file + "gmem.limit.high", "3G")
        await rig.h.operations.release(stranger)
        assert rig.h.controller._reclaimer._listeners == {}
        assert rig.h.ledger.books(Member(program.process, 0)).swap == GIB

    drive(test)


@virtual
async def test_a_gpu_that_moves_nothing_is_asked_once(spawn: Spawn) -> None:
    """It claims to have movable memory: the write fails soon, and the limit is as before."""

    class Stubborn(StubGpu):
        async def reclaim(self, process: Process, nbytes: int) -> int:
            await self._act("reclaim", process, nbytes)
            return 0

    gpu = Stubborn()
    async with running(gpu) as h:
        who = await h.arrive(spawn().pid, gmem=8 * MIB)
        async with takes(0, 0.1):
            assert await h.refused(f"{who.pid}/0/gmem.limit.high", "4M") == errno.EAGAIN
        assert gpu.calls == [("reclaim", who.pid, 4 * MIB)]
        assert await h.read(f"{who.pid}/0/gmem.limit.high") == "max\n"


# A GPU that is lost


@pytest.mark.logs("GPU 0 is lost", "GPU 0 is back")
def test_on_a_gpu_that_is_lost_all_is_granted_and_nothing_asked(drive: Drive) -> None:
    """As without a daemon, the program hears of the loss from its driver, and never that memory is short. Its messages
    are booked, so that its books and the daemon's agree afterwards; over a limit, no other program is waited for.
    Memory in the host stays there. A program that connects meanwhile is accepted."""

    async def test(rig: Rig) -> None:
        program, other = await rig.program(4 * GIB, "/job"), await rig.program(8 * GIB, "/job")
        await rig.h.write("slice/job/0/gmem.limit.high", "8G")
        await trio.sleep(1)
        assert program.swapped + other.swapped
        await rig.h.write("slice/job/0/gmem.limit.high", "max")
        await rig.h.operations.mkdir(await rig.h.inode("slice"), b"tight", 0o755, rig.h.ctx)
        await rig.h.write("slice/tight/0/gmem.limit.high", "1G")
        reclaims = [len(one.reclaims) for one in (program, other)]
        await rig.lose()
        before = await rig.number(program.file + "gmem.current")
        async with takes(0, 0.01):
            assert await program.alloc(20 * GIB) == 0
        assert await rig.number(program.file + "gmem.current") == before + 20 * GIB
        assert await program.free(2 * GIB) == 0
        assert await rig.number(program.file + "gmem.current") == before + 18 * GIB
        owner = other if other.swapped else program
        assert -(await owner.ask(Op.MOVE_IN, 2 * MIB, 0)).status == errno.EAGAIN
        (await program.ask(Op.REPORT, 0, 0, 0)).check()
        assert (await program.ask(Op.LIMITS)).check().args[0] == U64
        async with takes(0, 0.1):
            late = await rig.program(2 * GIB, "/tight")
        await trio.sleep(5)
        assert [len(one.reclaims) for one in (program, other, late)] == [*reclaims, 0]
        assert not any(one.ended.is_set() for one in (program, other, late)), "nobody is hung up on"
        await rig.restore()
        (await owner.ask(Op.MOVE_IN, 2 * MIB, 0)).check()
        await until_then(lambda: bool(late.reclaims))
        await trio.sleep(3)
        assert await rig.number("slice/tight/0/gmem.current") <= GIB, "its limit holds again"

    drive(test)


@pytest.mark.logs("GPU 0 is lost", "GPU 0 is back")
def test_who_is_asked_as_the_gpu_is_lost_keeps_nobody_waiting(drive: Drive) -> None:
    """A program that was asked for memory hangs in the driver. The charge that waited for it is granted as soon as the
    loss is known, and its late answer is booked."""

    async def test(rig: Rig) -> None:
        goes_on = trio.Event()
        slow, program = await rig.program(6 * GIB, "/job"), await rig.program(0, "/job")
        move = slow.obey

        async def hang(message: Message) -> Message | None:
            await goes_on.wait()
            return await move(message)

        slow.obey = hang
        await rig.h.write("slice/job/0/gmem.limit.high", "8G")
        done: list[int] = []

        async def charge() -> None:
            done.append(await program.alloc(4 * GIB))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(charge)
            await until_then(lambda: bool(slow.reclaims))
            assert not done
            async with takes(0, 0.5):
                await rig.lose()
                await until_then(lambda: bool(done))
        assert done == [0]
        before = await rig.number(slow.file + "gmem.current")
        goes_on.set()
        await trio.sleep(0.5)
        assert await rig.number(slow.file + "gmem.current") == before - slow.swapped < before
        assert not slow.ended.is_set()
        await rig.restore()

    drive(test)


@pytest.mark.parametrize("fails", [errno.ENOBUFS, 0])
def test_who_cannot_be_asked_is_not_waited_for(fails: int) -> None:
    """Neither a program whose socket has no memory, nor one that is gone; and no request stays outstanding."""
    asked: list[int] = []

    class Broken(tenants.Line):
        async def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
            await trio.lowlevel.checkpoint()
            if fails:
                raise OSError(fails, os.strerror(fails))
            return False

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, trio.socket.from_stdlib_socket(theirs) as end:
            who = backend.process.identity.identify(os.getpid())
            session = Session(who, {}, Broken(end, who))
            holding: Any = SimpleNamespace(gpu=0, ask=asked.append)
            with trio.fail_after(5):
                assert not await session.move_out(holding, 4 * MIB, 3600)
            assert session._moves._asked == {}
            session.close()

    trio.run(main)
    assert asked == [4 * MIB, -4 * MIB]


def test_a_limit_is_tried_for_as_long_as_its_write_may_take(drive: Drive) -> None:
    """A program that reads over the bus lets go of its kernels for a while, and moves nothing."""

    async def test(rig: Rig) -> None:
        program = await rig.program(8 * GIB)
        since = trio.current_time()

        async def busy(request: Message) -> Message:
            await trio.sleep(0.3)
            return request.answer(0, 1) if trio.current_time() < since + 1.5 else await program.move(request)

        program.obey = busy
        async with takes(1.5, 3.0):
            await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident <= 6 * GIB
        assert len(program.reclaims) <= 8, "it is not asked without a pause"

        async def never(request: Message) -> Message:
            return request.answer(0, 1)

        program.obey = never
        async with takes(4.0, 5.0):
            assert await rig.h.refused(program.file + "gmem.limit.high", "4G") == errno.EAGAIN
        assert await rig.h.read(program.file + "gmem.limit.high") == f"{6 * GIB}\n"

    drive(test)


def test_a_program_that_cannot_be_asked_is_asked_once(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each time that it has to give: the daemon does not retry without a pause until the socket has room."""
    tried: list[Op] = []
    send = tenants.Line.send

    async def short(line: tenants.Line, message: Message, descriptors: Sequence[int] = ()) -> bool:
        if message.op != Op.RECLAIM:
            return await send(line, message, descriptors)
        tried.append(Op.RECLAIM)
        await trio.lowlevel.checkpoint()
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    async def test(rig: Rig) -> None:
        program = await rig.program(8 * GIB)
        with monkeypatch.context() as patch:
            patch.setattr(tenants.Line, "send", short)
            assert await rig.h.refused(program.file + "gmem.limit.high", "6G") == errno.EAGAIN
        assert len(tried) == 1
        await rig.h.write(program.file + "gmem.limit.high", "6G")
        assert program.resident <= 6 * GIB

    drive(test)


@attrs.define
class SlowLine:
    """A connection that has no room until it is told to."""

    room: trio.Event = attrs.field(factory=trio.Event)
    sent: list[tuple[int, list[int]]] = attrs.field(factory=list)
    """Op of each message, and the inodes of the descriptors that came with it."""
    uid: int = 0

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> bool:
        await self.room.wait()
        self.sent.append((message.op, [os.fstat(fd).st_ino for fd in descriptors]))
        return True

    async def receive(self) -> None:
        await trio.sleep_forever()


def test_a_page_that_is_given_up_while_it_is_handed_out_is_no_other_file() -> None:
    """Its descriptor number may be another file's by the time that there is room for the message."""

    async def main() -> None:
        line = SlowLine()
        session = Session(Process(1, 1), {}, line)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.run)
            await trio.testing.wait_all_tasks_blocked()
            page = session.lead(0, 200)
            assert page is not None
            assert page.writable is not None
            inode = os.fstat(page.writable).st_ino
            await trio.testing.wait_all_tasks_blocked()
            assert session.lead(0, None) is None
            others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
            line.room.set()
            await trio.testing.wait_all_tasks_blocked()
            for other in others:
                os.close(other)
            nursery.cancel_scope.cancel()
        session.close()
        assert line.sent == [(Op.LEAD, [inode]), (Op.LEAD, [])]

    trio.run(main)
