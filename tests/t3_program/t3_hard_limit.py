"""gmem.limit.max in virtual time: going over it is refused to programs with the library, and ends others."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import trio

from backend.core import oom
from backend.core.oom import NOTICE_S
from backend.core.over import PASSING_S
from backend.core.silence import RETURN_S
from backend.door.wire import Message, Op
from backend.process import procfs, victims
from backend.process.identity import Group, Member, Process, Slice, SliceOn
from backend.process.inside import in_maps
from backend.process.running import is_stopped
from ggroupfs.units import Units
from tests.support.cuda_session import CONTEXT, GIB, LOOKS, MIB, Drive, Program, Rig, drive, pieces, until_then
from tests.support.harness import answers, until

__all__ = ["drive", "pieces"]  # fixtures

JOB = "slice/job/0/"
SEEN_S = 1.2
"""Seconds until the driver's figures are in the books and reclaim has done what it can."""


OVER_MAX, OVER_HIGH, KILLED = r"over its gmem\.limit\.max: ", r"over its gmem\.limit\.high: ", "cannot be moved: killed"
"""Lines of the log."""
PAST = "past its library"
"""Words of the log line about a program that holds much that its library did not see."""
SPARED_ADJ = 900
"""oom_score_adj that spares a process in these tests: a lower one would take CAP_SYS_RESOURCE."""


def spare(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark a process as one that is never killed."""
    monkeypatch.setattr(victims, "SPARED_ADJ", SPARED_ADJ)
    with open(f"/proc/{process.pid}/oom_score_adj", "w", encoding="ascii") as file:
        file.write(str(SPARED_ADJ))


async def stranger(rig: Rig, nbytes: int, cgroup: str = "/job") -> Process:
    """Start a program without the library that holds `nbytes`, and wait until it is in the tree."""
    process = rig.process(cgroup)
    rig.driver_says(process.pid, nbytes)
    await until_then(lambda: rig.h.controller.bookkeeper.knows(process, 0))
    await until_then(lambda: rig.h.ledger.books(Member(process, 0)).current == nbytes)
    return process


async def buried(rig: Rig, process: Process) -> None:
    """Wait until a process was killed, and have the driver and the daemon notice."""
    await until_then(lambda: has_ended(process))
    rig.fake.kill(process.pid)
    rig.nvml.compute[0] = [(pid, held) for pid, held in rig.nvml.compute[0] if pid != process.pid]
    await rig.h.gone(process)


class Refusing:
    """A kernel that refuses to signal some processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *numbers: int) -> None:
        """`numbers` are the signals that are refused."""
        self.pids: set[int] = set()
        """Pids for which they are refused."""
        self.tries: list[tuple[int, int]] = []
        """(pid, signal) of each refusal."""
        real = signal.pidfd_send_signal

        def send(pidfd: int, number: int) -> None:
            pid = int(procfs.keyed(procfs.content(f"/proc/self/fdinfo/{pidfd}"))[b"Pid"])
            if pid in self.pids and number in numbers:
                self.tries.append((pid, number))
                raise PermissionError(errno.EPERM, "Operation not permitted")
            real(pidfd, number)

        monkeypatch.setattr(signal, "pidfd_send_signal", send)


def has_ended(process: Process) -> bool:
    """Return whether a process was killed, even if it was not reaped yet."""
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None and found.si_status == signal.SIGKILL


async def none_ends(level: Group, lasts: object) -> int:
    """Stand in for a killer that finds no process to kill."""
    del level, lasts
    return 0


# Programs with the library


def test_an_allocation_over_it_makes_room_before(drive: Drive) -> None:
    """The level never holds more, as with memory.max; each time that the limit was met is counted."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB, "/job")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(LOOKS)
        held = await rig.number(JOB + "gmem.current")
        assert held <= 4 * GIB
        assert await program.alloc(2 * GIB) == 0
        assert await rig.number(JOB + "gmem.current") <= 4 * GIB
        assert await rig.number(JOB + "gmem.peak") <= 4 * GIB, "not for a moment"
        events = await rig.stat(JOB + "gmem.events")
        assert (events["max"], events["oom"], events["oom_kill"], events["over"]) == (1, 0, 0, 0)

    drive(test)


def test_what_is_larger_than_it_is_refused_and_nothing_moves(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        assert await program.alloc(5 * GIB) == errno.ENOMEM
        assert program.reclaims == []
        assert (await rig.stat(program.file + "gmem.events"))["oom"] == 1
        assert (await rig.stat(JOB + "gmem.events"))["max"] == 1
        assert await rig.number(program.file + "gmem.current") == 1 * GIB
        assert await program.alloc(2 * GIB) == 0

    drive(test)


def test_where_no_swap_is_left_it_is_refused(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await rig.h.write(program.file + "gmem.swap.max", "0")
        await rig.h.write(program.file + "gmem.limit.max", "4G")
        assert await program.alloc(2 * GIB) == errno.ENOMEM
        assert program.reclaims == []
        assert await program.alloc(512 * MIB) == 0

    drive(test)


def test_what_does_not_leave_in_time_is_refused(drive: Drive) -> None:
    """The program's answer that it moved nothing is believed: the books agree with it."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB)
        await rig.h.write(program.file + "gmem.limit.max", "4G")

        async def nothing(request: object) -> object:
            return request.answer(0, 0)  # type: ignore[attr-defined]

        program.obey = nothing  # type: ignore[assignment]
        assert await program.alloc(2 * GIB) == errno.ENOMEM
        events = await rig.stat(program.file + "gmem.events")
        assert (events["max"], events["oom"]) == (1, 1)
        assert await rig.number(program.file + "gmem.current") <= 4 * GIB

    drive(test)


def test_memory_comes_back_no_further_than_it(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB)
        await rig.h.write(program.file + "gmem.limit.max", "2G")
        assert await rig.number(program.file + "gmem.current") <= 2 * GIB
        assert (await program.ask(Op.MOVE_IN, GIB, 0)).status == -errno.EAGAIN

    drive(test)


