"""What goes back on the runlist when a daemon is killed: how it is noted, and how it is put back.

The notes are read as the guard reads them, from the shared memory, and acted on against a driver in memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from backend import choose
from backend.choose import Choice
from backend.core.reasons import ON, Engines, Off, Reason
from backend.core.records import Capability
from backend.ledgers.journal.file import Journal
from backend.nvidia import device, release, rm, waiting
from backend.nvidia.gpu import BACK
from backend.nvidia.proven import GR_ALONE
from backend.nvidia.release import OwnFiles, put_back
from backend.nvidia.waiting import CHANNELS, FIRST_SLOTS, HEADER, SLOT, Batch, Waiter, Waiting, noted
from backend.process.identity import Process, Slice, identify
from backend.space.space import Space
from tests.support.fake_nvidia import FakeSystem, Program
from tests.support.killed import noted_in
from tests.support.nvidia_rig import Rig, drive, running

TURN = Off(Reason.TURN)
ME = Process(7, 700)


@pytest.fixture
def shared() -> Iterator[Waiting]:
    """Notes of a daemon."""
    found = Waiting()
    yield found
    found.close()


def back(shared: Waiting) -> list[tuple[Process, Batch]]:
    """Return what goes back if the daemon is killed now."""
    return list(noted(noted_in(shared)))


def batch(channels: int = 3, fd: int = 9) -> Batch:
    return Batch(fd, 0xC1D00019, 0x5C000002, tuple(range(0x5C000010, 0x5C000010 + channels)))


def waiter(shared: Waiting, *batches: Batch, process: Process = ME) -> Waiter:
    """Return the notes of a process that waits for its turn."""
    found = Waiter(shared, process)
    found.decide(True)
    found.note(batches)
    return found


# How it is noted


def test_what_waits_goes_back_until_it_runs(shared: Waiting) -> None:
    one, other = waiter(shared, batch(1), batch(CHANNELS)), waiter(shared, batch(2, fd=0), process=Process(8, 1 << 40))
    assert back(shared) == [(ME, batch(1)), (ME, batch(CHANNELS)), (Process(8, 1 << 40), batch(2, fd=0))]
    one.clear()
    assert back(shared) == [(Process(8, 1 << 40), batch(2, fd=0))]
    other.clear()
    assert not back(shared)


def test_what_is_frozen_does_not_go_back_until_it_is_thawed(shared: Waiting) -> None:
    """Whatever is noted in between."""
    found = waiter(shared, batch(1), batch(2))
    found.decide(False)
    assert not back(shared)
    found.note([batch(4)])
    assert not back(shared)
    found.decide(True)
    assert back(shared) == [(ME, batch(4))]


def test_nothing_goes_back_of_which_nothing_was_decided(shared: Waiting) -> None:
    Waiter(shared, ME).note([batch()])
    assert not back(shared)


def test_more_than_there_is_room_for(shared: Waiting) -> None:
    """The memory grows, and keeps what is in it."""
    many = [waiter(shared, batch(), process=Process(pid, pid)) for pid in range(1, 2 * FIRST_SLOTS + 2)]
    assert sorted(process.pid for process, _ in back(shared)) == [*range(1, len(many) + 1)]
    for one in many[1:]:
        one.clear()
    waiter(shared, batch(5))
    assert set(back(shared)) == {(Process(1, 1), batch()), (ME, batch(5))}
    assert len(noted_in(shared)) == len(HEADER) + 4 * FIRST_SLOTS * SLOT


@pytest.mark.logs("some programs that wait stand still if the daemon is killed: no room: No space left on device")
def test_a_memory_that_cannot_grow(shared: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    """What was noted before stays noted, the log says of the rest, once, and the lever moves."""
    found = waiter(shared, *[batch()] * FIRST_SLOTS)
    no_room = mock.patch.object(os, "ftruncate", side_effect=OSError(28, "No space left on device"))
    with no_room:
        for _ in range(3):
            found.note([batch(4)])
            waiter(shared, batch(), process=Process(8, 800))
    assert back(shared) == [(ME, batch())] * FIRST_SLOTS
    assert len(caplog.records) == 1
    found.note([batch(4)] * FIRST_SLOTS)
    assert back(shared) == [(ME, batch(4))] * FIRST_SLOTS
    found.note([batch(5)])
    assert back(shared) == [(ME, batch(5))]
    with no_room:
        found.note([batch()] * 4 * FIRST_SLOTS)
    assert len(caplog.records) == 2, "it had grown meanwhile"


@pytest.mark.logs("programs that wait stand still if the daemon is killed: no memory: Too many open files")
def test_no_memory_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says so, and the daemon serves all the same."""

    async def test(rig: Rig) -> None:
        monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=OSError(24, "Too many open files")))
        assert choose.backend(Choice(ledger="soft"), rig.gpus, 1.0).waiting is None
        assert [gpu.waiting for gpu in rig.gpus] == [None, None]

    drive(test)


