"""What of a plan moves at a time, and what is learnt of the bus by that, in virtual time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import pytest
import trio

from backend.scheduler.memory.claims import Name, Rates
from backend.scheduler.memory.moves import Moves, Share, Way
from backend.scheduler.memory.pieces import (
    AGAIN_S,
    FASTER,
    HALVES_S,
    LATES,
    LEAST,
    MOST,
    PIECE_IN_US,
    PIECE_MOST_IN_US,
    PIECE_MOST_US,
    PIECE_US,
    Pieces,
)
from backend.scheduler.memory.planner import Plan, Planner
from tests.support.harness import virtual

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 64 * MIB
RATE = 40 * 10**9


@attrs.define
class Bus:
    """Hands that move whole chunks, at a rate."""

    rate: float = RATE
    asked: list[tuple[Way, Name, int]] = attrs.field(factory=list)
    refuses: bool = False
    little: int | None = None
    """Bytes that move of each piece, whatever was asked for."""

    def chunk(self, gpu: int) -> int:
        return CHUNK

    async def _move(self, way: Way, name: Name, nbytes: int) -> int:
        self.asked.append((way, name, nbytes))
        moved = 0 if self.refuses else nbytes - nbytes % CHUNK if way is Way.IN else -(-nbytes // CHUNK) * CHUNK
        moved = moved if self.little is None else self.little
        await trio.sleep(moved / self.rate)
        return moved

    async def evict(self, gpu: int, name: Name, nbytes: int) -> int:
        return await self._move(Way.OUT, name, nbytes)

    async def fetch(self, gpu: int, name: Name, nbytes: int) -> int:
        return await self._move(Way.IN, name, nbytes)


@contextlib.asynccontextmanager
async def moving(bus: Bus) -> AsyncIterator[Pieces]:
    """What moves by those hands."""
    async with trio.open_nursery() as nursery:
        pieces = Pieces(bus, Rates(RATE, RATE))  # type: ignore[arg-type]
        pieces.nursery = nursery
        yield pieces


async def move(pieces: Pieces, plan: Plan, planner: Planner) -> bool:
    """A piece each way."""
    moved = await pieces.move(plan, planner)
    await pieces.rest()
    return moved


def planned(free: int, nbytes: int = GIB, goes: bool = True, seconds: float = 0.5, names: str = "AB") -> Plan:
    """So much of B comes, into so much room, as A goes."""
    outs = [Share(names[0], nbytes, nbytes)] if goes else []
    moves = Moves(outs, [Share(names[1], nbytes)], free)
    ends_us = round((trio.current_time() + seconds) * 1e6)
    return Plan((frozenset("A"), frozenset("B")), moves={0: moves}, ends_us=ends_us)


@virtual
async def test_what_comes_is_a_chunk_at_least_and_waits_for_room() -> None:
    bus, planner = Bus(), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        assert await move(pieces, planned(CHUNK - 1), planner)
        assert [way for way, _, _ in bus.asked] == [Way.OUT]
        bus.asked.clear()
        assert await move(pieces, planned(CHUNK), planner)
        assert (Way.IN, "B", CHUNK) in bus.asked
        slow = Planner(Rates(10**9, 10**9))
        bus.asked.clear()
        assert await move(pieces, planned(GIB), slow)
        assert all(nbytes >= CHUNK for _, _, nbytes in bus.asked)
        bus.asked.clear()
        assert await move(pieces, planned(MIB, goes=False), planner), "where nothing goes smaller chunks may fit"
        assert not pieces.still.isdisjoint({(0, "B", Way.IN)})


@virtual
async def test_pieces_grow_with_the_phase() -> None:
    bus, planner = Bus(), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        for _ in range(6):
            await move(pieces, planned(16 * GIB, 16 * GIB), planner)
        comes, goes = (
            [nbytes * 1e6 / RATE for way, _, nbytes in bus.asked if way is which] for which in (Way.IN, Way.OUT)
        )
        assert abs(comes[0] - PIECE_IN_US) < PIECE_US
        assert 3 * comes[0] < comes[1] <= comes[-1] <= 1.1 * PIECE_MOST_IN_US, "there is room for it"
        assert abs(goes[0] - PIECE_US) < PIECE_US
        assert 4 * goes[0] < goes[-1] <= 1.1 * PIECE_MOST_US
        pieces.begin()
        bus.asked.clear()
        await move(pieces, planned(16 * GIB, 16 * GIB), planner)
        assert max(nbytes for way, _, nbytes in bus.asked if way is Way.OUT) <= 2 * RATE * PIECE_US / 1e6
        assert max(nbytes for way, _, nbytes in bus.asked if way is Way.IN) <= 2 * RATE * PIECE_IN_US / 1e6


@virtual
async def test_what_was_given_up_teaches_nothing_of_the_bus() -> None:
    """The next piece tells what came of it, and has taken less time."""
    bus, planner = Bus(), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        for _ in range(5):
            await move(pieces, planned(16 * GIB, 16 * GIB, goes=False), planner)
        bus.rate, before = RATE / 100, planner.rates
        await move(pieces, planned(16 * GIB, 16 * GIB, goes=False, seconds=0.02), planner)
        bus.rate = RATE * 100
        await move(pieces, planned(16 * GIB, 16 * GIB, goes=False), planner)
        assert planner.rates == before
        await move(pieces, planned(16 * GIB, 16 * GIB, goes=False), planner)
        assert planner.rates.into > 1.1 * before.into
        assert not pieces.still


@virtual
async def test_what_is_not_written_teaches_nothing_of_the_bus() -> None:
    """It goes five times as fast."""
    bus, planner = Bus(rate=RATE / 2), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        for left in range(16, 0, -1):
            clean = max(0, left - 8) * GIB
            moves = Moves([Share("A", left * GIB, left * GIB - clean)], [], 0)
            ends_us = round((trio.current_time() + 5) * 1e6)
            bus.rate = 5 * RATE if clean else RATE / 2
            plan = Plan((frozenset("A"), frozenset("B")), moves={0: moves}, ends_us=ends_us)
            await move(pieces, plan, planner)
        assert planner.rates.out <= RATE


@virtual
async def test_what_moves_nothing_is_asked_again_later() -> None:
    bus, planner = Bus(refuses=True), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await move(pieces, planned(GIB), planner)
        assert pieces.still == {(0, "A", Way.OUT), (0, "B", Way.IN)}
        assert pieces.are_tried
        await trio.sleep(AGAIN_S)
        assert not pieces.still
        for _ in range(4):
            await move(pieces, planned(GIB), planner)
        assert not pieces.are_tried, "it fails"
        pieces.begin()
        assert not pieces.again


@virtual
async def test_what_moves_next_to_nothing_is_asked_again_later() -> None:
    bus, planner = Bus(little=4096), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await move(pieces, planned(GIB), planner)
        assert pieces.still == {(0, "A", Way.OUT), (0, "B", Way.IN)}
        bus.little = 2 * CHUNK
        await trio.sleep(AGAIN_S)
        await move(pieces, planned(GIB), planner)
        assert not pieces.still, "less than was asked for is something"


@virtual
async def test_a_bus_is_no_slower_for_a_while_than_half_of_what_it_was() -> None:
    """As long as memory of the host is made for what goes; and what never came back goes as fast as nothing. One that
    is slow is known to be."""
    bus, planner = Bus(), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        for _ in range(20):
            for names in ("AB", "BA"):
                await move(pieces, planned(16 * GIB, 16 * GIB, names=names), planner)
        best = planner.rates
        bus.rate, until = RATE / 20, trio.current_time() + HALVES_S / 2
        while trio.current_time() < until:
            for names in ("AB", "BA"):
                await move(pieces, planned(2 * CHUNK, 2 * CHUNK, seconds=5, names=names), planner)
        assert 0.3 * best.out < planner.rates.out < 0.6 * best.out
        assert 0.3 * best.into < planner.rates.into < 0.6 * best.into
        bus.rate = RATE * 1000
        await move(pieces, planned(16 * GIB, 16 * GIB), planner)
        assert planner.rates.out <= FASTER * best.out


@virtual
async def test_a_bus_is_known_as_slow_as_it_is() -> None:
    """At first it is taken to carry as much as a fast one does."""
    bus, planner = Bus(rate=RATE / 12), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await move(pieces, planned(16 * GIB, 16 * GIB, seconds=5), planner)
        assert planner.rates.into > 0.35 * RATE, "memory of the host may be in the making"
        until = trio.current_time() + 5 * HALVES_S
        while trio.current_time() < until:
            for names in ("AB", "BA"):
                await move(pieces, planned(16 * GIB, 16 * GIB, seconds=5, names=names), planner)
        assert planner.rates.out < 1.1 * bus.rate
        assert planner.rates.into < 1.1 * bus.rate


@attrs.define
class Uneven(Bus):
    """Hands that move the memory of some programs at rates of their own."""

    own: dict[Name, float] = attrs.field(factory=dict)

    async def fetch(self, gpu: int, name: Name, nbytes: int) -> int:
        moved = await super().fetch(gpu, name, nbytes)
        await trio.sleep(max(0.0, moved / self.own.get(name, self.rate) - moved / self.rate))
        return moved


async def come(pieces: Pieces, planner: Planner, names: str, times: int = 40) -> None:
    """Memory of each of these comes, one after the other, so many times."""
    for _ in range(times):
        for name in names:
            await move(pieces, planned(16 * GIB, 16 * GIB, goes=False, seconds=60, names=f"A{name}"), planner)


@virtual
async def test_one_whose_memory_comes_slowly_makes_the_bus_no_slower() -> None:
    """Nor does one make it as fast as it says. What is known of both goes with them."""
    bus, planner = Uneven(own={"S": RATE / 100, "F": RATE * 1e6}), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await come(pieces, planner, "S", 10)
        assert planner.rates.into == RATE, "by itself it tells nothing of the bus"
        await come(pieces, planner, "BS")
        assert planner.rates.into >= 0.5 * RATE
        assert pieces.is_slow(0, "S", planner.rates)
        assert not pieces.is_slow(0, "B", planner.rates)
        await come(pieces, planner, "BCF")
        assert 0.9 * RATE <= planner.rates.into <= FASTER * RATE
        pieces.forget({"S"})
        bus.own.clear()
        await come(pieces, planner, "S")
        assert not pieces.is_slow(0, "S", planner.rates), "as it is not any more"
        pieces.forget(())
        await come(pieces, planner, "BC", 1)
        assert abs(planner.rates.into - RATE) <= 0.1 * RATE


@virtual
async def test_what_is_taken_for_the_rate_of_the_bus_has_bounds() -> None:
    """Whatever all programs say: with a rate of nothing no time is long enough."""
    bus, planner = Uneven(own=dict.fromkeys("BC", RATE / 100)), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await come(pieces, planner, "BC")
        assert planner.rates.into == LEAST * RATE
        bus.own = dict.fromkeys("BC", 1e15)
        bus.rate = 1e15
        await come(pieces, planner, "BC", 100)
        assert planner.rates.into == MOST * RATE


@virtual
async def test_what_comes_slowly_comes_behind_what_does_not() -> None:
    """Of one set, too: it has the bus once the others have their memory."""
    bus, planner = Uneven(own={"S": RATE / 100}), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await come(pieces, planner, "BS")
        bus.asked.clear()
        for names in ("SB", "S"):
            moves = Moves([], [Share(name, GIB) for name in names], 16 * GIB)
            ends_us = round((trio.current_time() + 5) * 1e6)
            await move(pieces, Plan((frozenset("A"), frozenset("SB")), moves={0: moves}, ends_us=ends_us), planner)
        assert [name for _, name, _ in bus.asked] == ["B", "S"]
        assert bus.asked[1][2] < bus.asked[0][2] / 4, "as much as comes of it in the time of a piece"


@virtual
async def test_one_whose_pieces_are_given_up_again_and_again_is_slow() -> None:
    bus, planner = Uneven(own={"S": RATE / 1000}), Planner(Rates(RATE, RATE))
    async with moving(bus) as pieces:
        await come(pieces, planner, "B", 5)
        for _ in range(LATES):
            assert not pieces.is_slow(0, "S", planner.rates)
            await move(pieces, planned(GIB, GIB, goes=False, seconds=0.05, names="AS"), planner)
        assert pieces.is_slow(0, "S", planner.rates)
        bus.own.clear()
        await come(pieces, planner, "S", 2)
        assert not pieces.is_slow(0, "S", planner.rates)


@attrs.define
class Room(Bus):
    """Hands that know what is where: what goes makes room once it has gone, and what comes takes it as it is asked for.
    To ask, for the first copy and for the last remap there is a time in which nothing is carried."""

    rate: float = 50 * 10**9
    free: int = 0
    lacks: int = 0
    asking_s: float = 0.0015
    slow: float = 1.0
    """How many times as long it takes to go."""
    gone: int = 0
    came: int = 0

    async def evict(self, gpu: int, name: Name, nbytes: int) -> int:
        await trio.sleep(self.asking_s)
        moved = await self._move(Way.OUT, name, nbytes)
        await trio.sleep((self.slow - 1) * moved / self.rate)
        self.free += moved
        self.gone += moved
        return moved

    async def fetch(self, gpu: int, name: Name, nbytes: int) -> int:
        assert nbytes <= self.free
        nbytes -= nbytes % CHUNK
        self.free -= nbytes
        self.lacks -= nbytes
        self.came += nbytes
        await trio.sleep(self.asking_s)
        return await self._move(Way.IN, name, nbytes)

    def plan(self) -> Plan:
        """As much goes as lacks room."""
        outs = [Share("A", left, left)] if (left := self.lacks - self.free) > 0 else []
        moves = Moves(outs, [Share("B", self.lacks)] if self.lacks else [], self.free)
        ends_us = round((trio.current_time() + 1.0) * 1e6)
        return Plan((frozenset("A"), frozenset("B")), moves={0: moves}, is_over=True, ends_us=ends_us)


@pytest.mark.parametrize("chunks", [91, 120])
@virtual
async def test_what_comes_is_not_far_behind_what_goes(chunks: int) -> None:
    """What is missing between two turns at 300 %, without contexts and with those of four programs. Both at once take
    little longer than one of them: a piece, and what it takes to ask for each."""
    bus, planner = Room(lacks=chunks * CHUNK), Planner(Rates(50 * 10**9, 50 * 10**9))
    at_once_s, began = bus.lacks / bus.rate, trio.current_time()
    async with moving(bus) as pieces:
        while bus.lacks:
            assert await pieces.move(bus.plan(), planner)
            assert len(bus.asked) < 1000
        await pieces.rest()
    assert trio.current_time() - began <= at_once_s + 0.044
    assert bus.gone <= bus.came + CHUNK, "no more goes than room is needed for"


@virtual
async def test_one_way_does_not_wait_for_the_other() -> None:
    """Of what goes slowly there is no more than one piece behind what comes fast, into room that is there."""
    bus, planner = Room(lacks=64 * CHUNK, free=48 * CHUNK, slow=10.0), Planner(Rates(50 * 10**9, 50 * 10**9))
    async with moving(bus) as pieces:
        while bus.lacks > 16 * CHUNK:
            assert await pieces.move(bus.plan(), planner)
        assert trio.current_time() <= 1.2 * 48 * CHUNK / bus.rate + 5 * bus.asking_s
        while bus.lacks:
            assert await pieces.move(bus.plan(), planner)