async def allocated(program: Program, nbytes: int, results: list[int]) -> None:
    """Have a program allocate, and append the errno to `results`."""
    results.append(await program.alloc(nbytes))


def test_two_allocations_at_once_have_room_made_one_after_the_other(drive: Drive) -> None:
    """Memory that was moved for the first cannot be moved again for the second, but the first allocation can."""

    async def test(rig: Rig) -> None:
        program, results = await rig.program(3 * GIB), list[int]()
        await rig.h.write(program.file + "gmem.limit.max", "4G")
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(allocated, program, 3 * GIB, results)
        assert results == [0, 0]
        assert await rig.number(program.file + "gmem.peak") <= 4 * GIB

    drive(test)


@pytest.mark.logs(OVER_MAX)
def test_an_allocation_empties_no_program_for_one_that_cannot_be_moved(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, since the part that programs with the library can be asked for makes no room; nothing moves."""

    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB, "/job")
        await rig.h.write(JOB + "gmem.limit.max", "8G")
        process = await stranger(rig, 1 * GIB)
        spare(process, monkeypatch)
        rig.driver_says(process.pid, 20 * GIB)
        await trio.sleep(SEEN_S)
        before = list(program.reclaims)
        assert sum(before) <= CONTEXT, "of the 8 GiB its part is 4"
        for times in (1, 2):
            assert await program.alloc(64 * MIB) == errno.ENOMEM
            assert (await rig.stat(program.file + "gmem.events"))["oom"] == times
        assert program.reclaims == before
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        rig.driver_says(process.pid, 2 * GIB)
        await trio.sleep(SEEN_S)
        assert await program.alloc(64 * MIB) == 0

    drive(test)


def test_what_is_allocated_beside_one_that_cannot_be_moved_leaves_once(drive: Drive) -> None:
    """Each program gives as much as it allocates, and what another allocated meanwhile of the room made for it."""

    async def test(rig: Rig) -> None:
        one, two = await rig.program(3 * GIB, "/job"), await rig.program(1 * GIB, "/job")
        await stranger(rig, 6 * GIB)
        await trio.sleep(LOOKS)
        await rig.h.write(JOB + "gmem.limit.max", "11G")
        assert await rig.number(JOB + "gmem.current") >= 11 * GIB - 32 * MIB, "it is full"
        results: list[int] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(allocated, one, 2 * GIB + 512 * MIB, results)
            for pause in range(40):
                nursery.start_soon(allocated, two, 32 * MIB, results)
                await trio.sleep(0.001 * (pause % 8))
        assert results == [0] * 41
        assert await rig.number(JOB + "gmem.peak") <= 11 * GIB
        assert sum(one.reclaims) + sum(two.reclaims) <= 2 * GIB + 512 * MIB + 40 * 32 * MIB

    drive(test)


# Programs without it


@pytest.mark.logs(OVER_MAX, KILLED)
def test_one_without_the_library_ends_a_second_after_the_notice(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        small, large = await stranger(rig, 1 * GIB), await stranger(rig, 2 * GIB)
        outside = await stranger(rig, 30 * GIB, "/other")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(large.pid, 6 * GIB)
        await trio.sleep(LOOKS)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["max"], events["over"], events["oom"], events["oom_kill"]) == (1, 1, 0, 0), "the notice"
        assert not has_ended(large)
        await trio.sleep(NOTICE_S + 0.3)
        assert has_ended(large)
        await buried(rig, large)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["oom"], events["oom_kill"], events["oom_group_kill"]) == (1, 1, 0)
        assert not has_ended(small), "it fits now"
        assert not has_ended(outside), "a level that carries no limit"
        await trio.sleep(2 * NOTICE_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 0
        assert not has_ended(small)

    drive(test)


@pytest.mark.logs(OVER_MAX)
def test_one_that_is_under_it_again_in_time_lives(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        for _ in range(3):
            rig.driver_says(process.pid, 6 * GIB)
            await trio.sleep(LOOKS)
            assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
            rig.driver_says(process.pid, 2 * GIB)
            await trio.sleep(LOOKS)
            assert (await rig.stat(JOB + "gmem.events"))["over"] == 0
        assert not has_ended(process)

    drive(test)


def test_those_with_the_library_give_first_and_no_other_ends(drive: Drive) -> None:
    """The largest can move: it moves down to its part, and then all fit."""

    async def test(rig: Rig) -> None:
        program = await rig.program(3 * GIB, "/job")
        process = await stranger(rig, 1 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "5G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 2 * GIB + 512 * MIB)
        await trio.sleep(SEEN_S + NOTICE_S)
        assert not has_ended(process)
        assert await rig.number(JOB + "gmem.current") <= 5 * GIB
        assert program.swapped > 0
        assert (await rig.stat(JOB + "gmem.events"))["oom_kill"] == 0

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_one_that_goes_past_its_library_counts_as_one_without(drive: Drive) -> None:
    """A connection to the daemon spares no program."""

    async def test(rig: Rig) -> None:
        program, honest = await rig.program(0, "/job"), await rig.program(1 * GIB, "/job")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        program.context = 6 * GIB
        program.show()
        await buried(rig, program.process)
        await trio.sleep(2 * NOTICE_S)
        assert not has_ended(honest.process)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["oom_kill"], events["over"]) == (1, 0)

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED, PAST)
def test_what_could_be_moved_makes_none_the_first(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """Of two with unmovable memory, the one with more of that is killed, however large the other is."""

    async def test(rig: Rig) -> None:
        program = await rig.program(28 * GIB, "/job", context=oom.PAST_MOST + 256 * MIB)
        process = await stranger(rig, 10 * GIB)
        await rig.h.write(JOB + "gmem.swap.max", "0")
        await rig.h.write(JOB + "gmem.limit.max", "41G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 12 * GIB)
        await buried(rig, process)
        await trio.sleep(2 * NOTICE_S)
        assert not has_ended(program.process)
        assert (await rig.stat(JOB + "gmem.events"))["oom_kill"] == 1

    drive(test)
    assert [line for line in caplog.messages if line.endswith(f"holds {12 * GIB} that cannot be moved: killed")]


@pytest.mark.logs(OVER_HIGH, PAST)
def test_the_log_says_what_of_a_program_is_past_its_library(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        await rig.h.write(JOB + "gmem.swap.max", "0")
        await rig.h.write(JOB + "gmem.limit.high", "4G")
        program.context = 5 * GIB
        program.show()
        await trio.sleep(SEEN_S + NOTICE_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1

    drive(test)
    (line,) = (line for line in caplog.messages if "over its gmem.limit.high" in line)
    assert f"holds {5 * GIB} that cannot be moved, as it is past the library in it" in line


async def moves_nothing(request: Message) -> Message:
    """Answer as a program that cannot move any of the memory."""
    return request.answer(0, 0)


@pytest.mark.logs(OVER_HIGH)
def test_the_log_names_at_once_what_a_library_cannot_move(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """It names the program with the most such memory, once."""

    async def test(rig: Rig) -> None:
        small, program = await rig.program(0, "/job"), await rig.program(0, "/job")
        await rig.h.write(JOB + "gmem.limit.high", "4G")
        for one, nbytes in ((small, 1 * GIB), (program, 5 * GIB)):
            one.obey = moves_nothing
            (await one.ask(Op.REPORT, nbytes, 0)).check()
            assert await one.alloc(nbytes) == 0
        await trio.sleep(SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        (line,) = (line for line in caplog.messages if "over its gmem.limit.high" in line)
        assert f"process {program.process.pid} holds {5 * GIB} that its library cannot move: arrays" in line
        await rig.die(program)
        await trio.sleep(SEEN_S)

    drive(test)
    assert len([line for line in caplog.messages if "over its gmem.limit.high" in line]) == 1


@pytest.mark.logs(OVER_HIGH)
def test_one_that_gives_nothing_is_told_of_after_a_while(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """A program that is stopped, or waits for its turn, may give later; if it has not by then, it is logged, once."""

    def lines() -> list[str]:
        return [line for line in caplog.messages if "over its gmem.limit.high" in line]

    async def test(rig: Rig) -> None:
        program = await rig.program(0, "/job")
        await rig.h.write(JOB + "gmem.limit.high", "4G")
        program.obey = moves_nothing
        assert await program.alloc(5 * GIB) == 0
        await trio.sleep(PASSING_S - SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        assert not lines()
        await trio.sleep(2 * SEEN_S)
        assert len(lines()) == 1
        assert "its members hold what cannot be moved now" in lines()[0]
        await trio.sleep(PASSING_S)

    drive(test)
    assert len(lines()) == 1


def test_one_that_exits_is_not_said_to_be_without_the_library(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection closes before it is gone: a line about it would be wrong."""

    async def test(rig: Rig) -> None:
        program = await rig.program(0, "/job")
        await rig.h.write(JOB + "gmem.limit.high", "4G")
        program.obey = moves_nothing
        assert await program.alloc(5 * GIB) == 0
        await trio.sleep(SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        monkeypatch.setattr(oom, "is_ending", lambda pid: pid == program.process.pid)
        program.close()
        await trio.sleep(2 * SEEN_S)
        assert not rig.h.controller.gpus[0].manages(program.process)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1

    drive(test)


@pytest.mark.logs(OVER_MAX)
def test_one_that_is_spared_stays_and_is_shown(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        spare(process, monkeypatch)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S + 3 * NOTICE_S)
        assert not has_ended(process)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["over"], events["oom"], events["oom_kill"]) == (1, 0, 0)

    drive(test)
    lines = [line for line in caplog.messages if "over its gmem.limit.max" in line]
    assert len(lines) == 1, "said once"
    assert "ggroupfs run" in lines[0]


IN_VAIN = r"no process is killed for its gmem\.limit\.max"
"""Line of the log."""


@pytest.mark.logs(OVER_MAX, IN_VAIN, KILLED)
def test_none_ends_where_all_together_would_not_be_enough(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A spared process alone is over the limit: the level is shown to be over it, and that is logged once. As soon as
    the end of the other process would be enough, that one is killed."""

    async def test(rig: Rig) -> None:
        spared, other = await stranger(rig, 1 * GIB), await stranger(rig, 2 * GIB)
        spare(spared, monkeypatch)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(spared.pid, 6 * GIB)
        await trio.sleep(SEEN_S + 5 * NOTICE_S)
        assert not has_ended(other)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["over"], events["oom"], events["oom_kill"]) == (1, 0, 0)
        lines = [line for line in caplog.messages if "no process is killed" in line]
        assert len(lines) == 1, "said once"
        assert f"exceeds by {4 * GIB}: all that may be killed hold {2 * GIB} " in lines[0]
        rig.driver_says(spared.pid, 3 * GIB)
        await buried(rig, other)

    drive(test)


@pytest.mark.logs(OVER_MAX, "killed with all of")
def test_what_ends_with_a_slice_counts_as_enough(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write for which the end of one process without the library is too little succeeds by the end of its slice."""

    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB, "/job/inner")
        await rig.h.write(program.file + "gmem.swap.max", "0")
        process, spared = await stranger(rig, 1 * GIB, "/job/inner"), await stranger(rig, 1 * GIB)
        spare(spared, monkeypatch)
        await rig.h.write("slice/job/inner/0/gmem.oom.group", "1")
        await trio.sleep(RETURN_S)
        async with trio.open_nursery() as nursery:
            for one in (process, program.process):
                nursery.start_soon(buried, rig, one)
            await rig.h.write(JOB + "gmem.limit.max", "2G")
        assert not has_ended(spared)
        assert await rig.number(JOB + "gmem.current") == 1 * GIB

    drive(test)


@pytest.mark.logs(OVER_MAX, "killed with all of")
def test_a_slice_ends_as_a_whole_where_it_says_so(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest slice at or below the limit that asks for it ends with all members, but without spared processes."""

    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job/inner")
        large = await stranger(rig, 1 * GIB, "/job/inner")
        spared, beside = await stranger(rig, 512 * MIB, "/job/inner"), await stranger(rig, 1 * GIB)
        spare(spared, monkeypatch)
        await rig.h.write("slice/job/inner/0/gmem.oom.group", "1")
        await rig.h.write(JOB + "gmem.limit.max", "8G")
        await trio.sleep(RETURN_S)
        rig.driver_says(large.pid, 9 * GIB)
        for process in (large, program.process):
            await buried(rig, process)
        assert not has_ended(spared)
        assert not has_ended(beside)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["oom"], events["oom_kill"], events["oom_group_kill"]) == (1, 2, 1)

    drive(test)


@pytest.mark.logs(OVER_MAX, "killed with all of")
def test_files_have_a_slice_end_as_a_whole_before_they_lower_its_limit(drive: Drive, tmp_path: Path) -> None:
    """This holds for any order of the lines, so no process of a service is left behind when its limit arrives."""

    async def test(rig: Rig) -> None:
        (tmp_path / "a.conf").write_text("[/job]\nGMemMax=2G\nGMemOOMGroup=yes\n")
        small, large = await stranger(rig, 1 * GIB), await stranger(rig, 3 * GIB)
        await trio.sleep(RETURN_S)
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(Units(rig.h.controller, tmp_path, None).run)
                for process in (large, small):
                    await buried(rig, process)
                nursery.cancel_scope.cancel()

    drive(test)


@pytest.mark.logs(OVER_MAX)
def test_files_have_a_limit_that_stands_and_does_not_hold_as_a_daemon_begins(drive: Drive, tmp_path: Path) -> None:
    """For example after an upgrade during the notice, when no process is killed yet. The file is not at fault, and its
    limit is taken back once it leaves the file."""

    async def test(rig: Rig) -> None:
        file = tmp_path / "a.conf"
        file.write_text("[/job]\nGMemMax=4G\n")
        process = await stranger(rig, 1 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        units = Units(rig.h.controller, tmp_path, None)
        async with trio.open_nursery() as nursery:
            await nursery.start(units.run)
            with trio.fail_after(1):
                await until_then(lambda: rig.h.controller.facts.get("units.configured") == "1")
                file.write_text("")
                units.reload()
                await until_then(lambda: rig.h.controller.facts["units.configured"] == "0")
            nursery.cancel_scope.cancel()
        assert await rig.h.read(JOB + "gmem.limit.max") == "max\n"
        assert not has_ended(process)

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_none_ends_while_programs_may_still_connect(drive: Drive) -> None:
    """A daemon that has just started does not know yet which programs have the library."""

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        assert await rig.h.refused(JOB + "gmem.limit.max", "1G") == errno.EBUSY
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(RETURN_S - 5)
        assert not has_ended(process)
        await buried(rig, process)

    drive(test)


# Programs with the library that do not connect


def preloading(tmp_path: Path) -> tuple[str, ...]:
    """Return words that run a program with a library that has our library's name and does nothing."""
    library = tmp_path / "libggroup-cuda.so"
    shutil.copy(next(Path("/lib").glob("*/libutil.so.1")), library)
    return "env", f"LD_PRELOAD={library}", "sleep", "600"


async def silent(rig: Rig, words: tuple[str, ...], nbytes: int) -> Process:
    """Start a program in the job that maps it, holds `nbytes`, and does not connect."""
    process = rig.process("/job", *words)
    await until(lambda: in_maps(process.pid), "the library is in it")
    rig.driver_says(process.pid, nbytes)
    await until_then(lambda: rig.h.controller.bookkeeper.knows(process, 0))
    return process


@pytest.mark.logs(OVER_MAX)
def test_one_that_was_stopped_as_the_daemon_began_has_the_time_to_connect(drive: Drive, tmp_path: Path) -> None:
    words = preloading(tmp_path)

    async def test(rig: Rig) -> None:
        process = await silent(rig, words, 3 * GIB)
        os.kill(process.pid, signal.SIGSTOP)
        await until(lambda: is_stopped(process.pid), "it is stopped")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(2 * RETURN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        os.kill(process.pid, signal.SIGCONT)
        await until(lambda: not is_stopped(process.pid), "it goes on")
        await trio.sleep(RETURN_S - 2)
        assert not has_ended(process)
        program = await rig.connect(process).manage(6 * GIB - CONTEXT)
        await trio.sleep(2 * RETURN_S)
        assert not has_ended(process)
        assert program.swapped, "it gives"
        assert (await rig.stat(JOB + "gmem.events"))["oom_kill"] == 0

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_one_that_maps_the_library_and_never_speaks_ends_after_that_time(drive: Drive, tmp_path: Path) -> None:
    """Mapping a file of that name spares no program for good."""
    words = preloading(tmp_path)

    async def test(rig: Rig) -> None:
        process = await silent(rig, words, 3 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S + NOTICE_S + RETURN_S - 2)
        assert not has_ended(process)
        began = trio.current_time()
        await buried(rig, process)
        assert trio.current_time() - began < 2 + 2 * NOTICE_S

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_one_that_speaks_for_moments_has_no_more_time(drive: Drive, tmp_path: Path) -> None:
    words = preloading(tmp_path)

    async def test(rig: Rig) -> None:
        process = await silent(rig, words, 512 * MIB)
        await rig.h.write(JOB + "gmem.limit.max", "1G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 1 * GIB + 512 * MIB)
        began = trio.current_time()
        while not has_ended(process):
            program = rig.connect(process)
            program.lag = 1 * GIB + 512 * MIB
            await program.manage()
            await trio.sleep(0.05)
            program.close()
            await trio.sleep(2)
            assert trio.current_time() - began < 3 * RETURN_S
        await buried(rig, process)

    drive(test)


@pytest.mark.logs(OVER_MAX)
def test_one_whose_connection_is_lost_has_the_time_to_connect_anew(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = preloading(tmp_path)

    async def test(rig: Rig) -> None:
        process = await silent(rig, words, CONTEXT)
        program = await rig.connect(process).manage()
        assert await program.alloc(3 * GIB) == 0
        hog = await stranger(rig, 128 * MIB)
        spare(hog, monkeypatch)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        program.close()
        rig.driver_says(hog.pid, 2 * GIB)
        await trio.sleep(RETURN_S - 2)
        assert not rig.gpu.manages(process)
        await rig.connect(process).manage(3 * GIB)
        await trio.sleep(3 * NOTICE_S)
        assert not has_ended(process)

    drive(test)


# Only members are killed


@pytest.mark.logs(OVER_MAX)
def test_one_that_leaves_the_slice_while_it_is_looked_at_lives(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do all processes of its new slice, although that slice ends as a whole."""

    async def test(rig: Rig) -> None:
        process, other = await stranger(rig, 2 * GIB), await stranger(rig, 1 * GIB, "/other")

        async def spared(one: Process) -> str | None:
            rig.h.world.cgroups[process.pid] = Slice("/other")
            return await victims.spared(one)

        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await rig.h.write("slice/other/0/gmem.oom.group", "1")
        await trio.sleep(RETURN_S)
        monkeypatch.setattr(oom, "spared", spared)
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S + 2 * NOTICE_S)
        assert not has_ended(process)
        assert not has_ended(other)
        assert await rig.number("slice/other/0/gmem.current") == 7 * GIB

    drive(test)


@pytest.mark.logs(OVER_MAX, "killed with all of")
def test_an_event_that_cannot_be_counted_keeps_none_of_a_group_from_its_end(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member may be gone from the kernel's books and not yet from the daemon's."""

    async def test(rig: Rig) -> None:
        large, small = await stranger(rig, 2 * GIB), await stranger(rig, 1 * GIB)
        await rig.h.write(JOB + "gmem.oom.group", "1")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        real = rig.h.ledger.note

        def note(group: Group, event: str) -> None:
            if event == "oom_kill" and group == Member(large, 0):
                raise OSError(errno.ENODEV, "No such device")
            real(group, event)

        monkeypatch.setattr(rig.h.ledger, "note", note)
        rig.driver_says(large.pid, 6 * GIB)
        for process in (large, small):
            await buried(rig, process)

    drive(test)


# Kills that fail

NOT_KILLED = r"process \d+ cannot be killed: Operation not permitted"
"""Line of the log, once per process."""


@pytest.mark.parametrize("numbers", [(0, signal.SIGKILL), (signal.SIGKILL,)], ids=["it is known before", "it is not"])
@pytest.mark.logs(OVER_MAX, NOT_KILLED)
def test_one_that_cannot_be_killed_is_tried_once(
    numbers: tuple[int, ...], drive: Drive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is counted or logged as killed; the slice is over its limit, and is shown to be."""
    refusing = Refusing(monkeypatch, *numbers)

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        refusing.pids.add(process.pid)
        await rig.h.write(JOB + "gmem.oom.group", "1")
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S + 5 * NOTICE_S)
        assert len(refusing.tries) == 1
        assert not has_ended(process)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["over"], events["oom_kill"], events["oom_group_kill"]) == (1, 0, 0)
        assert await rig.h.refused(JOB + "gmem.limit.max", "1G") == errno.EBUSY, "and not that it took too long"
        await trio.sleep(3 * NOTICE_S)
        assert len(refusing.tries) == 1
        os.kill(process.pid, signal.SIGKILL)
        await buried(rig, process)
        assert rig.h.leftovers()["kills"] == 0

    drive(test)
    assert not [line for line in caplog.messages if "be moved: killed" in line]


@pytest.mark.logs(OVER_MAX, NOT_KILLED, KILLED)
def test_the_next_one_ends_for_one_that_cannot_be_killed(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = Refusing(monkeypatch, signal.SIGKILL)

    async def test(rig: Rig) -> None:
        large, small = await stranger(rig, 3 * GIB), await stranger(rig, 1 * GIB)
        refusing.pids.add(large.pid)
        await rig.h.write(JOB + "gmem.limit.max", "5G")
        await trio.sleep(RETURN_S)
        rig.driver_says(small.pid, 2 * GIB + 512 * MIB)
        await buried(rig, small)
        await trio.sleep(2 * NOTICE_S)
        events = await rig.stat(JOB + "gmem.events")
        assert (events["over"], events["oom"], events["oom_kill"]) == (0, 1, 1)
        assert not has_ended(large)

    drive(test)


@pytest.mark.logs(NOT_KILLED)
def test_a_write_is_refused_and_none_ends_where_one_cannot_be_killed(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon finds out that it cannot before another process has ended for it."""
    refusing = Refusing(monkeypatch, 0, signal.SIGKILL)

    async def test(rig: Rig) -> None:
        large, small = await stranger(rig, 3 * GIB), await stranger(rig, 1 * GIB)
        refusing.pids.add(large.pid)
        await trio.sleep(RETURN_S)
        assert await rig.h.refused(JOB + "gmem.limit.max", "2G") == errno.EBUSY
        await trio.sleep(3 * NOTICE_S)
        assert not has_ended(small)

    drive(test)


# Writes


def test_a_write_below_what_is_held_moves_what_can_be(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB, "/job")
        await rig.h.write(JOB + "gmem.limit.max", "2G")
        assert await rig.number(JOB + "gmem.current") <= 2 * GIB
        assert program.swapped >= 2 * GIB
        assert not has_ended(program.process)

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_write_that_reclaim_cannot_make_hold_ends_the_largest(drive: Drive) -> None:
    """As a write to memory.max; it returns once the limit holds."""

    async def test(rig: Rig) -> None:
        small, large = await stranger(rig, 1 * GIB), await stranger(rig, 3 * GIB)
        await trio.sleep(RETURN_S)
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(buried, rig, large)
            await rig.h.write(JOB + "gmem.limit.max", "2G")
        assert trio.current_time() - began >= NOTICE_S
        assert await rig.number(JOB + "gmem.current") == 1 * GIB
        assert not has_ended(small)

    drive(test)


class Lingering:
    """Processes that were killed, and keep what they hold for some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ending: bool) -> None:
        """`ending`: whether they are seen to be ending."""
        self.sent: dict[int, float] = {}
        """Time of the SIGKILL of each, by pid."""
        self._monkeypatch, self._ending = monkeypatch, ending

    def __enter__(self) -> Lingering:
        def send(pidfd: int, number: int) -> None:
            if number == signal.SIGKILL:
                fields = procfs.keyed(procfs.content(f"/proc/self/fdinfo/{pidfd}"))
                self.sent.setdefault(int(fields[b"Pid"]), trio.current_time())

        self._monkeypatch.setattr(signal, "pidfd_send_signal", send)
        self._monkeypatch.setattr(oom, "is_ending", lambda pid: self._ending and pid in self.sent)
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the patches in place until the end of the test."""

    def bury(self, process: Process) -> None:
        """End a process after all."""
        os.kill(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("ending", [True, False], ids=["it ends", "it does not"])
@pytest.mark.logs(OVER_MAX, KILLED)
def test_none_is_killed_while_another_ends(ending: bool, drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes time to free what a process held, and no other process is killed for that. A process that does
    not end is not waited for."""

    async def test(rig: Rig) -> None:
        large, small = await stranger(rig, 1 * GIB), await stranger(rig, 3 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        with Lingering(monkeypatch, ending) as lingering:
            rig.driver_says(large.pid, 3 * GIB + 512 * MIB)
            await until_then(lambda: large.pid in lingering.sent)
            await trio.sleep(3 * oom.EXIT_S)
            if ending:
                assert small.pid not in lingering.sent
                lingering.bury(large)
                await buried(rig, large)
                await trio.sleep(2 * NOTICE_S)
                assert small.pid not in lingering.sent
                assert (await rig.stat(JOB + "gmem.events"))["oom_kill"] == 1
            else:
                assert oom.EXIT_S <= lingering.sent[small.pid] - lingering.sent[large.pid] < oom.EXIT_S + 1

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_none_is_killed_for_a_slice_while_one_ends_for_the_slice_below(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        inner, outer = await stranger(rig, 2 * GIB, "/job/inner"), await stranger(rig, 5 * GIB)
        await rig.h.write("slice/job/inner/0/gmem.limit.max", "4G")
        await rig.h.write(JOB + "gmem.limit.max", "12G")
        await trio.sleep(RETURN_S)
        with Lingering(monkeypatch, ending=True) as lingering:
            rig.driver_says(inner.pid, 6 * GIB)
            await until_then(lambda: inner.pid in lingering.sent)
            rig.driver_says(outer.pid, 7 * GIB)
            await trio.sleep(SEEN_S + 2 * NOTICE_S)
            assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
            assert list(lingering.sent) == [inner.pid]
            lingering.bury(inner)
            await buried(rig, inner)
            await trio.sleep(2 * NOTICE_S)
            assert outer.pid not in lingering.sent

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_write_waits_for_as_long_as_those_end_that_are_killed_for_it(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit holds then; a kill cannot be undone."""

    async def test(rig: Rig) -> None:
        await stranger(rig, 1 * GIB)
        two = [await stranger(rig, 3 * GIB) for _ in range(2)]
        await trio.sleep(RETURN_S)
        with Lingering(monkeypatch, ending=True) as lingering:

            async def bury(process: Process) -> None:
                await until_then(lambda: process.pid in lingering.sent)
                await trio.sleep(1.5 * oom.EXIT_S)
                lingering.bury(process)
                await buried(rig, process)

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for process in two:
                    nursery.start_soon(bury, process)
                await rig.h.write(JOB + "gmem.limit.max", "2G")
            assert trio.current_time() - began >= NOTICE_S + 3 * oom.EXIT_S
            assert await rig.h.read(JOB + "gmem.limit.max") == f"{2 * GIB}\n"
            assert await rig.number(JOB + "gmem.current") == 1 * GIB

    drive(test)


def raised_meanwhile(raised: int, drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    """Raise the limit during a write that kills. A member holds 3.5 GiB; a write of 2 GiB is followed by one of
    `raised` bytes within the notice. Neither may fail, and the member is killed only if the later limit demands it."""
    holds = raised > 4 * GIB

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 3 * GIB + 512 * MIB)
        await trio.sleep(RETURN_S)
        began, ended = trio.current_time(), list[float]()

        async def write(value: int, seconds: float) -> None:
            await trio.sleep(seconds)
            await rig.h.write(JOB + "gmem.limit.max", value)
            ended.append(trio.current_time() - began)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, 2 * GIB, 0.0)
            nursery.start_soon(write, raised, 0.5 * NOTICE_S)
            if not holds:
                nursery.start_soon(buried, rig, process)
        assert has_ended(process) is not holds
        assert await rig.number(JOB + "gmem.limit.max") == raised
        if holds:
            assert ended[0] == pytest.approx(0.5 * NOTICE_S, abs=0.01)

    drive(test)
    killed = [line for line in caplog.messages if "that cannot be moved: killed" in line]
    assert len(killed) == (not holds)


@pytest.mark.logs(OVER_MAX)
def test_a_raise_does_not_wait_for_a_write_that_kills(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    raised_meanwhile(5 * GIB, drive, caplog)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_raise_that_is_not_enough_is_what_is_killed_for(drive: Drive, caplog: pytest.LogCaptureFixture) -> None:
    raised_meanwhile(3 * GIB, drive, caplog)


@pytest.mark.parametrize(
    "dies",
    [
        pytest.param(True, id="it dies", marks=pytest.mark.logs(OVER_MAX, KILLED)),
        pytest.param(False, id="none dies", marks=pytest.mark.logs(OVER_MAX)),
    ],
)
def test_other_writes_go_on_while_one_kills(drive: Drive, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """Other writes hold at once, and if no process dies only the killing write is undone. A second write of the hard
    limit waits, and is undone by itself."""

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 3 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "8G")
        await trio.sleep(RETURN_S)
        said: list[int] = []
        with Lingering(monkeypatch, ending=True) as lingering:

            async def lower(value: str) -> None:
                said.append(await answers(rig.h.write(JOB + "gmem.limit.max", value)))

            async def bury() -> None:
                await until_then(lambda: process.pid in lingering.sent)
                await others()
                lingering.bury(process)
                await buried(rig, process)

            async def others() -> None:
                began = trio.current_time()
                await rig.h.write(JOB + "gmem.limit.low", "1G")
                await rig.h.write(JOB + "compute.timeslice", "4")
                await rig.h.write(JOB + "gmem.limit.high", "4G")
                assert await rig.h.refused(JOB + "gmem.limit.high", "1G") == errno.EBUSY
                assert trio.current_time() - began < 0.5 * NOTICE_S
                assert await rig.h.read(JOB + "gmem.limit.high") == f"{4 * GIB}\n"
                assert await rig.h.read(JOB + "gmem.limit.max") == f"{2 * GIB}\n"

            async with trio.open_nursery() as nursery:
                if dies:
                    nursery.start_soon(bury)
                else:
                    monkeypatch.setattr(rig.h.controller._killer, "relieve", none_ends)
                nursery.start_soon(lower, "2G")
                await trio.sleep(0.5 * NOTICE_S)
                nursery.start_soon(lower, "1G")
                await others()
        high, low = await rig.h.read(JOB + "gmem.limit.high"), await rig.h.read(JOB + "gmem.limit.low")
        assert (high, low) == (f"{4 * GIB}\n", f"{1 * GIB}\n")
        assert await rig.h.read(JOB + "compute.timeslice") == "4\n"
        assert await rig.number(JOB + "gmem.limit.max") == (1 * GIB if dies else 8 * GIB)
        assert said == ([0, 0] if dies else [errno.EBUSY, errno.EBUSY])

    drive(test)


@pytest.mark.logs(OVER_HIGH)
def test_none_ends_for_a_write_that_is_refused_late(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice over another limit is checked all the time, and so are its members before this limit is written."""

    async def test(rig: Rig) -> None:
        one, other = await stranger(rig, 1 * GIB), await stranger(rig, 2 * GIB)
        await rig.h.write(JOB + "gmem.limit.high", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(one.pid, 3 * GIB)
        await trio.sleep(SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1

        looks: list[Process] = []

        async def spared(process: Process) -> str | None:
            looks.append(process)
            await trio.sleep(3 * NOTICE_S if len(looks) == 1 else 0)  # the look of the writer
            return "it is not to be" if process == one else None

        monkeypatch.setattr(oom, "spared", spared)
        assert await rig.h.refused(JOB + "gmem.limit.max", "2G") == errno.EBUSY
        await trio.sleep(3 * NOTICE_S)
        assert not has_ended(other)
        rig.driver_says(one.pid, 1 * GIB)
        await trio.sleep(SEEN_S)

    drive(test)


def test_a_write_that_no_kill_makes_hold_is_refused_and_none_ends(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        spared, other = await stranger(rig, 3 * GIB), await stranger(rig, 1 * GIB)
        spare(spared, monkeypatch)
        await trio.sleep(RETURN_S)
        assert await rig.h.refused(JOB + "gmem.limit.max", "2G") == errno.EBUSY
        assert await rig.h.read(JOB + "gmem.limit.max") == "max\n"
        await trio.sleep(3 * NOTICE_S)
        assert not has_ended(other)

    drive(test)


@pytest.mark.logs(OVER_HIGH)
def test_a_raise_holds_at_once_in_a_slice_that_is_over_its_high(drive: Drive) -> None:
    """As a write to memory.max: neither limit waits for the other, or is refused because of it. So it is for
    lowering."""

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "8G")
        await rig.h.write(JOB + "gmem.limit.high", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1
        for value in ("9G", "7G", "max"):
            began = trio.current_time()
            await rig.h.write(JOB + "gmem.limit.max", value)
            assert trio.current_time() == began
        await trio.sleep(3 * NOTICE_S)
        assert not has_ended(process)

    drive(test)


@pytest.mark.logs(OVER_MAX)
def test_a_high_is_raised_in_a_slice_that_is_over_its_max(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        spare(process, monkeypatch)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await rig.h.write(JOB + "gmem.limit.high", "3G")
        rig.driver_says(process.pid, 6 * GIB)
        await trio.sleep(SEEN_S)
        await rig.h.write(JOB + "gmem.limit.high", "max")
        assert await rig.h.read(JOB + "gmem.limit.high") == "max\n"

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_raise_that_is_not_enough_holds_at_once_too(drive: Drive) -> None:
    """It spares no member: the notice began when the slice went over the limit, and the slice still is."""

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 2 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 6 * GIB)
        await until_then(lambda: rig.h.controller.is_over(SliceOn(Slice("/job"), 0)))
        began = trio.current_time()
        await trio.sleep(0.5 * NOTICE_S)
        now = trio.current_time()
        await rig.h.write(JOB + "gmem.limit.max", "5G")
        assert trio.current_time() == now
        await until_then(lambda: has_ended(process))
        assert trio.current_time() - began < 1.5 * NOTICE_S
        await buried(rig, process)

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_raise_ends_the_notice(drive: Drive) -> None:
    """A lower limit right after it has a notice of its own."""

    async def test(rig: Rig) -> None:
        process = await stranger(rig, 3 * GIB)
        await rig.h.write(JOB + "gmem.limit.max", "4G")
        await trio.sleep(RETURN_S)
        rig.driver_says(process.pid, 6 * GIB)
        await until_then(lambda: rig.h.controller.is_over(SliceOn(Slice("/job"), 0)))
        await trio.sleep(0.7 * NOTICE_S)
        await rig.h.write(JOB + "gmem.limit.max", "8G")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(buried, rig, process)
            await rig.h.write(JOB + "gmem.limit.max", "4G")
        assert trio.current_time() - began >= NOTICE_S

    drive(test)


@pytest.mark.logs(OVER_HIGH, KILLED)
def test_a_write_that_kills_holds_though_the_slice_is_over_its_high(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        spared, other = await stranger(rig, 1 * GIB), await stranger(rig, 1 * GIB)
        spare(spared, monkeypatch)
        await rig.h.write(JOB + "gmem.limit.high", "2G")
        await trio.sleep(RETURN_S)
        rig.driver_says(spared.pid, 3 * GIB)
        await trio.sleep(SEEN_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(buried, rig, other)
            await rig.h.write(JOB + "gmem.limit.max", "3G")
        assert await rig.number(JOB + "gmem.limit.max") == 3 * GIB
        assert (await rig.stat(JOB + "gmem.events"))["oom_kill"] == 1

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_write_that_has_killed_holds_though_that_was_not_enough(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory.max would: the limit stays and the write returns. Another member has grown meanwhile, and the slice is
    shown to be over the limit."""

    async def test(rig: Rig) -> None:
        spared, other = await stranger(rig, 1 * GIB), await stranger(rig, 2 * GIB)
        spare(spared, monkeypatch)
        await trio.sleep(RETURN_S)

        with Lingering(monkeypatch, ending=True) as lingering:

            async def grow() -> None:
                await until_then(lambda: other.pid in lingering.sent)
                rig.driver_says(spared.pid, 5 * GIB)
                await until_then(lambda: rig.h.ledger.books(Member(spared, 0)).current == 5 * GIB)
                lingering.bury(other)
                await buried(rig, other)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(grow)
                await rig.h.write(JOB + "gmem.limit.max", "2G")
        assert await rig.number(JOB + "gmem.limit.max") == 2 * GIB
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 1

    drive(test)


@pytest.mark.logs(OVER_MAX, KILLED)
def test_a_writer_that_is_interrupted_takes_nothing_back_once_it_has_killed(
    drive: Drive, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(rig: Rig) -> None:
        process = await stranger(rig, 3 * GIB)
        await trio.sleep(RETURN_S)
        with Lingering(monkeypatch, ending=True) as lingering:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rig.h.write, JOB + "gmem.limit.max", "2G")
                await until_then(lambda: process.pid in lingering.sent)
                nursery.cancel_scope.cancel()
            assert await rig.number(JOB + "gmem.limit.max") == 2 * GIB
            lingering.bury(process)
            await buried(rig, process)

    drive(test)


def test_none_ends_for_a_write_that_reclaim_leaves_too_far_from_holding(drive: Drive) -> None:
    """A program does not move what it claimed to be movable: the end of the other would not be enough, so it lives."""

    async def test(rig: Rig) -> None:
        program, other = await rig.program(4 * GIB, "/job"), await stranger(rig, 1 * GIB)

        async def nothing(request: object) -> object:
            return request.answer(0, 0)  # type: ignore[attr-defined]

        program.obey = nothing  # type: ignore[assignment]
        await trio.sleep(RETURN_S)
        assert await rig.h.refused(JOB + "gmem.limit.max", "2G") == errno.EAGAIN
        assert await rig.h.read(JOB + "gmem.limit.max") == "max\n"
        await trio.sleep(3 * NOTICE_S)
        assert not has_ended(other)

    drive(test)


def test_a_program_alone_without_the_library_has_none(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        process = await stranger(rig, 1 * GIB)
        assert await rig.h.refused(f"{process.pid}/0/gmem.limit.max", "2G") == errno.EOPNOTSUPP

    drive(test)


# Nothing is taken from a program, or left over a limit, in silence


@pytest.mark.logs(OVER_HIGH)
def test_a_neighbour_without_the_library_does_not_empty_one_with_it(
    drive: Drive, caplog: pytest.LogCaptureFixture
) -> None:
    """The program keeps its part of the limit; the slice is shown to be over it for as long as it is."""

    async def test(rig: Rig) -> None:
        program = await rig.program(4 * GIB, "/job")
        process = await stranger(rig, 1 * GIB)
        await rig.h.write(JOB + "gmem.limit.high", "8G")
        rig.driver_says(process.pid, 20 * GIB)
        await trio.sleep(SEEN_S)
        assert await rig.number(program.file + "gmem.current") >= 4 * GIB
        assert sum(program.reclaims) <= CONTEXT, "of the 8 GiB its part is 4"
        events = await rig.stat(JOB + "gmem.events")
        assert events["over"] == 1
        assert events["fail"] >= 1
        stat = await rig.stat(JOB + "gmem.stat")
        assert stat["unmovable"] >= 20 * GIB
        await trio.sleep(5)
        assert not has_ended(process), "a high kills none"
        rig.driver_says(process.pid, 3 * GIB)
        await trio.sleep(SEEN_S)
        assert (await rig.stat(JOB + "gmem.events"))["over"] == 0

    drive(test)
    lines = [line for line in caplog.messages if "over its gmem.limit.high" in line]
    assert len(lines) == 1
    assert "ggroupfs run" in lines[0]


@pytest.mark.logs(OVER_HIGH)
def test_what_it_allocates_itself_leaves_in_its_stead(drive: Drive) -> None:
    """This is not for a neighbour's sake: a program with the library takes no slice further over its limit."""

    async def test(rig: Rig) -> None:
        program = await rig.program(1 * GIB, "/job")
        process = await stranger(rig, 3 * GIB)
        await rig.h.write(JOB + "gmem.limit.high", "5G")
        assert await program.alloc(2 * GIB) == 0
        await trio.sleep(SEEN_S)
        assert await rig.number(JOB + "gmem.current") <= 5 * GIB + CONTEXT
        assert not has_ended(process)

    drive(test)


def test_a_high_that_cannot_hold_is_refused(drive: Drive) -> None:
    async def test(rig: Rig) -> None:
        await stranger(rig, 3 * GIB)
        assert await rig.h.refused(JOB + "gmem.limit.high", "2G") == errno.EBUSY
        assert await rig.h.read(JOB + "gmem.limit.high") == "max\n"

    drive(test)
