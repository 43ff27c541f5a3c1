"""Shortage of descriptors, memory or threads: no task ends, nothing is forgotten, and everything is done afterwards."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import trio
from trio.testing import MockClock

import backend.ledgers.journal.file
from backend.common.errors import SHORT, fail
from backend.common.threads import in_a_thread
from backend.door.wire import Op
from backend.ledgers.journal import format, state
from backend.ledgers.journal.file import RETRY_S, Journal
from backend.ledgers.kernel import KernelLedger
from backend.nvidia import checkpoint
from backend.nvidia.mover import AGAIN_S, Mover
from backend.process.identity import ROOT, Process, Slice, SliceOn, identify
from ggroupfs.daemon import mount
from ggroupfs.fs.messenger import Messenger
from ggroupfs.units import files
from ggroupfs.units.policy import SHORT_S
from tests.support.fake_nvidia import patient
from tests.support.faults import Rig, drive
from tests.support.harness import MIB, Waker, settle, until, virtual
from tests.support.units import FakeManager, books, manager
from tests.support.units import policy as units

__all__ = ["manager"]  # a fixture

Spawn = Callable[..., subprocess.Popen[bytes]]


def no_thread(*_: object, **__: object) -> None:
    """Raise what Python raises where pthread_create(3) gives EAGAIN."""
    raise RuntimeError("can't start new thread")


def full(*_: object) -> None:
    """Raise the error for a process without a free descriptor."""
    raise fail(errno.EMFILE)


def short(*_: object, **__: object) -> None:
    """Raise each of the errnos in turn."""
    raise fail(next(codes))


codes = itertools.cycle(sorted(SHORT))


def high(value: int) -> state.Operation:
    """Return a change that the journal records."""
    return state.put(("GPU-a", Slice("/a")), {"high": value})


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal with some content, and a clock that stands still."""
    made = Journal(tmp_path / "one.journal", boot="this", clock=lambda: now[0])
    now = [100.0]
    made.commit(state.gpu("GPU-a"), state.add(("GPU-a", Slice("/a")), ROOT), high(1))
    made.now = now  # type: ignore[attr-defined]
    return made


def written(journal: Journal) -> state.State:
    """Return the state that a journal's file records."""
    return format.read(journal.path.read_bytes()).state


# Descriptors and memory


def test_a_journal_that_cannot_be_written_anew_is_added_to(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of descriptors says nothing about the disk: every change is recorded, and the file shrinks later."""
    monkeypatch.setattr(backend.ledgers.journal.file, "GROWN", 200)
    with mock.patch("backend.ledgers.journal.file.os.open", side_effect=short) as opened:
        for value in range(2, 100):
            journal.commit(high(value))
        assert opened.call_count == 1, "it is not tried with every change"
        journal.now[0] += RETRY_S  # type: ignore[attr-defined]
        journal.commit(high(100))
        assert opened.call_count == 2
    assert not journal.broken
    assert written(journal) == journal.state
    grown = journal.path.stat().st_size
    journal.now[0] += RETRY_S  # type: ignore[attr-defined]
    journal.commit(high(101))
    assert journal.path.stat().st_size < grown / 10
    assert written(journal) == journal.state
    journal.close()


def test_a_journal_that_ends_without_a_descriptor_says_what_it_said(journal: Journal) -> None:
    with mock.patch("backend.ledgers.journal.file.os.open", side_effect=short):
        journal.close()
    assert written(journal) == journal.state
    assert not journal.state.is_empty


@pytest.mark.logs("a daemon that is killed now forgets")
def test_but_not_of_gpus_that_end_with_it(journal: Journal) -> None:
    """They have left with their GPU: retrying would not help."""
    journal.temporary = {"GPU-b"}
    with mock.patch("backend.ledgers.journal.file.os.open", side_effect=short):
        journal.close()
    assert written(journal).is_empty


@pytest.mark.parametrize("what", ["descriptor", "thread"])
def test_the_disk_is_asked_once_there_is_a_descriptor_and_a_thread(journal: Journal, what: str) -> None:
    patch = {
        "descriptor": mock.patch("backend.ledgers.journal.file.os.dup", side_effect=short),
        "thread": mock.patch.object(trio.to_thread, "run_sync", no_thread),
    }[what]
    clock = MockClock(autojump_threshold=0.01)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            with patch, mock.patch("backend.ledgers.journal.file.os.fdatasync") as synced:
                await trio.sleep(3.5 * RETRY_S)
                journal.commit(high(7))
                await trio.sleep(RETRY_S)
                assert not synced.called
            assert not journal.broken
            assert written(journal) == journal.state
            with mock.patch("backend.ledgers.journal.file.os.fdatasync") as synced:
                await trio.sleep(2 * RETRY_S)
                assert synced.call_count == 1
            nursery.cancel_scope.cancel()

    with patient(clock, lambda: False):
        trio.run(main, clock=clock)
    journal.close()


@pytest.mark.logs("x.service: not read yet", "Too many open files: as it was before")
@virtual
async def test_limits_stay_where_their_files_cannot_be_read(
    tmp_path: Path, manager: FakeManager, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is to be read again, and cannot be: the settings of units stay and are read as soon as possible;
    ``slices.d`` counts as it was until the next reload."""
    manager.unit("/x.service", "GMemHigh=8M")
    (tmp_path / "a.conf").write_text("[/job]\nGMemHigh=16M\n")
    async with units(tmp_path, manager) as h:
        await h.arrive(spawn().pid, "/job")
        await h.arrive(spawn().pid, "/x.service")
        manager.unit("/x.service", "GMemHigh=4M")
        (tmp_path / "a.conf").write_text("[/job]\nGMemHigh=2M\n")
        for owner, name, limit in ((files, "read_regular", 8), (os, "listdir", 4)):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, full)
                manager.reload()
                await trio.sleep(3 * SHORT_S)
                assert books(h, "/job").high == 16 * MIB
                assert books(h, "/x.service").high == limit * MIB
            await trio.sleep(2 * SHORT_S)
            assert books(h, "/x.service").high == 4 * MIB
        manager.reload()
        await settle()
        assert books(h, "/job").high == 2 * MIB


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    """Neither is an unreadable file a reason to drop what others say; that one alone is reported."""
    (tmp_path / "a.conf").write_text("[/job]\nGMemHigh=2M\n")
    former = files.of_directory(tmp_path)
    assert former.assignments
    with mock.patch("ggroupfs.units.files.os.listdir", side_effect=fail(errno.EIO)):
        table = files.of_directory(tmp_path, former)
    assert table.assignments == former.assignments
    assert [str(one) for one in table.mistakes] == [f"{tmp_path}: Input/output error: as it was before"]
    with mock.patch.object(files, "read_regular", side_effect=fail(errno.EACCES)):
        table = files.of_directory(tmp_path, former)
    assert not table.assignments
    assert len(table.mistakes) == 1


