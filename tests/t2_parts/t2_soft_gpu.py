"""Parts of the software GPU, in virtual time: the runlist shares exactly, and the pages lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.soft.pages import Memory, Store
from backend.soft.runlist import US, Runlist, Tsg

SECOND = 1_000_000 * US


def busy(timeslice_us: int, kernel_us: int = 500) -> Tsg:
    """Return a TSG with more work than any test lasts."""
    tsg = Tsg(timeslice_us * US)
    tsg.launch(100_000, kernel_us * US)
    return tsg


def run(runlist: Runlist, *tsgs: Tsg, until: int = SECOND) -> list[int]:
    """Return the engine time of each at `until`."""
    for tsg in tsgs:
        runlist.add(tsg)
    runlist.advance(until)
    return [tsg.busy for tsg in tsgs]


def test_timeslices_share_the_engine() -> None:
    one, four = run(Runlist(), busy(1000), busy(4000))
    assert four == 4 * one == 4 * SECOND // 5


def test_long_kernels_are_preempted() -> None:
    one, four = run(Runlist(), busy(1000, 50_000), busy(4000, 50_000))
    assert four == 4 * one


def test_a_switch_costs_engine_time() -> None:
    one, other = run(Runlist(switch=200 * US), busy(800), busy(800))
    assert one + other == SECOND * 8 // 10


def test_an_idle_neighbour_costs_nothing() -> None:
    assert run(Runlist(switch=200 * US), busy(1000), Tsg(1000 * US))[0] == SECOND - 200 * US


def test_a_detached_one_stands_still_and_the_rest_have_it_all() -> None:
    runlist = Runlist()
    one, other = busy(1000), busy(1000)
    run(runlist, one, other)
    one.attached, stood = False, one.busy
    runlist.advance(2 * SECOND)
    assert one.busy == stood
    assert other.busy == SECOND // 2 + SECOND


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(0, 5),
    st.lists(st.integers(0, 300), max_size=12),
)
def test_no_kernel_is_lost_and_no_time_is_made(tsgs: list[tuple[int, int, int]], switch: int, steps: list[int]) -> None:
    runlist = Runlist(switch)
    all_tsgs = []
    for timeslice, kernel, count in tsgs:
        tsg = Tsg(timeslice)
        tsg.launch(count, kernel)
        runlist.add(tsg)
        all_tsgs.append((tsg, kernel))
    for step in steps:
        runlist.advance(runlist.now + step)
        for tsg, kernel in all_tsgs:
            assert tsg.submitted == tsg.finished + len(tsg.queue)
            assert tsg.busy == tsg.submitted * kernel - sum(tsg.queue)
            assert tsg.pending == sum(tsg.queue)
        assert sum(tsg.busy for tsg, _ in all_tsgs) <= runlist.now
    runlist.advance(10**7)
    assert all(tsg.finished == tsg.submitted for tsg, _ in all_tsgs)


@given(st.lists(st.integers(0, 300), max_size=20))
def test_how_often_it_is_woken_makes_no_difference(steps: list[int]) -> None:
    often, once = Runlist(3), Runlist(3)
    pairs = [(Tsg(t), Tsg(t)) for t in (7, 20)]
    for a, b in pairs:
        a.launch(50, 11)
        b.launch(50, 11)
        often.add(a)
        once.add(b)
    for step in steps:
        often.advance(often.now + step)
    once.advance(sum(steps))
    assert [(a.busy, a.finished) for a, _ in pairs] == [(b.busy, b.finished) for _, b in pairs]


def test_it_stops_where_a_kernel_ends() -> None:
    """It reports whose kernel it was, even if that is behind a longer one that began earlier."""
    runlist = Runlist()
    long, short = Tsg(timeslice=10), Tsg(timeslice=10)
    for tsg, duration in ((long, 25), (short, 15)):
        runlist.add(tsg)
        tsg.launch(1, duration)
    assert [(runlist.advance_to_finish(100), runlist.now) for _ in range(3)] == [(short, 35), (long, 40), (None, 100)]
    short.launch(1, 15)
    assert runlist.advance_to_finish(110) is None
    assert (runlist.now, list(short.queue)) == (110, [5])


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 2), st.integers(1, 70)), min_size=1, max_size=12),
    st.integers(0, 4),
)
def test_turns_of_one_that_is_alone_pass_in_one_go(launches: list[tuple[int, int, int]], switch: int) -> None:
    """A later one gets its turn at the same time as if each instant were simulated."""
    slow, fast = Runlist(switch), Runlist(switch)
    pairs = [(Tsg(t), Tsg(t)) for t in (5, 7, 20)]
    added = set[int]()
    for wait, which, kernel in launches:
        if which not in added:  # a new one is behind the one that runs
            added.add(which)
            slow.add(pairs[which][0])
            fast.add(pairs[which][1])
        for tsg in pairs[which]:
            tsg.launch(1, kernel)
        for _ in range(wait):
            slow.advance(slow.now + 1)
        fast.advance(fast.now + wait)
        assert [(a.busy, a.queue) for a, _ in pairs] == [(b.busy, b.queue) for _, b in pairs]


class PagesMachine(RuleBasedStateMachine):
    """Pages of two processes on one GPU: every page reads what was last written to it, wherever it has been."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.slots = Store(), Store()
        self.memories = [Memory(self.frames, self.slots) for _ in range(2)]
        self.contents: list[dict[int, int]] = [{}, {}]

    @rule(who=st.integers(0, 1), count=st.integers(1, 4))
    def allocate(self, who: int, count: int) -> None:
        for number in self.memories[who].reserve(count):
            self.memories[who].place(number)
            assert number not in self.contents[who]
            self.contents[who][number] = 0

    @precondition(lambda self: any(self.contents))
    @rule(pick=st.integers(0), stamp=st.integers(0, 2**64 - 1), action=st.sampled_from(["write", "free", "fetch"]))
    def touch(self, pick: int, stamp: int, action: str) -> None:
        everywhere = [(who, number) for who in (0, 1) for number in self.contents[who]]
        who, number = everywhere[pick % len(everywhere)]
        memory = self.memories[who]
        if action == "write":
            memory.write(number, stamp)
            self.contents[who][number] = stamp
        elif action == "free":
            assert memory.free(number) in (True, False)
            del self.contents[who][number]
        elif not memory.is_resident(number):
            memory.fetch(number)
            assert memory.is_resident(number)

    @rule(who=st.integers(0, 1))
    def evict(self, who: int) -> None:
        before = self.memories[who].resident
        assert self.memories[who].evict() == (before > 0)
        assert self.memories[who].resident == max(0, before - 1)

    @invariant()
    def contents_hold(self) -> None:
        for memory, contents in zip(self.memories, self.contents, strict=True):
            assert {number: memory.read(number) for number in contents} == contents
            assert len(memory) == len(contents)
        assert len(self.frames) == sum(memory.resident for memory in self.memories)
        assert len(self.frames) + len(self.slots) == sum(map(len, self.contents))


TestPages = PagesMachine.TestCase


def test_the_clock_passes_over_what_was_touched_once() -> None:
    memory = Memory(Store(), Store())
    for number in memory.reserve(3):
        memory.place(number)
    assert memory.evict()  # clears every bit on its way, and then takes the first page
    assert [memory.is_resident(number) for number in range(3)] == [False, True, True]
    memory.read(1)
    assert memory.evict()
    assert [memory.is_resident(number) for number in range(3)] == [False, True, False]


def test_there_is_no_page_that_was_never_allocated() -> None:
    memory = Memory(Store(), Store())
    with pytest.raises(KeyError):
        memory.read(0)
