"""Busy periods in virtual time, by the library's own rules (hold.h).

No program starves, the engine idles for a bounded time, and a hold costs at most twice what it would cost if the time
of the next request were known.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.core.turns import HOLD_MOST_US, HOLD_US
from backend.process.identity import Process
from backend.scheduler.ranks import RANKED_MOST, behind
from backend.scheduler.shares import Contender, Level
from ggroupfs.daemon.options import parse
from ggroupfs.errors import UsageError
from tests.support.bursts.rules import Allowance, compiled

SETTINGS = settings(print_blob=True, max_examples=60, deadline=None)

STEP_US = 10
"""Step of the model, microseconds."""
LOOK_US = 100
"""BURST_LOOK_US: time between two looks whether pending work has finished, microseconds."""
SWITCH_US = 200
"""Engine time of a switch to another program, microseconds."""
LEASE_US = 2_000
"""HOLD_LEASE_NS in microseconds."""
ROW_US, OPEN_US, PARTS = 100_000, 1_000, 99
"""HOLD_ROW_NS and HOLD_OPEN_NS in microseconds, and HOLD_PARTS."""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the rules."""
    return compiled(tmp_path_factory.mktemp("rules"))


@attrs.define
class Filler:
    """A program that goes behind another one: it launches while it is not held, and waits on the word."""

    rules: ctypes.CDLL
    allowance: Allowance = attrs.field(factory=Allowance)
    held: bool = False
    """Whether it was held at its last look."""

    def is_held(self, now_us: int, word: int) -> bool:
        """Return whether it is held at a time."""
        may = self.rules.rules_may(ctypes.byref(self.allowance), now_us * 1000, self.held)
        self.held = min(may, self.rules.rules_left(word, now_us * 1000)) > 0
        return self.held


@attrs.define
class Model:
    """One engine, with a program that serves requests and goes before a program that always has work."""

    rules: ctypes.CDLL
    hold_us: int
    run_ahead_us: int = 0
    """Work that the filler has queued when it is held, which runs in the next gaps."""
    idle_us: int = 0
    """Time in which nothing ran while the filler had work."""
    idle_most_us: int = 0
    """Longest such time in a row."""
    filled_us: int = 0
    """Engine time of the filler."""
    switches: int = 0
    """Number of switches from the filler to the other program."""
    late: list[int] = attrs.field(factory=list)
    """Delay of each request compared with running alone, microseconds."""

    def run(self, requests: Sequence[tuple[int, int]], until_us: int) -> None:
        """Serve requests, pairs of arrival and work in microseconds, in the order of arrival."""
        filler = Filler(self.rules)
        waiting, queue, alone = list(requests), list[list[int]](), 0
        word = look = last = ahead = 0
        busy, owner, switching, idle = False, "", 0, 0
        for now in range(0, until_us, STEP_US):
            while waiting and waiting[0][0] <= now:
                arrival, work = waiting.pop(0)
                alone = max(alone, arrival) + work
                queue.append([work, alone])
                if self.rules.rules_due(word, now * 1000):
                    word = self.rules.rules_word(now * 1000, True, 0)
                busy, look = True, now if not busy else look
            if busy and now - look >= LOOK_US:
                look, busy = now, bool(queue)
                word = self.rules.rules_word(now * 1000, busy, self.hold_us * 1000)
            if not filler.is_held(now, word):
                ahead = self.run_ahead_us + STEP_US
            if switching:
                switching -= STEP_US
            elif queue:
                if owner == "filler":
                    self.switches += 1
                    switching = SWITCH_US - STEP_US
                    owner = "leader"
                    continue
                owner = "leader"
                queue[0][0] -= STEP_US
                if queue[0][0] <= 0:
                    self.late.append(now + STEP_US - queue.pop(0)[1])
            elif ahead > 0:
                owner = "filler"
                ahead -= STEP_US
                self.filled_us += STEP_US
            else:
                self.idle_us += STEP_US
                idle = idle + STEP_US if last == now - STEP_US else STEP_US
                last = now
                self.idle_most_us = max(self.idle_most_us, idle)


LOADS = st.lists(st.tuples(st.integers(0, 3_000), st.integers(1, 40)), min_size=1, max_size=40)
"""Gaps before requests, microseconds, and the work of each, hundredths of a millisecond; some gaps are about as long as
the hold, others much longer.
"""


