"""The moves at a turn: as few bytes as possible, never more than there is room for, and nothing that is clean."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.scheduler.memory.claims import Claim, Claims, Rates
from backend.scheduler.memory.moves import DROPS, NEVER, Share, after, free_in, out_in, plan
from tests.support.belady import Moved, belady

WITHIN = 1.05
"""Factor by which more may move than with Belady's algorithm."""
RATES = Rates(out=40, into=50)


@attrs.define
class Course:
    """A timeline of turns, each of one program, and the moves in it."""

    room: int
    claims: Claims
    timeline: Sequence[int]
    ahead: int
    """Number of chunks that can be fetched during a turn."""
    bundles: list[set[Hashable]] = attrs.field(factory=list)
    """Chunks that had to be there, at each point."""
    fetched: int = 0
    evicted: int = 0

    def run(self) -> Moved:
        """Run all turns; return the total of the moves."""
        self._move([self.timeline[0]], [], 0)
        self._needs(self.timeline[0])
        for time, (one, other) in enumerate(zip(self.timeline, self.timeline[1:], strict=False)):
            if one != other:
                self._move([other], [one], time, self.ahead)
                self._needs(one, other)
                self._move([other], [], time)
                self._needs(other)
        return Moved(self.fetched, self.evicted)

    def _move(self, wanted: Sequence[int], keeps: Sequence[int], time: int, most: int | None = None) -> None:
        rest = self.timeline[time + 1 :]
        next_use = {name: rest.index(name) for name in self.claims if name in rest}
        moves = plan(self.room, self.claims, wanted, keeps, next_use, most)
        assert not {share.name for share in moves.outs} & set(keeps)
        self.claims = after(self.claims, moves)
        assert free_in(self.room, self.claims) >= 0
        assert all(0 <= one.resident <= one.used and one.cold >= 0 for one in self.claims.values())
        self.fetched += moves.fetched
        self.evicted += moves.evicted

    def _needs(self, *names: int) -> None:
        """Note as needed the resident chunks of these programs: the first ones of several, or all of the one that has
        its turn.
        """
        assert len(names) > 1 or self.claims[names[0]].missing == 0
        self.bundles.append({(name, chunk) for name in names for chunk in range(self.claims[name].resident)})


def chunks(claims: Claims) -> set[Hashable]:
    """Return the chunks on the GPU: the first of each program, in the order of use, and those that are not used."""
    found: set[Hashable] = set()
    for name, claim in claims.items():
        found |= {(name, chunk) for chunk in range(claim.resident)}
        found |= {(name, "cold", chunk) for chunk in range(claim.cold)}
    return found


@st.composite
def courses(draw: st.DrawFn) -> Course:
    sizes = draw(st.lists(st.integers(1, 40), min_size=2, max_size=7))
    room = draw(st.integers(max(sizes), max(max(sizes), sum(sizes))))
    free, claims = room, dict[int, Claim]()
    for name, size in enumerate(sizes):
        resident = min(free, draw(st.integers(0, size)))
        claims[name] = Claim(size, resident)
        free -= resident
    claims[len(sizes)] = Claim(0, cold=min(free, draw(st.integers(0, 20))))  # a program without work
    if draw(st.booleans()):
        timeline = draw(st.lists(st.sampled_from(range(len(sizes))), min_size=2, max_size=60))
    else:  # in turn
        timeline = list(range(len(sizes))) * draw(st.integers(2, 10))
    return Course(room, claims, timeline, draw(st.sampled_from([0, 3, 10, 1000])))


@settings(max_examples=400)
@given(courses())
def test_what_moves_is_what_belady_moves(course: Course) -> None:
    """All that was there during a turn counts as needed; without fetches ahead that is the plain algorithm."""
    claims = course.claims
    moved = course.run()
    best = belady(course.room, chunks(claims), course.bundles)
    assert moved.both <= WITHIN * best.both