def test_a_daemon_that_is_killed_as_it_notes(shared: Waiting) -> None:
    """At each write to the memory: what is noted is whole, and nothing that is off is missing at any moment."""
    found = waiter(shared, batch(2))
    seen = []

    class Watched:
        """Words that look at the memory after each write."""

        def __init__(self, layout: struct.Struct) -> None:
            self._layout = layout
            self.unpack_from = layout.unpack_from

        def pack_into(self, *words: Any) -> None:
            self._layout.pack_into(*words)
            seen.append(back(shared))

    with mock.patch.multiple(waiting, WORD=Watched(waiting.WORD), BATCH=Watched(waiting.BATCH)):
        found.note([batch(2), batch(3)])
    assert len(seen) == 7
    assert all(set(each) <= {(ME, batch(2)), (ME, batch(3))} and (ME, batch(2)) in each for each in seen), seen
    assert set(back(shared)) == {(ME, batch(2)), (ME, batch(3))}


@pytest.mark.parametrize("count", [0, CHANNELS + 1, 0xFFFFFFFF])
def test_a_slot_that_makes_no_sense_is_skipped(shared: Waiting, count: int) -> None:
    waiter(shared, batch(1), batch(2))
    memory = bytearray(noted_in(shared))
    waiting.WORD.pack_into(memory, len(HEADER), count)
    assert list(noted(bytes(memory))) == [(ME, batch(2))]
    assert list(noted(bytes(memory)[: len(HEADER) + SLOT + SLOT // 2])) == [], "the second is cut off"


def test_notes_of_another_layout_are_skipped(shared: Waiting) -> None:
    """As of a daemon whose installed version was replaced while it ran."""
    waiter(shared, batch())
    assert not list(noted(b"ggroupfs waiting 2\n" + noted_in(shared)[19:]))
    assert not list(noted(b""))


BATCHES = st.lists(st.builds(batch, st.integers(1, CHANNELS), st.integers(0, (1 << 31) - 1)), max_size=4)
STEPS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.booleans(), BATCHES, st.none())), max_size=30)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_any_steps(steps: list[tuple[int, bool | list[Batch] | None]]) -> None:
    """What goes back is what was noted last of each process of which that was decided."""
    shared = Waiting()
    try:
        waiters = [Waiter(shared, Process(pid, pid)) for pid in range(4)]
        goes, notes = [False] * 4, [list[Batch]() for _ in range(4)]
        for which, step in steps:
            match step:
                case bool():
                    waiters[which].decide(step)
                    goes[which] = step
                case None:
                    waiters[which].clear()
                    notes[which] = []
                case _:
                    waiters[which].note(step)
                    notes[which] = step
            found = Counter((process.pid, one) for process, one in back(shared))
            assert found == Counter((pid, one) for pid in range(4) if goes[pid] for one in notes[pid])
    finally:
        shared.close()


# How it is put back


def off(fake: FakeSystem, program: Program, *channels: int) -> Batch:
    """Take channels of a program off the runlist, by default all; return them as they are noted."""
    channels = channels or tuple(program.channels())
    for channel in channels:
        program.objects[channel].disabled += 1
    subdevice = next(handle for handle, one in program.objects.items() if one.class_ == rm.CLASS_SUBDEVICE)
    return Batch(program.ctl, program.client, subdevice, channels)


def test_programs_are_put_back(shared: Waiting) -> None:
    """Each in a call, and nothing of theirs is kept."""
    fake = FakeSystem()
    programs = [fake.program(pid, 0) for pid in (5, 6, 7)]
    for program in programs[:2]:
        waiter(shared, off(fake, program), process=program.identity)
    off(fake, programs[2])
    assert put_back(noted_in(shared), fake) == (2, 2)
    assert [set(program.running()) for program in programs] == [{True}, {True}, {False}]
    assert fake.disables == [(False, 20)] * 2
    assert not fake.open