@virtual
async def test_who_is_in_the_middle_of_a_move_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes processes that an earlier daemon had suspended, even if the first look failed."""
    request = checkpoint.records.Request(checkpoint.Action.SUSPEND, Process(5, 1), "GPU-0", "", MIB)
    found = [checkpoint.Left(request, checkpoint.Step.LOCK, "GPU-0", busy=False)]
    recovered: list[Process] = []

    async def recover(process: Process) -> None:
        recovered.append(process)

    monkeypatch.setattr(checkpoint, "recover", recover)
    monkeypatch.setattr(checkpoint, "left", short)
    monkeypatch.setattr("backend.nvidia.mover.log.warning", lambda *_: None)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Mover(0).run)
        await trio.sleep(3 * AGAIN_S)
        assert not recovered
        monkeypatch.setattr(checkpoint, "left", lambda: found)
        await trio.sleep(2 * AGAIN_S)
        assert recovered == [request.process]
        nursery.cancel_scope.cancel()


# Threads


@virtual
async def test_a_thread_that_cannot_be_had_is_an_error_of_the_system() -> None:
    with mock.patch.object(trio.to_thread, "run_sync", no_thread):
        with pytest.raises(BlockingIOError, match="it is not asked: can't start new thread"):
            await in_a_thread("it", lambda: 1)
        ledger = KernelLedger.__new__(KernelLedger)  # there is no module on this machine
        ledger._ids, ledger._control, ledger._limiter = {SliceOn(ROOT, 0): 1}, -1, trio.CapacityLimiter(1)
        ledger._has_reasons = True
        with pytest.raises(BlockingIOError, match="the kernel module is not asked"):
            await ledger.pull(Op.DETACH_TSG, SliceOn(ROOT, 0), 0, 1.0)
    assert await in_a_thread("it", lambda: 1) == 1
    with pytest.raises(RuntimeError, match="a bug"):
        await in_a_thread("it", lambda: exec("raise RuntimeError('a bug')"))


@pytest.mark.logs("GPU 0: no list of processes: .* NVML is not asked: can't start", "GPU 1: no list", "does not follow")
def test_a_driver_that_nobody_can_ask(spawn: Spawn) -> None:
    """Levers give EAGAIN, and leave everything as it was. No process leaves the tree; a program that comes meanwhile is
    there afterwards; the trace of context switches goes on."""

    async def test(rig: Rig) -> None:
        h, pid = rig.h, rig.pid
        await h.write(f"{pid}/1/compute.freeze", 1)
        newcomer = identify(spawn().pid)
        with mock.patch.object(trio.to_thread, "run_sync", no_thread):
            rig.fake.program(newcomer.pid, 0, start=newcomer.start)
            rig.nvml.compute[0].append((newcomer.pid, MIB))
            await trio.sleep(3)
            for name, value in (("compute.freeze", 1), ("compute.timeslice", 5)):
                assert await h.refused(f"{pid}/0/{name}", value) == errno.EAGAIN
            assert await h.refused(f"{pid}/1/compute.freeze", 0) == errno.EAGAIN
            await settle()
            assert rig.frozen() == [False, True]
            assert str(pid) in await h.listdir("/")
            assert str(newcomer.pid) not in await h.listdir("/")
        await trio.sleep(3)
        assert str(newcomer.pid) in await h.listdir("/")
        await h.write(f"{pid}/0/compute.freeze", 1)
        assert rig.frozen() == [True, True]
        for gpu in (0, 1):
            await h.write(f"{pid}/{gpu}/compute.freeze", 0)
        assert "gpu_usec " in await h.read(f"{pid}/0/gcgroup.stat")

    drive(spawn, test)


@pytest.mark.logs("no thread for messages to the kernel: can't start new thread")
@virtual
async def test_a_message_is_delivered_once_there_is_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    """A caller waits at most a second longer, and the shortage is logged once."""
    messenger, told = Messenger(), Waker()
    async with trio.open_nursery() as nursery:
        with mock.patch("ggroupfs.fs.messenger.threading.Thread.start", no_thread):
            nursery.start_soon(messenger.deliver, told.notify)
            await trio.sleep(5)
            assert not told.woken
        await trio.sleep(1)
        await until(lambda: told.woken, "it is delivered")
    messenger.end()
    assert len(caplog.records) == 1


@virtual
async def test_the_end_comes_without_a_thread() -> None:
    """SIGTERM, and the signal that hands over to another daemon, end the mount in order."""
    messenger = Messenger()
    with mock.patch.object(trio.to_thread, "run_sync", no_thread):
        await mount._say_no_more(messenger)
    assert messenger._ended