def requests_of(load: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the arrivals, with each gap counted from the end of all earlier requests if these ran alone, and the
    work.
    """
    found, end = [], 0
    for gap, work in load:
        arrival = end + gap // STEP_US * STEP_US
        found.append((arrival, work * 10 * STEP_US))
        end = arrival + work * 10 * STEP_US
    return found


@SETTINGS
@given(LOADS, st.sampled_from([0, 50, HOLD_US, HOLD_MOST_US]))
def test_the_engine_idles_no_longer_than_the_hold(
    rules: ctypes.CDLL, load: list[tuple[int, int]], hold_us: int
) -> None:
    """While a filler has work, the engine idles after the last request for the hold, and for one look at which its end
    is seen.
    """
    requests = requests_of(load)
    model = Model(rules, hold_us)
    end = sum(gap + work * 10 * STEP_US for gap, work in load) + 100 * SWITCH_US
    model.run(requests, end)
    assert model.idle_most_us <= hold_us + LOOK_US + STEP_US
    assert model.idle_us <= len(requests) * (hold_us + LOOK_US + STEP_US)
    assert len(model.late) == len(requests), "and each request is served"
    assert model.filled_us > 0


@SETTINGS
@given(LOADS)
def test_a_hold_costs_at_most_twice_the_best(rules: ctypes.CDLL, load: list[tuple[int, int]]) -> None:
    """This is ski rental: to idle through a gap costs its length, to let the other program in costs a switch. The best
    choice knows the gaps.
    """
    requests = requests_of(load)
    model = Model(rules, SWITCH_US)
    model.run(requests, requests[-1][0] + 10 * SWITCH_US * len(requests) + sum(work for _, work in requests))
    gaps = [gap // STEP_US * STEP_US for gap, _ in load]
    best = sum(min(gap, SWITCH_US) for gap in gaps)
    last = SWITCH_US  # no request comes after the last one
    paid = model.idle_us + SWITCH_US * model.switches
    assert paid <= 2 * (best + last) + (LOOK_US + STEP_US) * (len(gaps) + 1)


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, HOLD_US - STEP_US), st.integers(1, 40)), min_size=2, max_size=40))
def test_no_request_within_a_burst_pays_a_switch(rules: ctypes.CDLL, load: list[tuple[int, int]]) -> None:
    """A request that comes within the hold takes as long as alone, except the first."""
    requests = requests_of([(5_000, load[0][1]), *load[1:]])
    model = Model(rules, HOLD_US)
    model.run(requests, requests[-1][0] + 50_000)
    assert model.switches == 1
    assert max(model.late) <= SWITCH_US + STEP_US
    without = Model(rules, 0)
    without.run(requests, requests[-1][0] + 50_000)
    assert without.switches >= model.switches


@SETTINGS
@given(st.lists(st.tuples(st.integers(0, 12_000), st.integers(1, 400)), min_size=1, max_size=60))
def test_none_is_held_for_longer_than_it_may(rules: ctypes.CDLL, words: list[tuple[int, int]]) -> None:
    """This holds whatever others write: how far ahead a word is, microseconds, and for how many looks. It holds for one
    hold, and for the sum.
    """
    filler, now, held, row = Filler(rules), 0, 0, 0
    said = [ahead for ahead, looks in words for _ in range(looks)]
    said *= 1 + 10_000 // len(said)
    for ahead in said:
        is_held = filler.is_held(now, (now + ahead) * 1000)
        now += 50
        held, row = held + 50 * is_held, row + 50 if is_held else 0
        assert row <= ROW_US + 50
        assert held <= ROW_US + PARTS * now // (PARTS + 1) + 100
        if ahead == 0 or ahead > 10_000:
            assert not is_held, "a lie, or nothing"


def test_one_that_is_always_held_launches_for_a_hundredth(rules: ctypes.CDLL) -> None:
    filler, held = Filler(rules), []
    for now in range(0, 2_000_000, 50):
        held.append(filler.is_held(now, (now + LEASE_US) * 1000))
    opens = [now for now in range(1, len(held)) if held[now - 1] and not held[now]]
    assert all(later - first <= (ROW_US + OPEN_US) // 50 + 2 for first, later in itertools.pairwise(opens))
    assert 18 <= len(opens) <= 21, "and for no more"
    assert sum(not one for one in held) * 50 >= 18 * OPEN_US - 100


def test_one_that_dies_holds_others_for_its_lease(rules: ctypes.CDLL) -> None:
    word = rules.rules_word(5_000_000, True, 0)
    assert word == 5_000_000 + LEASE_US * 1000
    assert rules.rules_left(word, word - 1) == 1
    assert rules.rules_left(word, word) == 0


# Which programs go behind which


def contender(pid: int, *path: tuple[str, int]) -> Contender:
    """Return the contender for a process below these slices, each with its priority; the last is its own."""
    process = Process(pid, 1)
    levels = [Level(name, priority, 100) for name, priority in path[:-1]]
    return Contender(process, (*levels, Level(process, path[-1][1], 100)))


def pids(contenders: Sequence[Contender]) -> dict[int, list[int]]:
    """Return which processes go behind which, by pid."""
    return {process.pid: [one.pid for one in ahead] for process, ahead in behind(contenders).items()}


def test_worse_goes_behind_better_and_equals_do_not() -> None:
    same = [contender(1, ("", 8)), contender(2, ("", 8))]
    assert pids(same) == {}
    assert pids([*same, contender(3, ("", 9))]) == {3: [1, 2]}
    assert pids([*same, contender(3, ("", 0)), contender(4, ("", 15))]) == {1: [3], 2: [3], 4: [3, 1, 2]}


def test_priorities_are_those_of_the_level_at_which_two_part() -> None:
    """A program of a slice with a worse priority does not go before one outside, whatever its own priority is."""
    inside = [contender(1, ("batch", 9), ("", 0)), contender(2, ("batch", 9), ("", 1))]
    assert pids([*inside, contender(3, ("", 8))]) == {1: [3], 2: [3, 1]}
    assert pids([*inside, contender(3, ("web", 9), ("", 5))]) == {2: [1]}


def test_no_more_are_told_of_than_may_be() -> None:
    many = [contender(pid, ("", 1)) for pid in range(1, 1000)]
    found = behind([*many, contender(1000, ("", 2))])
    assert [len(ahead) for ahead in found.values()] == [RANKED_MOST]


@pytest.mark.parametrize(("word", "us"), [("no", None), ("0", 0), ("200us", 200), ("0.5", 500), ("1ms", 1000)])
def test_the_hold_is_an_option(word: str, us: int | None) -> None:
    assert parse(Path("/x"), "soft", "soft", [f"hold={word}"]).hold_us == us
    assert parse(Path("/x"), "soft", "soft", []).hold_us == HOLD_US


@pytest.mark.parametrize("word", ["", "2ms", "default", "-1", "yes", "1s"])
def test_what_is_no_hold(word: str) -> None:
    with pytest.raises(UsageError, match="hold"):
        parse(Path("/x"), "soft", "soft", [f"hold={word}"])