@pytest.mark.parametrize("percent", [150, 200, 300])
def test_what_comes_ahead_of_all_takes_no_more_than_each_turn_needs(percent: int) -> None:
    """Four programs in turn: all memory of each moves, as that of the one before had to be there, too."""
    size, turns = 136, 40
    room = 4 * size * 100 // percent
    course = Course(room, {name: Claim(size) for name in range(4)}, list(range(4)) * (turns // 4), 1000)
    moved = course.run()
    best = belady(room, (), course.bundles)
    assert moved == best
    lazy = Course(room, {name: Claim(size) for name in range(4)}, list(range(4)) * (turns // 4), 0)
    assert lazy.run().both < moved.both, "what comes when nothing runs moves less, and is waited for"


def test_what_no_turn_uses_goes_first_and_then_what_comes_last() -> None:
    claims = {"a": Claim(10, 10), "b": Claim(10, 0, cold=2), "c": Claim(10, 10, cold=3), "d": Claim(10, 8)}
    found = plan(33, claims, ["b"], ["a"], {"c": 20, "d": 10, "b": 5})
    assert found.outs == [Share("c", 8, 8), Share("b", 2, 2)]
    assert found.ins == [Share("b", 10)]
    found = plan(33, claims, ["b"], ["a"], {"c": 10, "d": 20, "b": 5})
    assert found.outs == [Share("c", 3, 3), Share("b", 2, 2), Share("d", 5, 5)]
    found = plan(33, claims, ["b"], ["a"], {"d": 10, "b": 5})
    assert found.outs == [Share("c", 8, 8), Share("b", 2, 2)], "one without a turn goes before all others"


def test_nothing_is_written_that_the_host_has() -> None:
    claims = {"a": Claim(10, 10, unwritten=7), "b": Claim(10)}
    found = plan(10, claims, ["b"], [], {"a": 1})
    assert found.outs == [Share("a", 10, 3)]
    assert (found.evicted, found.written, found.fetched) == (10, 3, 10)
    assert found.usec(RATES) == 200_000, "what comes takes longer than what is written"
    assert after(claims, found)["a"] == Claim(10, 0)
    assert plan(10, {"a": Claim(10, 10, unwritten=12), "b": Claim(10)}, ["b"], [], {}).written == 0
    found = plan(10, claims, ["b"], [], {"a": 1}, most_written=1)
    assert (found.evicted, found.written, found.fetched) == (8, 1, 8)


def test_a_piece_of_what_is_not_written_is_bounded_too() -> None:
    """Memory that comes meanwhile waits for the end of the piece, and so does the next plan."""
    rates, usec, gib = Rates(30 * 10**9, 30 * 10**9), 5000, 1 << 30
    assert out_in(Share("a", 8 * gib, 8 * gib), rates, usec) == rates.out_in(usec)
    assert out_in(Share("a", 8 * gib, 0), rates, usec) == DROPS * usec // 10**6
    half = Share("a", 8 * gib, 8 * gib - DROPS * usec // 2 // 10**6)
    assert out_in(half, rates, usec) == (DROPS + rates.out) * usec // 2 // 10**6


def test_what_may_not_leave_stays() -> None:
    claims = {"a": Claim(10, 10, leaves=4), "b": Claim(10)}
    found = plan(10, claims, ["b"], [], {"a": 1})
    assert (found.evicted, found.fetched) == (4, 4)
    assert after(claims, found)["a"].leaves == 0
    assert not plan(10, after(claims, found), ["b"], [], {"a": 1})


def test_what_stays_is_asked_of_none() -> None:
    """Contexts: of a program that has nothing else outside its working set it would be that which goes, also of the
    one that is to come."""
    claims = {
        "a": Claim(10, 10, cold=2, leaves=10),
        "b": Claim(10, 4, cold=2, leaves=4),
        "c": Claim(10, 0, cold=2, leaves=0),
        "d": Claim(10, 3, cold=3, leaves=4),
    }
    room = sum(one.held for one in claims.values())
    found = plan(room, claims, ["b"], ["a"], {"d": 20, "c": 10, "b": 5})
    assert found.outs == [Share("d", 4, 4)]
    left = after(claims, found)
    assert left["d"] == Claim(10, 0, cold=2, leaves=0)
    found = plan(room, left, ["b"], ["a"], {"d": 20, "c": 10, "b": 5})
    assert not found.outs, "nothing is left that could go"
    assert not found.ins


def test_a_room_that_shrank_is_given_back() -> None:
    claims = {"a": Claim(10, 10), "b": Claim(10, 5)}
    assert plan(12, claims, [], ["a"], {"b": 1}).outs == [Share("b", 3, 3)]
    assert not plan(12, claims, ["b"], ["a"], {"b": 1}), "one that is wanted gives nothing"


@given(st.integers(1, 6), st.integers(), st.booleans())
def test_with_room_for_all_nothing_goes(count: int, seed: int, is_kept: bool) -> None:
    chance = random.Random(seed)
    claims = {name: Claim(used := chance.randint(0, 50), chance.randint(0, used)) for name in range(count)}
    room = sum(one.used + one.cold for one in claims.values())
    found = plan(room, claims, [0], list(range(1, count)) if is_kept else [], {name: NEVER for name in claims})
    assert not found.outs
    assert found.fetched == claims[0].missing
    assert not plan(room, after(claims, found), [0], [], {})