def test_a_program_that_is_gone_and_another_with_its_pid(shared: Waiting) -> None:
    fake = FakeSystem()
    program = fake.program(5, 0, start=100)
    found = off(fake, program)
    waiter(shared, found, process=Process(5, 99))
    waiter(shared, found, process=Process(6, 100))
    assert put_back(noted_in(shared), fake) == (0, 2)
    assert not any(program.running())
    assert not fake.disables
    assert not fake.open


def test_channels_that_were_freed(shared: Waiting) -> None:
    """And handles that are something else by now: the others are put back."""
    fake = FakeSystem()
    program = fake.program(5, 0)
    waiter(shared, off(fake, program), process=program.identity)
    first, second, *others = program.channels()
    del program.objects[first]
    program.objects[second].class_ = 0x3E
    assert put_back(noted_in(shared), fake) == (1, 1)
    assert all(program.objects[channel].disabled == 0 for channel in others)
    assert fake.disables == [(False, len(others))]


def test_a_channel_that_is_freed_as_it_is_put_back(shared: Waiting) -> None:
    fake = FakeSystem()
    program = fake.program(5, 0)
    waiter(shared, off(fake, program), process=program.identity)
    first, *others = program.channels()

    def free(cmd: int) -> None:
        if cmd == rm.FIFO_DISABLE_CHANNELS:
            program.objects.pop(first, None)

    fake.before = free
    assert put_back(noted_in(shared), fake) == (1, 1)
    assert all(program.objects[channel].disabled == 0 for channel in others)


def test_one_that_fails_keeps_no_other(shared: Waiting) -> None:
    """Neither another request for the same program, nor another program."""
    fake = FakeSystem()
    one, other = fake.program(5, 0), fake.program(6, 0)
    first, second = one.channels()[:8], one.channels()[8:]
    bad = off(fake, one, *first)
    waiter(shared, bad, off(fake, one, *second), attrs.evolve(bad, fd=77), process=one.identity)
    waiter(shared, off(fake, other), process=other.identity)
    refused: list[int] = []

    def refuse(cmd: int, client: int, _handle: int) -> int:
        if (cmd, client) == (rm.FIFO_DISABLE_CHANNELS, one.client) and not refused:
            refused.append(client)
            return rm.Status.INVALID_STATE
        return 0

    fake.refuse = refuse
    assert put_back(noted_in(shared), fake) == (1, 2)
    assert one.running() == [False] * 8 + [True] * 12
    assert all(other.running())


def test_one_that_hangs_keeps_no_other(shared: Waiting) -> None:
    """Its thread is left alone."""
    fake, go_on = FakeSystem(), threading.Event()
    one, other = fake.program(5, 0), fake.program(6, 0)
    for program in (one, other):
        waiter(shared, off(fake, program), process=program.identity)
    look, ran = fake.look, threading.Event()

    def hangs(pid: int, fds: list[int]) -> object:
        if pid == one.pid:
            go_on.wait()
            ran.set()
        return look(pid, fds)

    fake.look = hangs  # type: ignore[assignment, method-assign]
    try:
        assert put_back(noted_in(shared), fake, seconds=3.0) == (1, 2)
        assert all(other.running())
    finally:
        go_on.set()
        assert ran.wait(10)


