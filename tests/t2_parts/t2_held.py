"""Memory over time in the daemon's books, against a model that adds up every microsecond."""

from __future__ import annotations

from collections import Counter
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from backend.common import clock
from backend.core.held import Held
from backend.core.member import NOTE_USEC, Taken
from backend.ledgers.soft import SoftLedger
from backend.process.identity import ROOT, Group, Member, Process, Slice, SliceOn

CAPACITY = 1 << 40
SLICES = [SliceOn(Slice(path), 0) for path in ("/", "/a", "/a/b", "/c")]
MEMBERS = [Member(Process(pid, 1), 0) for pid in (10, 11)]

ACTIONS = ("charge", "uncharge", "observe", "swap_out", "swap_in", "uncharge_swap", "move")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(ACTIONS), st.sampled_from(MEMBERS), st.integers(0, 1 << 34), st.integers(0, 10_000_000)
        ),
        max_size=20,
    )
)
def test_it_is_what_was_held_each_moment(steps: list[tuple[str, Member, int, int]]) -> None:
    """For processes and for every slice above, after any changes, at any time between two changes."""
    now = 5
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        ledger = SoftLedger()
        ledger.add_gpu(0, CAPACITY)
        for slice_ in SLICES[1:]:
            above = slice_.slice.parent
            assert above is not None
            ledger.add(slice_, SliceOn(above, 0))
        for member, slice_ in zip(MEMBERS, SLICES[2:], strict=True):
            ledger.add(member, slice_)
        groups: list[Group] = [*SLICES, *MEMBERS]
        expected: Counter[Group] = Counter()
        for action, member, amount, passes in steps:
            books = ledger.books(member)
            if action == "move":
                ledger.move(member, SLICES[amount % len(SLICES)])
            elif action in ("uncharge", "swap_out"):
                getattr(ledger, action)(member, min(amount, books.current))
            elif action in ("uncharge_swap", "swap_in"):
                getattr(ledger, action)(member, min(amount, books.swap))
            else:
                getattr(ledger, action)(member, amount)
            for group in groups:
                expected[group] += ledger.books(group).current * passes
            now += passes
            assert {group: ledger.held(group).until(now) for group in groups} == dict(expected)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 1000), st.booleans()), max_size=20))
def test_it_goes_on_over_daemons(steps: list[tuple[int, int, bool]]) -> None:
    """A daemon that is killed after a save passes everything on to the next one, the time in between included."""
    now, expected = 1000, 0
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        books, taken = Held(at_usec=now), Taken()
        kept = taken.kept()
        for nbytes, passes, dies in steps:
            was = books.nbytes
            books = books.changed(nbytes, now)
            is_news = taken.hold(books)
            assert is_news or nbytes == was
            if is_news:
                kept = taken.kept()
            now += passes
            expected += nbytes * passes
            if dies:
                books = Held(0, nbytes, now)  # reported again to the next daemon, which counts from then on
                taken = Taken.of(kept)
                taken.hold_on(books, nbytes)
            assert taken.byte_usec(books, now) == expected


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 30), st.integers(1, 3 * NOTE_USEC), st.sampled_from(("read", "dies", "ends"))),
        max_size=20,
    )
)
def test_no_daemon_says_less_than_the_one_before(steps: list[tuple[int, int, str]]) -> None:
    """At any point of a daemon's death, and whatever ends before the next one, no figure that was read was too
    large."""
    now, told = 1000, 0
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        books, taken = Held(at_usec=now), Taken()
        kept = taken.kept()
        for nbytes, passes, what in steps:
            books = books.changed(nbytes, now)
            for _ in range(4):  # a daemon saves more often than that
                now += passes // 4
                if taken.hold(books):
                    kept = taken.kept()
            books = books.changed(nbytes // 2, now)  # which is not saved
            if what != "read":
                now += passes
                left = 0 if what == "ends" else nbytes // 2
                books = Held(0, left, now)
                taken = Taken.of(kept)
                taken.hold_on(books, left)
            if taken.is_behind(books):
                taken.hold(books)
                kept = taken.kept()
            assert taken.byte_usec(books, now) >= told
            told = taken.byte_usec(books, now)


def test_one_that_says_something_and_is_killed_at_once() -> None:
    """It had extrapolated from an old saved figure, and the program ends meanwhile."""
    now = 1000
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        taken = Taken()
        taken.hold(Held().changed(7, now))
        kept = taken.kept()
        now += 10 * NOTE_USEC
        books, taken = Held(0, 7, now), Taken.of(kept)
        taken.hold_on(books, 7)
        assert taken.is_behind(books)
        taken.hold(books)
        told, kept = taken.byte_usec(books, now), taken.kept()
        assert told == 70 * NOTE_USEC
        taken = Taken.of(kept)
        taken.hold_on(Held(0, 0, now), 0)
        assert taken.byte_usec(Held(0, 0, now), now) == told


def test_one_whose_take_down_is_late_keeps_what_it_says() -> None:
    now = 1000
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        books, taken = Held().changed(7, now), Taken()
        taken.hold(books)
        now += NOTE_USEC
        assert not taken.is_behind(books)
        now += 1
        assert taken.is_behind(books)


def test_what_ended_without_a_daemon_is_not_counted_for_long() -> None:
    """The killed daemon had reported what was held at most NOTE_USEC before."""
    now = 1000
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        taken = Taken()
        taken.hold(Held().changed(7, now))
        kept = taken.kept()
        now += 1000 * NOTE_USEC
        taken = Taken.of(kept)
        taken.hold_on(Held(0, 0, now), 0)
        assert taken.byte_usec(Held(0, 0, now), now) == 7 * NOTE_USEC


def test_what_does_not_change_is_not_written_again() -> None:
    now = 1000
    with mock.patch.object(clock, "boot_usec", side_effect=lambda: now):
        books, taken = Held().changed(7, now), Taken()
        assert taken.hold(books), "never written"
        now = 2000
        taken.hold(books)
        now = 3000
        assert not taken.hold(books)
        assert taken.kept()["byte_usec"] == 14_000
        assert taken.hold(books.changed(0, now))
        assert taken.kept()["byte_usec"] == 14_000
        assert "said_held" not in taken.kept()


def test_when_counting_began_is_kept_and_an_earlier_daemon_did_not_note_it() -> None:
    with mock.patch("time.time", return_value=1234.5):
        taken = Taken()
    taken.hold(Held())
    assert Taken.of(taken.kept()).began == 1234
    assert Taken.of({"gpu_usec": 7}).began is None
    assert Taken.of({"gpu_usec": 7}).kept() == {"gpu_usec": 7}


def test_of_the_root() -> None:
    """The GPU itself counts what all processes hold."""
    ledger = SoftLedger()
    ledger.add_gpu(0, CAPACITY)
    ledger.add(MEMBERS[0], SliceOn(ROOT, 0))
    ledger.charge(MEMBERS[0], 5)
    assert ledger.held(SliceOn(ROOT, 0)).nbytes == ledger.held(MEMBERS[0]).nbytes == 5
