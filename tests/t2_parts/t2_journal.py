"""The journal: whatever became of the file, it is read as a state that was true at some moment, never wrongly."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from unittest import mock

import attrs
import pytest
import trio
import trio.lowlevel
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import invariant

import backend.ledgers.journal.file
from backend.core.protocols import Ledger
from backend.core.reasons import FROZEN, Engines
from backend.core.records import Books, Move, Wanted
from backend.core.settings import TIMESLICE
from backend.ledgers.journal import format, state
from backend.ledgers.journal.file import RETRY_S, STALE_MODE, Busy, Journal, default_path
from backend.ledgers.journal.ledger import SOON_S, JournaledLedger
from backend.ledgers.journal.levers import JournaledGpu, Timeslices
from backend.ledgers.journal.moves import WrittenMoves
from backend.ledgers.journal.state import FIELDS, Entry, Lever, Owned, State
from backend.process.identity import ROOT, Member, Process, Slice, SliceOn, identify
from ggroupfs.commands import doctor
from tests.support.fake_nvidia import patient
from tests.support.harness import Spawn, StubGpu, refuses, settle, virtual
from tests.support.journaled import BOOT, MEMORY, histories, let_go, quick, signed
from tests.support.ledger_machine import CAPACITIES, LedgerMachine
from tests.support.strategies import history

NAMES = {index: f"GPU-{index}" for index in CAPACITIES}


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ggroup-journal-", dir=MEMORY) as folder:
        yield Path(folder) / "one.journal"


def kept(books: Books) -> dict[str, int]:
    """Return the fields of a group that a journal must have."""
    fresh = Books()
    return {name: getattr(books, name) for name in FIELDS if getattr(books, name) != getattr(fresh, name)}


# A ledger with a journal


class Machine(LedgerMachine):
    """The histories of every ledger, on one with a journal: the file always agrees with the books."""

    def make_ledger(self) -> Ledger:
        self.path = Path(tempfile.mkdtemp(prefix="ggroup-journal-", dir=MEMORY)) / "one.journal"
        self.journal = Journal(self.path, boot=BOOT)
        return JournaledLedger(self.journal, NAMES)

    @invariant()
    def the_journal_agrees(self) -> None:
        if self.journal._later:  # reasons to be off the runlist come with the next write
            assert {one[0] for one in self.journal._later} <= {"reasons", "put"}
            self.journal.commit()
        found = format.read(self.path.read_bytes())
        assert found.state == self.journal.state
        there = {(NAMES[group.gpu], group.node): above for group, above in self.naive.above.items()}
        assert found.state.groups.keys() == there.keys()
        for group, above in self.naive.above.items():
            entry = found.state.groups[NAMES[group.gpu], group.node]
            assert entry.above == (above.node if above is not None else None)
            assert entry.fields == kept(self.naive.books(group)), group

    def teardown(self) -> None:
        super().teardown()
        self.journal.close()
        with mock.patch("backend.ledgers.journal.file.gone", return_value=frozenset()):
            again = Journal(self.path, boot=BOOT)
        ledger = JournaledLedger(again, NAMES)
        for index, capacity in CAPACITIES.items() if self.naive.above else ():
            ledger.add_gpu(index, capacity)
        for group, above in self.naive.above.items():
            before = self.naive.books(group)
            assert ledger.parent(group) == above
            assert attrs.asdict(ledger.books(group)) == attrs.asdict(before) | {
                **{"current": 0, "swap": 0},
                **{"peak": before.peak_ever, "swap_peak": before.swap_peak_ever},  # no reset is left
            }, group
        order = [one.group for one in ledger.inherited()]
        assert all(
            one.parent.node == ROOT or order.index(one.parent) < order.index(one.group) for one in ledger.inherited()
        )
        let_go(again)
        self.path.unlink()
        self.path.parent.rmdir()


MachineTest = Machine.TestCase
MachineTest.settings = history(60, 30)


def test_figures_are_written_before_they_are_read_and_soon(path: Path) -> None:
    """A charge writes nothing by itself, since thousands of pages move at a time."""
    journal = Journal(path, boot=BOOT)
    ledger = JournaledLedger(journal, NAMES)
    ledger.add_gpu(0, 100)
    who = Member(Process(os.getpid(), 1), 0)
    ledger.add(who, SliceOn(ROOT, 0))

    def peak() -> int:
        return format.read(path.read_bytes()).state.groups[NAMES[0], who.node].fields.get("peak", 0)

    ledger.charge(who, 7)
    assert peak() == 0
    assert ledger.books(who).peak == 7
    assert peak() == 7

    async def later() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ledger.run)
            ledger.charge(who, 1)
            await trio.sleep(SOON_S + 0.01)
            assert peak() == 8
            before = journal._size
            ledger.uncharge(who, 8)
            await trio.sleep(1)
            assert journal._size == before, "what is held is nobody's business after us"
            nursery.cancel_scope.cancel()

    trio.run(later, clock=trio.testing.MockClock(autojump_threshold=0))
    let_go(journal)


# Damaged files


def written(lines: list[list[state.Operation]]) -> tuple[bytes, list[tuple[int, State]]]:
    """Return a journal of those lines, and for each length the state that was true then."""
    now = State()
    data, checksum = format.begin(BOOT, now)
    truths = [(0, State()), (len(data), State())]
    for line in lines:
        text, checksum = format.line(line, checksum)
        data += text
        for one in line:
            now.apply(one)
        truths.append((len(data), copy.deepcopy(now)))
    return data, truths


@given(histories())
@quick
def test_cut_off_anywhere_it_says_what_was_true_then(lines: list[list[state.Operation]]) -> None:
    """At every byte: lines that are whole count, and no others."""
    data, truths = written(lines)
    for cut in range(len(data) + 1):
        last = [truth for size, truth in truths if size <= cut][-1]
        assert format.read(data[:cut]).state == last, cut
    assert format.read(data).end == len(data)


@given(histories(), st.binary(max_size=200))
@quick
def test_what_is_behind_the_end_does_not_count(lines: list[list[state.Operation]], garbage: bytes) -> None:
    data, truths = written(lines)
    assert format.read(data + garbage).state == truths[-1][1]


@given(histories(), st.data())
@quick
def test_damaged_anywhere_it_says_what_was_true_at_some_moment(lines: list[list[state.Operation]], data: Any) -> None:
    """Bytes that are changed, missing or duplicated: the file is refused, or read up to there."""
    text, truths = written(lines)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    what = data.draw(st.one_of(st.binary(max_size=20), st.just(text[start:end] * 2), st.just(b"")))
    try:
        found = format.read(text[:start] + what + text[end:])
    except (format.NotOurs, format.Refused):
        return
    assert found.state in [truth for _, truth in truths]


@given(histories())
@quick
def test_what_makes_a_state_makes_it_again(lines: list[list[state.Operation]]) -> None:
    """A rewritten journal says the same, on one line."""
    _, truths = written(lines)
    text, _ = format.begin(BOOT, truths[-1][1])
    assert text.count(b"\n") == 2
    assert format.read(text).state == truths[-1][1]


# The file


def a_journal(path: Path, *, boot: str = BOOT) -> Journal:
    """Return a journal with some content."""
    journal = Journal(path, boot=boot)
    journal.commit(
        state.gpu("GPU-a"), state.add(("GPU-a", Slice("/a")), ROOT), state.put(("GPU-a", Slice("/a")), {"high": 5})
    )
    return journal


def says(journal: Journal) -> int | None:
    """Return the limit that a journal knows, if any."""
    entry = journal.state.groups.get(("GPU-a", Slice("/a")))
    return entry.fields.get("high") if entry is not None else None


def test_it_is_root_s_alone_and_one_daemon_s(path: Path) -> None:
    journal = a_journal(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Busy, match="another daemon"):
        Journal(path, boot=BOOT)
    let_go(journal)
    again = Journal(path, boot=BOOT)
    assert says(again) == 5
    with pytest.raises(Busy):
        Journal(path, boot=BOOT)
    let_go(again)


def test_whoever_waited_for_one_that_was_replaced_begins_again(path: Path) -> None:
    """The file that the waiter opened has no name any more when its lock is granted: its content does not count."""
    journal = a_journal(path)
    real, once = os.open, []

    def opened(name: Any, *args: Any, **words: Any) -> int:
        fd = real(name, *args, **words)
        if name == path.name and not once:
            once.append(fd)
            journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
            journal._write_anew()
            let_go(journal)
        return fd

    with mock.patch("backend.ledgers.journal.file.os.open", opened):
        again = Journal(path, boot=BOOT)
    assert once
    assert says(again) == 6
    let_go(again)


@pytest.mark.parametrize("what", ["link", "mode", "folder", "owner"])
def test_what_is_not_ours_alone_is_not_taken(path: Path, what: str) -> None:
    if what == "link":
        path.symlink_to(path.with_name("elsewhere"))
    elif what == "folder":
        path.mkdir()
    else:
        path.touch(0o600)
        path.chmod(0o644) if what == "mode" else os.chown(path, 1000, 1000)
    with pytest.raises(OSError):  # noqa: PT011 - ELOOP, EISDIR or EPERM
        Journal(path, boot=BOOT)
    assert not path.with_name("elsewhere").exists()


def test_another_file_is_left_alone(path: Path) -> None:
    path.write_text("root:x:0:0\n")
    path.chmod(0o600)
    with pytest.raises(OSError, match="no journal"):
        Journal(path, boot=BOOT)
    assert path.read_text() == "root:x:0:0\n"


@pytest.mark.logs("version 2, and this program knows 1")
def test_another_version_is_put_aside_and_not_obeyed(path: Path) -> None:
    journal = a_journal(path)
    let_go(journal)
    data = path.read_bytes().replace(b"journal 1 ", b"journal 2 ")
    path.write_bytes(data)
    again = Journal(path, boot=BOOT)
    assert again.state == State()
    assert path.with_name("one.journal.refused").read_bytes() == data
    let_go(again)


@pytest.mark.logs("unknown operation")
def test_what_this_program_does_not_know_is_not_obeyed_in_part(path: Path) -> None:
    path.write_bytes(signed([b'[["gpu","GPU-a"]]', b'[["explode"]]']))
    path.chmod(0o600)
    journal = Journal(path, boot=BOOT)
    assert journal.state == State()
    let_go(journal)


def test_another_boot_is_ignored(path: Path) -> None:
    let_go(a_journal(path, boot="before"))
    journal = Journal(path, boot="after")
    assert journal.state == State()
    assert format.read(path.read_bytes()).boot == "after"
    let_go(journal)


@pytest.mark.logs("damaged from byte")
def test_a_line_that_is_damaged_is_told(path: Path) -> None:
    journal = a_journal(path)
    size = path.stat().st_size
    journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
    let_go(journal)
    with path.open("r+b") as file:
        file.seek(size + 12)
        file.write(b"#")
    again = Journal(path, boot=BOOT)
    assert says(again) == 5
    let_go(again)


def test_a_write_that_was_cut_off_is_not_worth_a_word(path: Path) -> None:
    let_go(a_journal(path))
    with path.open("ab") as file:
        file.write(b"0123abcd [[")
    path.with_name("one.journal.new").write_text("of one that died on the way")
    again = Journal(path, boot=BOOT)
    assert says(again) == 5
    assert os.listdir(path.parent) == [path.name]
    let_go(again)


def test_the_dead_are_dropped(path: Path, spawn: Spawn) -> None:
    """A new process with such a pid inherits nothing."""
    journal = a_journal(path)
    living = identify(spawn().pid)
    recycled = attrs.evolve(living, start=living.start - 1)
    for process in (living, recycled):
        key = ("GPU-a", process)
        journal.commit(state.add(key, Slice("/a")), state.lever(key, Lever(True)), state.give(process, "", Owned(5)))
        journal.commit(state.give(key, "compute.freeze", Owned(5)), state.own(key, {"1:2": 3}))
    let_go(journal)
    again = Journal(path, boot=BOOT)
    found = again.state
    assert {node for _, node in found.groups} == {ROOT, Slice("/a"), living}
    assert found.levers == {("GPU-a", living): Lever(True)}
    assert found.given.keys() == {living, ("GPU-a", living)}
    assert found.own.keys() == {("GPU-a", living)}
    let_go(again)


def test_it_does_not_grow_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.ledgers.journal.file, "GROWN", 1 << 16)
    journal = a_journal(path)
    most = 0
    for high in range(3000):
        journal.commit(state.put(("GPU-a", Slice("/a")), {"high": high + 10}))
        most = max(most, path.stat().st_size)
    assert most < 80_000
    let_go(journal)
    again = Journal(path, boot=BOOT)
    assert says(again) == 3009
    let_go(again)


@pytest.mark.parametrize("meanwhile", ["changes", "fails", "is replaced"])
def test_a_large_one_is_written_anew_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """The event loop runs between pieces. A change made meanwhile is in the new file, as it was in the old one at each
    moment. If the new file could not be written, or another rewrite came first, the old one is not replaced."""
    monkeypatch.setattr("backend.ledgers.journal.file.GROWN", 0)
    monkeypatch.setattr("backend.ledgers.journal.file.AT_ONCE", 100)
    monkeypatch.setattr("backend.ledgers.journal.file.RETRY_S", 0.01)
    monkeypatch.setattr("backend.ledgers.journal.format.PIECE", 8)
    journal = a_journal(path)
    groups = [("GPU-a", Slice(f"/a/{number}")) for number in range(400)]
    journal._runs = True  # otherwise it would be rewritten at once
    journal.commit(*(state.add(key, Slice("/a")) for key in groups))
    for key in groups:
        journal.commit(state.put(key, {"high": 1}))
    before, turns = path.stat().st_ino, 0
    real = journal._take_its_place

    def last(fd: int, checksum: int) -> None:
        assert format.read(path.read_bytes()).state == journal.state, "until then it is as it was, and whole"
        if meanwhile != "changes":
            raise OSError(errno.EIO, "cannot be renamed")
        real(fd, checksum)

    async def main() -> None:
        nonlocal turns
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            while journal._tail is None:
                await trio.lowlevel.checkpoint()
            while journal._tail is not None:
                turns += 1
                number = turns % len(groups)
                journal.commit(state.put(groups[number], {"high": turns}))
                journal.commit(state.give(groups[number][1], "", Owned(turns, None, None, None)))
                if meanwhile == "is replaced" and turns == 10:
                    with monkeypatch.context() as patch:
                        patch.setattr(journal, "_take_its_place", real)
                        journal._write_anew()
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    with mock.patch.object(journal, "_take_its_place", last):
        trio.run(main)
    assert turns > (50 if meanwhile != "is replaced" else 8)
    assert (path.stat().st_ino == before) == (meanwhile == "fails")
    assert os.listdir(path.parent) == [path.name]
    assert not journal.broken
    journal.commit(state.put(groups[0], {"high": 77}))
    assert format.read(path.read_bytes()).state == journal.state
    let_go(journal)


def test_a_clean_end_leaves_what_was_asked_of_gpus_that_stay(path: Path) -> None:
    """Like a cgroup, which survives an unmount of its filesystem; a GPU that ends with its daemon leaves nothing."""
    journal = a_journal(path)
    journal.close()
    again = Journal(path, boot=BOOT)
    assert says(again) == 5
    again.commit(state.give("root", "", Owned(None, None, 0o700)))
    again.temporary = {"GPU-a"}
    again.close(ended=False)
    third = Journal(path, boot=BOOT)
    assert says(third) == 5
    third.temporary = {"GPU-a"}
    third.close()
    assert os.listdir(path.parent) == []


def test_its_name_tells_places_apart() -> None:
    folder = Path("/run/ggroupfs")
    places = [
        "/run/ggroup",
        "/run-ggroup",
        "/run/ggroup2",
        "/",
        "/a%2Fb",
        "/a/b",
        "/" + "x" * 300,
        "/" + "x" * 301,
        "/\udcff",
    ]
    found = [default_path(folder, place) for place in places]
    assert len(set(found)) == len(places)
    assert all(one.parent == folder and len(os.fsencode(one.name)) < 256 for one in found)


# Failing disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 128 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", place], check=True)
    yield place
    subprocess.run(["umount", place], check=True)


def fill(file: IO[bytes]) -> None:
    """Fill a file until not a byte of room is left."""
    with contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


@pytest.mark.logs("No space left on device: a daemon that is killed now forgets", "is kept again")
def test_a_full_disk(small_disk: Path) -> None:
    """New settings hold all the same; the old content stays, marked as out of date; with room, writing resumes."""
    now = [0.0]
    path = small_disk / "one.journal"
    journal = Journal(path, boot=BOOT, clock=lambda: now[0])
    kept: list[bool] = []
    journal.listener = kept.append
    ledger = JournaledLedger(journal, NAMES)
    ledger.add_gpu(0, 100)
    who = SliceOn(Slice("/a"), 0)
    ledger.add(who, SliceOn(ROOT, 0))
    ledger.configure(who, high=5)
    with (small_disk / "else").open("wb", buffering=0) as other:
        fill(other)
        while not journal.broken:
            ledger.configure(who, high=ledger.books(who).high + 1)
        last = ledger.books(who).high
        assert format.read(path.read_bytes()).state.groups[NAMES[0], who.node].fields == {"high": last - 1}
        assert (stat.S_IMODE(path.stat().st_mode), kept) == (STALE_MODE, [False])
        assert [(one.subject, one.verdict) for one in doctor.journals(small_disk)] == [(os.fspath(path), "advisory")]
        fill(other)
        now[0] += RETRY_S
        ledger.configure(who, high=last + 1)
        assert journal.broken
        assert ledger.books(who).high == last + 1
        assert sorted(os.listdir(small_disk)) == ["else", path.name]
        other.truncate(0)
    now[0] += RETRY_S
    ledger.configure(who, high=7)
    assert not journal.broken
    assert format.read(path.read_bytes()).state.groups[NAMES[0], who.node].fields == {"high": 7}
    assert (stat.S_IMODE(path.stat().st_mode), kept) == (0o600, [False, True])
    assert not list(doctor.journals(small_disk))
    let_go(journal)


@pytest.mark.logs("Input/output error: a daemon that is killed now forgets", "is kept again")
@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_a_disk_that_fails(path: Path, call: str) -> None:
    """The write fails at once, or a moment later when the data is to reach the disk."""
    now = [0.0]
    journal = a_journal(path)
    journal._clock = lambda: now[0]
    failing = mock.patch(
        f"backend.ledgers.journal.file.os.{call}", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))
    )
    with failing:
        journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
        journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 7}))
        if call == "fdatasync":
            journal.sync()
    stays = 7 if call == "fdatasync" else 5  # the page cache has it, whatever the disk reports
    assert format.read(path.read_bytes()).state.groups["GPU-a", Slice("/a")].fields == {"high": stays}
    assert stat.S_IMODE(path.stat().st_mode) == STALE_MODE
    now[0] += RETRY_S
    journal.commit()
    assert format.read(path.read_bytes()).state == journal.state
    assert says(journal) == 7
    let_go(journal)


@pytest.mark.logs("forgets", "is kept again")
def test_what_was_written_is_on_the_disk_within_a_second(path: Path) -> None:
    """The disk is synced only then; data that could not be written is retried, even if nothing changes."""
    journal = a_journal(path)
    calls: list[int] = []
    real = os.fdatasync

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(journal.run)
            await trio.sleep(1.5)
            assert len(calls) == 1
            await trio.sleep(5)
            assert len(calls) == 1, "nothing changed"
            with mock.patch("backend.ledgers.journal.file.os.write", side_effect=OSError(errno.ENOSPC, "no")):
                journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
            assert journal.broken
            journal._clock = lambda: journal._tried + RETRY_S
            await trio.sleep(1.5)
            assert not journal.broken
            nursery.cancel_scope.cancel()

    def counted(fd: int) -> None:
        calls.append(fd)
        real(fd)

    clock = trio.testing.MockClock(autojump_threshold=0.01)
    with mock.patch("backend.ledgers.journal.file.os.fdatasync", counted), patient(clock, lambda: False):
        trio.run(main, clock=clock)
    assert format.read(path.read_bytes()).state == journal.state
    let_go(journal)


@pytest.mark.logs("No space left on device: a daemon that is killed now forgets", "out of date since", "is kept again")
def test_the_next_one_goes_on_from_the_last_whole_one(small_disk: Path, spawn: Spawn) -> None:
    """The daemon is killed while the disk is full: old settings hold, the log says that more was set, and processes
    that may be off the runlist are in doubt. With room, writing resumes and the file is up to date again."""
    now = [0.0]
    path = small_disk / "one.journal"
    first, who = a_journal(path), identify(spawn().pid)
    first.commit(state.add(("GPU-a", who), Slice("/a")), state.lever(("GPU-a", who), state.Lever(True, 0)))
    with (small_disk / "else").open("wb", buffering=0) as other:
        fill(other)
        high = 5
        while not first.broken:
            high += 1
            first.commit(state.put(("GPU-a", Slice("/a")), {"high": high}))
        first.commit(state.put(("GPU-a", Slice("/a")), {"high": 1}))
        let_go(first)  # killed
        fill(other)
        second = Journal(path, boot=BOOT, clock=lambda: now[0])
        assert second.broken
        assert second.stale_since is not None
        assert says(second) == high - 1
        assert second.state.levers["GPU-a", who] == state.Lever(True, 0, moving=True)
        let_go(second)
        third = Journal(path, boot=BOOT, clock=lambda: now[0])
        assert says(third) == high - 1, "however often"
        other.truncate(0)
    now[0] += RETRY_S
    third.commit()
    let_go(third)
    last = Journal(path, boot=BOOT)
    assert (says(last), last.stale_since, last.broken) == (high - 1, None, False)
    let_go(last)


@pytest.mark.logs("forgets", "stays out of date")
def test_a_clean_end_leaves_what_cannot_be_written_as_it_was(path: Path) -> None:
    """Except for GPUs that end with the daemon, whose settings are over."""
    for temporary in (False, True):
        path.unlink(missing_ok=True)
        journal = a_journal(path)
        if temporary:
            journal.temporary = {"GPU-a"}
            journal.commit(state.gpu("GPU-b"), state.add(("GPU-b", Slice("/b")), ROOT))
        with mock.patch("backend.ledgers.journal.file.os.write", side_effect=OSError(errno.ENOSPC, "full")):
            journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
            journal.close()
        found = format.read(path.read_bytes()).state
        assert (("GPU-a", Slice("/a")) in found.groups) is not temporary


@pytest.mark.logs("forgets", "out of date, and cannot be removed")
def test_a_disk_that_takes_nothing_at_all(path: Path) -> None:
    """Since nothing can be done about it, the log says that the file is false then."""
    journal = a_journal(path)
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    names = ("write", "ftruncate", "unlink")
    with mock.patch.multiple(
        "backend.ledgers.journal.file.os", **{name: mock.Mock(side_effect=error) for name in names}
    ):
        journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
    let_go(journal)


@pytest.mark.logs("forgets")
def test_a_short_write_is_gone_on_with_and_half_a_line_does_not_stay(path: Path) -> None:
    journal = a_journal(path)
    real, room = os.write, [3, 5, 10_000]

    def some(fd: int, data: memoryview) -> int:
        return real(fd, data[: room.pop(0)])

    with mock.patch("backend.ledgers.journal.file.os.write", some):
        journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 6}))
    assert format.read(path.read_bytes()).state == journal.state

    def full(fd: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[:20])

    before = path.read_bytes()
    with mock.patch("backend.ledgers.journal.file.os.write", full):
        journal.commit(state.put(("GPU-a", Slice("/a")), {"high": 7}))
    assert path.read_bytes() == before
    let_go(journal)


@pytest.mark.logs("forgets")
def test_a_daemon_starts_where_nothing_can_be_written(path: Path) -> None:
    let_go(a_journal(path))
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("backend.ledgers.journal.file.os.write", side_effect=error):
        journal = Journal(path, boot=BOOT)
    assert says(journal) == 5, "it goes on with what it has read"
    assert os.listdir(path.parent) == [path.name]
    let_go(journal)


# Levers


def noted_by(path: Path, spawn: Spawn) -> tuple[Journal, StubGpu, JournaledGpu, Process]:
    """Return a journal, a GPU, the same GPU with its levers noted in the journal, and a process in its books."""
    journal, inner, who = Journal(path, boot=BOOT), StubGpu(), identify(spawn().pid)
    journal.commit(state.gpu(inner.info.uuid), state.add((inner.info.uuid, who), ROOT))
    return journal, inner, JournaledGpu(inner, journal), who


@virtual
async def test_a_lever_is_noted_before_it_moves_and_when_it_holds(path: Path, spawn: Spawn) -> None:
    journal, inner, gpu, who = noted_by(path, spawn)
    key = inner.info.uuid, who

    def noted() -> Lever | None:
        return format.read(path.read_bytes()).state.levers.get(key)

    seen: list[Lever | None] = []

    async def look() -> None:
        seen.append(noted())

    inner.script("detach", look)
    await gpu.detach(who)
    assert (seen, noted()) == ([Lever(False, 0, True)], Lever(True))
    await gpu.set_lever(TIMESLICE, who, 500)
    assert noted() == Lever(True, 500)
    inner.script("attach", refuses(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        await gpu.attach(who)
    assert noted() == Lever(True, 500, True), "nobody knows"
    await gpu.attach(who)
    await gpu.set_lever(TIMESLICE, who, 0)
    assert noted() is None
    await settle()
    let_go(journal)


@virtual
async def test_the_engines_that_are_off_are_noted(path: Path, spawn: Spawn) -> None:
    """GR alone is distinct from all engines; 0.1 reads from it that nothing is off, and asks the hardware."""
    journal, inner, gpu, who = noted_by(path, spawn)
    key = inner.info.uuid, who

    def noted() -> Lever:
        return format.read(path.read_bytes()).state.levers.get(key, Lever())

    await gpu.detach(who, Engines.GR)
    assert noted() == Lever(gr=True)
    assert inner.without_gr == {who}
    await gpu.detach(who)
    assert noted() == Lever(True)
    inner.script("detach", refuses(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        await gpu.detach(who, Engines.GR)
    assert noted() == Lever(True, moving=True)
    await gpu.detach(who, Engines.GR)
    assert noted() == Lever(gr=True)
    await gpu.attach(who)
    assert noted() == Lever()
    await settle()
    let_go(journal)


@virtual
async def test_a_lever_that_returns_too_late_is_not_noted(path: Path, spawn: Spawn) -> None:
    """Of a process that went meanwhile nothing is noted, as nothing would ever remove it."""
    journal, inner, gpu, who = noted_by(path, spawn)
    key = inner.info.uuid, who

    async def goes() -> None:
        journal.commit(state.remove(key))

    for lever in ("set_timeslice", "detach", "attach"):
        inner.script(lever, goes)
        await (gpu.set_lever(TIMESLICE, who, 500) if lever == "set_timeslice" else getattr(gpu, lever)(who))
        assert not journal.state.levers
        journal.commit(state.add(key, ROOT))
    journal.commit(state.remove(key))
    assert journal.state == State({(inner.info.uuid, ROOT): Entry(None)})
    await settle()
    let_go(journal)


def test_what_tsgs_had_of_their_own(path: Path) -> None:
    journal = Journal(path, boot=BOOT)
    notes, who = Timeslices(journal, "GPU-a"), identify(os.getpid())
    notes.note(who, {"c1d00019:5c000003": 777})
    let_go(journal)
    again = Journal(path, boot=BOOT)
    notes = Timeslices(again, "GPU-a")
    assert notes.known(who) == {"c1d00019:5c000003": 777}
    assert Timeslices(again, "GPU-b").known(who) == {}
    notes.note(who, {})
    assert again.state.is_empty
    let_go(again)


def test_who_is_on_the_way(path: Path, spawn: Spawn) -> None:
    """By index here and by UUID in the file; GPUs that are not served, and dead processes, are left out."""
    journal, living, child = Journal(path, boot=BOOT), identify(os.getpid()), spawn()
    dead = identify(child.pid)
    moves = WrittenMoves(journal, {0: "GPU-a", 1: "GPU-b"})
    for process in (living, dead):
        moves.begin(process, Move(0, 1, {"high": 5, "frozen": True}))
        journal.commit(state.gpu("GPU-a"), state.add(("GPU-a", process), ROOT))
    let_go(journal)
    child.kill()
    child.wait()
    again = Journal(path, boot=BOOT)
    found = WrittenMoves(again, {3: "GPU-b", 0: "GPU-c", 1: "GPU-a"}).left()
    assert found == {living: Move(1, 3, {"high": 5, "frozen": True})}
    assert WrittenMoves(again, {0: "GPU-a"}).left() == {}
    assert not again.state.is_empty
    again.state.forget_gpu("GPU-b")
    assert again.state.moves == {}
    moves = WrittenMoves(again, {0: "GPU-a", 1: "GPU-b"})
    moves.begin(living, Move(1, 0, None))
    moves.end(living)
    size = path.stat().st_size
    moves.end(living)
    assert (moves.left(), path.stat().st_size) == ({}, size)
    let_go(again)


@pytest.mark.parametrize(
    "wrong",
    [
        ["moving", "/a", "GPU-a", "GPU-b", None],
        ["moving", [5, 7], "GPU-a", "GPU-a", None],
        ["moving", [5, 7], "GPU-a", "GPU-b", {"current": 1}],
        ["moving", [5, 7], "GPU-a", "GPU-b", {"priority": 16}],
        ["moved", "/a"],
    ],
)
def test_a_move_that_makes_no_sense(wrong: list[Any]) -> None:
    with pytest.raises(state.Nonsense):
        State().apply(wrong)


def test_what_a_ledger_inherits(path: Path) -> None:
    """What held and what is in doubt; only for processes."""
    journal, who = a_journal(path), identify(os.getpid())
    key = "GPU-a", who
    journal.commit(state.add(key, Slice("/a")), state.lever(key, Lever(True, 500, True)))
    let_go(journal)
    again = Journal(path, boot=BOOT)
    ledger = JournaledLedger(again, {3: "GPU-a"})
    ledger.add_gpu(3, 100)
    slice_, process = ledger.inherited()
    ledger.set_reasons(process.group, 1, 2)
    assert (slice_.group, slice_.parent, slice_.applied) == (
        SliceOn(Slice("/a"), 3),
        SliceOn(ROOT, 3),
        Wanted(),
    )
    assert (process.group, process.parent) == (Member(who, 3), slice_.group)
    assert (process.applied, process.doubtful) == (Wanted(FROZEN, 500), True)
    assert ledger.books(SliceOn(ROOT, 3)).high == 100
    again.commit()  # the reasons come with the next write
    let_go(again)
    after = JournaledLedger(third := Journal(path, boot=BOOT), {3: "GPU-a"})
    after.add_gpu(3, 100)
    assert (after.books(process.group).off_all, after.books(process.group).off_gr) == (1, 2), "why it is off"
    let_go(third)