def test_many_that_hang_keep_no_other(shared: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are threads at first: more are made."""
    monkeypatch.setattr(release, "THREADS", 2)
    fake, go_on = FakeSystem(), threading.Event()
    programs = [fake.program(pid, 0) for pid in range(5, 15)]
    for program in programs:
        waiter(shared, off(fake, program), process=program.identity)
    look, held = fake.look, threading.Semaphore(0)

    def hangs(pid: int, fds: list[int]) -> object:
        if pid < 12:
            go_on.wait()
            held.release()
        return look(pid, fds)

    fake.look = hangs  # type: ignore[assignment, method-assign]
    try:
        assert put_back(noted_in(shared), fake, seconds=5.0) == (3, 10)
        assert all(all(program.running()) for program in programs[7:])
    finally:
        go_on.set()
        assert all(held.acquire(timeout=10) for _ in range(7))


@pytest.mark.parametrize("most", [0, 1, 4])
def test_threads_that_cannot_be_made(shared: Waiting, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """As with a limit of tasks: those that run do it all, or the caller."""
    fake, start, left = FakeSystem(), threading.Thread.start, [None] * most
    programs = [fake.program(pid, 0) for pid in range(5, 15)]
    for program in programs:
        waiter(shared, off(fake, program), process=program.identity)

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert put_back(noted_in(shared), fake) == (10, 10)
    assert all(all(program.running()) for program in programs)
    assert not left


def test_the_files_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its descriptors only those of the device are had, also where one became another file after the look."""
    monkeypatch.setattr(device, "CONTROL_NUMBER", os.makedev(1, 3))
    files, me = OwnFiles(), identify(os.getpid())
    with open(os.devnull, "r+b", buffering=0) as right, open("/dev/zero", "r+b", buffering=0) as wrong:
        with rm.borrowed(files, me, [right.fileno(), wrong.fileno()]) as controls:
            assert [*controls] == [right.fileno()]
        pidfd = files.pidfd_open(me.pid)
        with pytest.raises(OSError, match="Bad file descriptor"):
            files.pidfd_getfd(pidfd, wrong.fileno())
        files.close(pidfd)
        with pytest.raises(ProcessLookupError), rm.borrowed(files, Process(me.pid, me.start + 1), [right.fileno()]):
            pass


@contextlib.contextmanager
def child() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a process that sleeps, and its pidfd."""
    with subprocess.Popen(["sleep", "600"]) as process:
        pidfd = os.pidfd_open(process.pid)
        try:
            yield process, pidfd
        finally:
            process.kill()
            os.close(pidfd)


def test_the_system_log_says_how_many_go_on(shared: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real calls, for a process that has no file of the driver; without a log nothing is said."""
    with child() as (daemon, pidfd), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        daemon.kill()
        waiter(shared, batch(), process=identify(os.getpid()))
        monkeypatch.setattr(release, "SYSLOG", os.fspath(tmp_path / "log"))
        release.main(shared.fileno(), pidfd)
        log.bind(os.fspath(tmp_path / "log"))
        release.main(shared.fileno(), pidfd)
        found = log.recv(1000, socket.MSG_DONTWAIT).decode()
        assert found.startswith("<28>ggroupfs[")
        assert found.endswith(
            "the daemon was killed: of the programs that waited for their turn 0 go on, 1 could not be reached"
        )


def test_a_daemon_that_is_held_up_in_a_request(shared: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes off yet, after all was put back, is put back when it has ended."""
    seen = []
    with child() as (daemon, pidfd):

        def put_back(memory: object, files: object, seconds: float, has_next: object) -> tuple[int, int]:
            assert 0 < seconds <= release.RELEASE_S
            seen.append(daemon.poll())
            daemon.kill()
            daemon.wait()
            return 1, 1

        monkeypatch.setattr(release, "put_back", put_back)
        release.main(shared.fileno(), pidfd)
        assert seen == [None, -9]
        release.main(shared.fileno(), pidfd)
        assert seen == [None, -9, -9], "once is enough of one that has ended"


@pytest.mark.parametrize("readback", [True, False])
def test_the_next_daemon_freezes_what_held_up_the_guard(shared: Waiting, tmp_path: Path, readback: bool) -> None:
    """Once that goes on, the guard leaves it alone."""
    path = tmp_path / "one.journal"

    async def test(rig: Rig) -> None:
        gpu, program, held, go_on = rig.gpus[0], rig.busy(5, 0), threading.Event(), threading.Event()
        program.start -= 1000
        waiter(shared, off(rig.fake, program), process=program.identity)
        look = rig.fake.look

        def hangs(pid: int, fds: list[int]) -> object:
            if not held.is_set():
                held.set()
                go_on.wait()
            return look(pid, fds)

        rig.fake.look = hangs  # type: ignore[assignment, method-assign]
        asked, found = partial(release.is_taken, os.fspath(path)), list[tuple[int, int]]()
        assert not asked(), "there is no journal"
        guard = threading.Thread(target=lambda: found.append(put_back(noted_in(shared), rig.fake, 30.0, asked)))
        guard.start()
        assert held.wait(10)
        journal = Journal(path, boot="b")
        try:
            async with running(rig):
                await trio.sleep(1)
                gpu.note_reasons(program.identity, Off(Reason.FREEZE))
                await gpu.detach(program.identity)
                go_on.set()
                guard.join()
                assert set(program.running()) == {False}
                assert found == [(0, 1)]
        finally:
            go_on.set()
            journal.close(ended=False)
        assert not asked(), "the daemon has ended"

    def prepare(fake: FakeSystem, _nvml: object) -> None:
        fake.readback = readback

    drive(test, prepare)


def test_a_journal_that_the_killed_daemon_still_has(
    shared: Waiting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as a thread of it is held up, no other daemon can have it. Afterwards the log names the next daemon."""
    monkeypatch.setattr(release, "SYSLOG", os.fspath(tmp_path / "log"))
    waiter(shared, batch())
    journal, seen = Journal(tmp_path / "one.journal", boot="b"), list[bool]()

    def put_back(_memory: object, _files: object, _seconds: float, has_next: Callable[[], bool]) -> tuple[int, int]:
        seen.append(has_next())
        daemon.kill()
        daemon.wait()
        return 0, 1

    monkeypatch.setattr(release, "put_back", put_back)
    with child() as (daemon, pidfd), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(os.fspath(tmp_path / "log"))
        release.main(shared.fileno(), pidfd, os.fspath(journal.path))
        assert seen == [False, True]
        assert log.recv(1000, socket.MSG_DONTWAIT).endswith(b" 0 go on, 1 are left to the next daemon")
    journal.close(ended=False)


def test_one_end_for_all(shared: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is held up, and programs that hold up each call for it, take no longer than a program alone."""
    now, waits = [100.0], list[float]()

    def takes_all(_memory: object, _files: object, seconds: float, _has_next: object) -> tuple[int, int]:
        waits.append(seconds)
        now[0] += seconds
        return 0, 1

    def ends(_daemon: int, seconds: float) -> bool:
        now[0] += max(0.0, seconds)
        return bool(waits)  # after all was put back once

    monkeypatch.setattr(release, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(release, "put_back", takes_all)
    monkeypatch.setattr(release, "_ends", ends)
    monkeypatch.setattr(release, "_say", lambda text: None)
    release.main(shared.fileno(), -1)
    assert len(waits) == 2
    assert min(waits) > 0
    assert now[0] - 100.0 <= release.RELEASE_S + 1e-6


# What a GPU notes


def on(rig: Rig, shared: Waiting, program: Program, off: Off) -> None:
    """Say why a program is off, as the Follower does."""
    rig.gpus[0].waiting = shared
    rig.gpus[0].note_reasons(program.identity, off)


@pytest.mark.parametrize("engines", [Engines.GR, Engines.ALL])
def test_a_program_is_noted_before_it_goes_off(shared: Waiting, engines: Engines) -> None:
    """And until after it is on again: at each call that changes something, exactly its channels are noted."""

    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.fake.program(5, 0)
        gpu._capabilities = {GR_ALONE: Capability.ENFORCED}
        seen: list[int] = []

        def look(cmd: int) -> None:
            if cmd == rm.FIFO_DISABLE_CHANNELS:
                seen.append(sum(len(one.channels) for _, one in back(shared)))

        rig.fake.before = look
        on(rig, shared, program, TURN)
        await gpu.detach(program.identity, engines)
        count = 8 if engines is Engines.GR else 20
        assert seen == [count]
        assert sum(len(one.channels) for _, one in back(shared)) == count
        await gpu.attach(program.identity)
        assert seen == [count] * 2
        assert not back(shared)

    drive(test)


def test_a_freeze_outlives_the_daemon_and_a_turn_does_not(shared: Waiting) -> None:
    """A program is frozen and thawed while it waits, which moves no lever."""

    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.fake.program(5, 0)
        on(rig, shared, program, TURN)
        await gpu.detach(program.identity)
        on(rig, shared, program, TURN.with_(Reason.FREEZE))
        assert put_back(noted_in(shared), rig.fake) == (0, 0)
        assert not any(program.running())
        on(rig, shared, program, TURN)
        assert put_back(noted_in(shared), rig.fake) == (1, 1)
        assert all(program.running())

    drive(test)


@pytest.mark.parametrize("reason", [Reason.QUOTA, Reason.BUSY, Reason.GANG, Reason.FREEZE, Reason.MIGRATION])
def test_each_reason(shared: Waiting, reason: Reason) -> None:
    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.fake.program(5, 0)
        on(rig, shared, program, Off(reason))
        await gpu.detach(program.identity)
        assert bool(back(shared)) == (reason not in (Reason.FREEZE, Reason.MIGRATION))
        on(rig, shared, program, ON)
        await gpu.attach(program.identity)
        assert not back(shared)

    drive(test)


def test_programs_that_run_beside_each_other(shared: Waiting) -> None:
    """A channel of any of them that is off stops all: one that may run already, while the others wait, goes back with
    them."""

    async def test(rig: Rig) -> None:
        gpu, programs = rig.gpus[0], [rig.busy(pid, 0) for pid in (5, 6)]
        gpu.waiting = shared
        rig.bookkeeper.spaces = {one.identity: Space(Slice("/jobs"), 1000, 7) for one in programs}
        rig.bookkeeper.thawed = {one.identity for one in programs}
        rig.nvml.clients[0] = [5, 6]
        async with running(rig):
            await trio.sleep(1)
            for program, reason in zip(programs, (Reason.FREEZE, Reason.TURN), strict=True):
                on(rig, shared, program, Off(reason))
                await gpu.detach(program.identity)
            await gpu.attach(programs[0].identity)
            on(rig, shared, programs[0], ON)
            assert [set(program.running()) for program in programs] == [{False}, {False}]
            assert put_back(noted_in(shared), rig.fake) == (2, 2)
            assert [set(program.running()) for program in programs] == [{True}, {True}]

    drive(test)


def test_a_context_that_is_made_while_it_waits(shared: Waiting) -> None:
    """Its channels are noted with the others."""

    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.fake.program(5, 0)
        on(rig, shared, program, TURN)
        await gpu.detach(program.identity)
        program.context()
        await gpu.detach(program.identity)
        assert not any(program.running())
        assert put_back(noted_in(shared), rig.fake) == (1, 1)
        assert program.running() == [True] * 40

    drive(test)


def test_a_lever_that_fails_leaves_it_noted(shared: Waiting) -> None:
    """It is not known which of its channels are off."""

    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.fake.program(5, 0)
        on(rig, shared, program, TURN)
        await gpu.detach(program.identity)
        rig.fake.refuse = lambda cmd, client, handle: (
            rm.Status.INVALID_STATE if cmd == rm.FIFO_DISABLE_CHANNELS else rm.Status.OK
        )
        with pytest.raises(OSError, match="INVALID_STATE"):
            await gpu.attach(program.identity)
        assert [len(one.channels) for _, one in back(shared)] == [20]

    drive(test)


def test_a_program_that_ends_or_is_on_two_gpus(shared: Waiting) -> None:
    """Each GPU notes its own, and forgets it with the process."""

    async def test(rig: Rig) -> None:
        program = rig.fake.program(5, 0, 1)
        for gpu in rig.gpus:
            gpu.waiting = shared
            gpu.note_reasons(program.identity, TURN)
            await gpu.detach(program.identity)
        assert [len(one.channels) for _, one in back(shared)] == [20, 20]
        rig.gpus[0].forget(program.identity)
        assert [len(one.channels) for _, one in back(shared)] == [20]
        rig.gpus[1].forget(program.identity)
        assert not back(shared)

    drive(test)


@pytest.mark.logs("GPU 0 is lost", "GPU 0 is back")
@pytest.mark.parametrize("readback", [True, False])
def test_a_gpu_that_is_lost(shared: Waiting, readback: bool) -> None:
    """The guard makes no requests of it; once it is back, what is off is noted with the first lever."""

    async def test(rig: Rig) -> None:
        gpu, program = rig.gpus[0], rig.busy(5, 0)
        gpu.waiting = shared
        async with running(rig):
            await trio.sleep(1)
            on(rig, shared, program, TURN)
            await gpu.detach(program.identity)
            assert [len(one.channels) for _, one in back(shared)] == [20]
            rig.nvml.error = rig.nvml.NVML_ERROR_GPU_IS_LOST
            await trio.sleep(1)
            assert gpu.lost
            assert not back(shared)
            rig.nvml.error = 0
            await trio.sleep(BACK + 1)
            assert not gpu.lost
            await gpu.detach(program.identity)
            assert not any(program.running())
            assert put_back(noted_in(shared), rig.fake) == (1, 1)
            assert all(program.running())

    def prepare(fake: FakeSystem, _nvml: object) -> None:
        fake.readback = readback

    drive(test, prepare)
