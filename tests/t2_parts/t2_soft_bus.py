"""The bus of the software GPU in virtual time: a direction is shared fairly, and does not slow the other."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from backend.soft.bus import Bus, Lane, Way
from backend.soft.engine import Engine
from backend.soft.runlist import US, Runlist, Tsg
from tests.support.harness import virtual

SECOND = 1_000_000 * US
RATE = 1_000_000_000
"""Bandwidth of a direction, in bytes per second."""
NEAR_S = 1e-5
"""Seconds of error allowed for a move: a few looks of the bus at its progress."""


class Stage:
    """A bus, an engine whose kernels reach over it, and the times in seconds at which things ended."""

    def __init__(self, out: int = RATE, in_: int = RATE) -> None:
        self.engine = Engine(0)
        self.engine.start()
        self.bus = Bus(out, in_, self.engine)
        self.ends: list[float] = []

    async def move(self, way: Way, nbytes: int, after: float = 0.0) -> None:
        await trio.sleep(after)
        await self.bus.move(way, nbytes)
        self.ends.append(trio.current_time())

    async def all(self, *moves: Callable[[], Awaitable[None]]) -> list[float]:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for move in moves:
                nursery.start_soon(move)
        return sorted(end - began for end in self.ends)

    def kernel(self, reach_s: float, rest_s: float = 0.0) -> Tsg:
        """Return a TSG with one kernel, which uses the bus for that long if it has all of it."""
        tsg = Tsg(100 * SECOND)
        self.engine.add(tsg, lambda finished: self.ends.append(trio.current_time()))
        tsg.launch(1, int((reach_s + rest_s) * SECOND), int(reach_s * SECOND))
        self.engine.wake()
        return tsg


@virtual
async def test_the_two_directions_take_nothing_of_each_other() -> None:
    stage = Stage(out=RATE, in_=2 * RATE)
    one = functools.partial(stage.move, Way.OUT, RATE)
    other = functools.partial(stage.move, Way.IN, 4 * RATE)
    assert await stage.all(one, other) == pytest.approx([1.0, 2.0], abs=NEAR_S)


@pytest.mark.parametrize("way", Way)
@virtual
async def test_two_in_one_direction_have_half_each(way: Way) -> None:
    stage = Stage()
    one = functools.partial(stage.move, way, RATE)
    assert await stage.all(one, one) == pytest.approx([2.0, 2.0], abs=NEAR_S)


@virtual
async def test_a_part_of_the_bus_is_what_is_there_at_each_moment() -> None:
    """The second move starts when half of the first is done, and has the bus to itself once the first has ended."""
    stage = Stage()
    one = functools.partial(stage.move, Way.OUT, RATE)
    assert await stage.all(one, functools.partial(stage.move, Way.OUT, RATE, 0.5)) == pytest.approx(
        [1.5, 2.0], abs=NEAR_S
    )


@virtual
async def test_a_move_that_is_given_up_leaves_its_part() -> None:
    stage = Stage()

    async def give_up() -> None:
        with trio.move_on_after(0.5):
            await stage.bus.move(Way.IN, 100 * RATE)

    assert await stage.all(give_up, functools.partial(stage.move, Way.IN, RATE)) == pytest.approx([1.25], abs=NEAR_S)
    assert stage.bus.moves(Way.IN) == 0


@virtual
async def test_what_is_expected_counts_those_who_are_there() -> None:
    stage = Stage()
    async with trio.open_nursery() as nursery:
        assert stage.bus.expected_usec(Way.OUT, RATE) == stage.bus.usec(Way.OUT, RATE) == 1_000_000
        nursery.start_soon(stage.move, Way.OUT, RATE)
        await trio.sleep(0.1)
        assert stage.bus.expected_usec(Way.OUT, RATE) == 2_000_000
        assert stage.bus.expected_usec(Way.IN, RATE) == stage.bus.usec(Way.OUT, RATE) == 1_000_000


@pytest.mark.parametrize(("way", "kernel_s", "move_s"), [(Way.IN, 2.0, 2.0), (Way.OUT, 1.0, 1.0)])
@virtual
async def test_a_kernel_that_reaches_over_the_bus_shares_one_direction(
    way: Way, kernel_s: float, move_s: float
) -> None:
    """The other half second of its work comes after that, and slows nothing."""
    stage = Stage()
    tsg = stage.kernel(reach_s=1.0, rest_s=0.5)
    began = trio.current_time()
    assert await stage.all(functools.partial(stage.move, way, RATE)) == pytest.approx([move_s], abs=NEAR_S)
    await trio.sleep(began + kernel_s + 0.4999 - trio.current_time())
    stage.engine.advance()
    assert (tsg.finished, tsg.reach[0]) == (0, 0)
    await trio.sleep(0.0002)
    stage.engine.advance()
    assert tsg.finished == 1


@virtual
async def test_a_kernel_that_comes_in_the_middle_of_a_move() -> None:
    """It gets half of the bus at first, and all of it once the move has ended, at 1.5 s."""
    stage = Stage()

    async def launch() -> None:
        await trio.sleep(0.5)
        stage.engine.advance()
        stage.kernel(reach_s=1.0)

    assert await stage.all(functools.partial(stage.move, Way.IN, RATE), launch) == pytest.approx([1.5], abs=NEAR_S)
    await trio.sleep(0.4999)
    stage.engine.advance()
    assert len(stage.ends) == 1
    await trio.sleep(0.0002)
    stage.engine.advance()
    assert len(stage.ends) == 2


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 100_000)), min_size=1, max_size=8))
def test_the_bus_is_never_idle_while_there_is_something_to_move(moves: list[tuple[int, int]]) -> None:
    """The last move ends when it would if they ran one after another; `moves`: milliseconds and KiB."""
    stage_ends: list[float] = []

    async def main() -> None:
        stage = Stage(out=20_000 << 10)
        stage_ends.extend(
            await stage.all(*[functools.partial(stage.move, Way.OUT, kib << 10, ms / 1000) for ms, kib in moves])
        )

    trio.run(main, clock=MockClock(autojump_threshold=0))
    at = 0.0
    for ms, kib in sorted(moves):
        at = max(at, ms / 1000) + kib / 20_000
    assert stage_ends[-1] == pytest.approx(at, abs=0.002)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 3)), max_size=20), st.integers(0, 200))
def test_how_often_it_is_woken_makes_no_difference_to_a_kernel_on_the_bus(
    steps: list[tuple[int, int]], reach: int
) -> None:
    """As long as the bus is shared with the same moves: to the nanosecond."""
    often, once = Runlist(), Runlist()
    one, other = Tsg(50), Tsg(50)
    for runlist, tsg in ((often, one), (once, other)):
        runlist.add(tsg)
        tsg.launch(2, 200, reach)
    for step, moves in steps:
        often.share(moves)
        once.share(moves)
        for _ in range(step):
            often.advance(often.now + 1)
        once.advance(once.now + step)
        assert (one.queue, one.reach, one.busy) == (other.queue, other.reach, other.busy)
        assert (one.pending, other.pending) == (sum(one.queue), sum(other.queue))
    assert often.take_reached() == once.take_reached() == 2 * reach - sum(one.reach)
    assert often.take_reached() == 0


def test_a_lane_begins_anew_when_it_is_empty() -> None:
    lane = Lane(RATE)
    lane.advance(1e6)
    first = lane.begin(RATE)
    lane.advance(1e6 + 0.25)
    assert lane.left_s(first) == pytest.approx(0.75)
    lane.advance(1e6 + 1)
    assert lane.left_s(first) == 0
    lane.end()
    lane.advance(2e6)
    assert lane.left_s(lane.begin(RATE)) == pytest.approx(1.0)
