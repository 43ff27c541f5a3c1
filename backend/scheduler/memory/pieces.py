"""Pieces: how what is planned to move does, a piece each way at a time.

Neither way waits for the other but for room: all is planned anew as soon as a piece has ended, and goes on that way.
The first pieces of a phase are short, so that what comes begins soon, and so that a bus which is slower than is known
tells of that in time. Memory moves in chunks: a piece that comes is no smaller than the largest of them, and waits
until there is room for that. What moved next to nothing is asked for again a little later, as long as the phase is the
same.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs
import trio

from backend.common.tracing import TRACE
from backend.scheduler.memory.claims import Name, Rates
from backend.scheduler.memory.hands import Hands
from backend.scheduler.memory.moves import Moves, Share, Way, out_in
from backend.scheduler.memory.planner import Plan, Planner, Still
from backend.scheduler.memory.telling import said

PIECE_US, PIECE_MOST_US = 4_000, 20_000
"""Microseconds that a piece takes which goes, the first of a phase and the longest: each is twice as long as the one
before. What comes is behind what goes by the longest of these, and with each 1.5 to 2.5 ms pass in which nothing is
carried that way: to ask for it, and for the last remap. Of the 120 to 160 ms in which nothing runs at 300 % both
together are least with pieces of 15 to 30 ms."""
PIECE_IN_US, PIECE_MOST_IN_US = 16_000, 80_000
"""Microseconds that a piece takes which comes, the first of a phase and the longest: each is four times as long as the
one before, where there is room for it already. Where what goes is clean, 8.6 GiB go in 50 to 80 ms and come in 220 (one
H200), of which 14 pieces of PIECE_MOST_US stood for 30 to 80. With two under way at once the bus carried no more."""
PIECE_LEAST_US = 500
"""Microseconds of a phase in which nothing more is moved: to ask for it takes as long."""
LITTLE_US = 100
"""Microseconds in which the bus carries what is next to nothing, of a piece that was asked for more: to ask for it
takes 15 times as long."""
GRACE_S = 0.02
"""Seconds that a piece may take beyond the end of its phase before it is given up."""
AGAIN_S = 0.01
"""Seconds after which a move is asked for again that moved nothing; each time twice as long."""
TRIED_S = 0.04
"""Seconds between two times of that from which on it is taken to fail."""
LEARNS = 0.2
"""Part that one piece has in what is known of a rate."""

FASTER, SLOWEST = 2.0, 0.5
"""Times as fast as is known that a piece counts at most: what never came back has gone without being carried. And part
of the best rate that was known, or taken for granted, which the bus is still taken to carry: memory of the host that
has to be made for what goes, once, is ten times as slow, and so is what comes meanwhile; by that rate turns would take
seconds, and programs would wait for them. So much of that of the fastest program the bus carries, too, however slow
others are."""
HALVES_S = 5.0
"""Seconds in which the best rate that was known is taken for half as much: a bus may be as slow as it seems."""
LEAST, MOST = 1 / 32, 4.0
"""Times as much as was taken for granted that a bus carries at least, and at most: one lane of PCIe 3.0 for RATES, and
16 of PCIe 6.0. Programs say how fast their memory moves."""
LATELY_S = 60.0
"""Seconds for which what a program had moved tells of the bus."""
SLOW = 0.25
"""Part of what the bus carries with less of which a program is slow by itself; with less than LEAST it is so at once,
whatever its memory of the host takes."""
LATES = 3
"""Pieces of a program in a row that were given up, from which on it is slow, whatever its rate was."""
ASKED_S = 0.02
"""Seconds from which on a piece says how fast it was, however small: what it takes to ask is a tenth of that."""


@attrs.frozen
class Hold:
    """What moved nothing when it was asked for."""

    again: float
    """When it is asked for again, by trio's clock."""
    wait: float
    """For how long it is not, seconds."""


@attrs.frozen
class Piece:
    """What is asked for at once."""

    gpu: int
    """The GPU that it goes from, or comes to."""
    way: Way
    """Which of both."""
    share: Share
    """Of which program it is, and how many bytes."""

    @property
    def what(self) -> Still:
        """What moves."""
        return self.gpu, self.share.name, self.way


@attrs.frozen
class Seen:
    """How fast pieces of one program went, bytes a second; 0 before the first."""

    usual: float = 0.0
    """Of late."""
    best: float = 0.0
    """The most that was usual, or was taken for granted, and is not forgotten."""
    at: float = 0.0
    """When that was, by trio's clock."""

    @property
    def rate(self) -> int:
        """What the bus is taken to carry from now on."""
        return round(max(self.usual, SLOWEST * self.best))

    def with_(self, rate: float, now: float) -> Seen:
        """Return what is known with one piece more."""
        usual = self.usual + LEARNS * (rate - self.usual) if self.usual else rate
        return Seen(usual, max(usual, self.best * 0.5 ** ((now - self.at) / HALVES_S)), now)


class Pieces:
    """See the module."""

    def __init__(self, hands: Hands, taken: Rates) -> None:
        """`taken` is what the bus is taken to carry before anything was moved."""
        self._hands = hands
        self._taken = taken
        self._held: dict[Still, Hold] = {}
        self._made = Counter[tuple[int, Way]]()  # in this phase
        self._came: dict[Name, int] = {}  # in this phase, of what was asked to come
        self._under_way: set[tuple[int, Way]] = set()
        self._late: set[Still] = set()  # of what was given up: the next piece says what came of that
        self._lates = Counter[Still]()  # how often in a row that was
        self._ended = trio.Event()  # a piece has, since that was asked last
        self._seen: dict[Way, dict[Name, Seen]] = {way: {} for way in Way}
        self.nursery: trio.Nursery | None = None
        """The nursery of what is under way, while the switch runs."""

    @property
    def still(self) -> frozenset[Still]:
        """What moved nothing a moment ago."""
        now = trio.current_time()
        return frozenset(what for what, hold in self._held.items() if now < hold.again)

    @property
    def are_tried(self) -> bool:
        """Whether something moved nothing a moment ago that may do so the next time: it is no failure yet."""
        return any(hold.wait < TRIED_S for hold in self._held.values())

    @property
    def again(self) -> Sequence[float]:
        """When what moved nothing is asked for again, by trio's clock."""
        return [hold.again for hold in self._held.values()]

    @property
    def came(self) -> Mapping[Name, int]:
        """Bytes that came in this phase, of each program that was asked to have some come."""
        return self._came

    def begin(self) -> None:
        """A phase begins: what did not move in the one before may do so."""
        self._held.clear()
        self._made.clear()
        self._came = {}

    def forget(self, there: Collection[Name]) -> None:
        """Forgets what programs were asked that are gone, and how fast they were."""
        self._late = {what for what in self._late if what[1] in there}
        for what in [what for what in self._lates if what[1] not in there]:
            del self._lates[what]
        for of in self._seen.values():
            for name in of.keys() - there:
                del of[name]

    def is_slow(self, gpu: int, name: Name, rates: Rates) -> bool:
        """Return whether what comes of a program is far slower than the bus, by itself: no other one waits for it."""
        seen = self._seen[Way.IN].get(name)
        is_slow = seen is not None and (seen.rate < SLOW * rates.into or seen.usual < LEAST * rates.into)
        return is_slow or self._lates[gpu, name, Way.IN] >= LATES

    async def move(self, plan: Plan, planner: Planner) -> bool:
        """Moves a piece each way on each GPU, where none is under way, and has the planner know how fast that was.
        Returns once any of these has ended, and whether there was any."""
        assert plan.ends_us is not None
        assert self.nursery is not None
        left_us = plan.ends_us - round(trio.current_time() * 1e6)
        if left_us >= PIECE_LEAST_US:
            for gpu, moves in plan.moves.items():
                for piece in self._pieces(gpu, moves, left_us, planner.rates):
                    self._under_way.add((gpu, piece.way))
                    self.nursery.start_soon(self._go, piece, planner, left_us / 1e6 + GRACE_S)
        if not self._under_way:
            return False
        await self._any()
        return True

    async def rest(self) -> bool:
        """Returns once nothing is under way, and whether anything was."""
        was = bool(self._under_way)
        while self._under_way:
            await self._any()
        return was

    async def _any(self) -> None:
        await self._ended.wait()
        self._ended = trio.Event()

    async def _go(self, piece: Piece, planner: Planner, seconds: float) -> None:
        try:
            with trio.move_on_after(seconds) as scope:
                await self._move(piece, planner)
            if scope.cancelled_caught:
                self._late.add(piece.what)
                self._lates[piece.what] += 1
                if piece.way is Way.IN:
                    self._came.setdefault(piece.share.name, 0)
        finally:
            self._under_way.discard((piece.gpu, piece.way))
            self._made[piece.gpu, piece.way] += 1
            self._ended.set()

    def _pieces(self, gpu: int, moves: Moves, left_us: int, rates: Rates) -> Iterable[Piece]:
        """Yield a piece each way where none is under way. None takes longer than the phase."""
        chunk = self._hands.chunk(gpu)
        if moves.outs and (gpu, Way.OUT) not in self._under_way:
            most = max(chunk, out_in(moves.outs[0], rates, self._piece_us(gpu, Way.OUT, left_us)))
            yield _piece(gpu, Way.OUT, moves.outs[0], most)
        if moves.ins and (gpu, Way.IN) not in self._under_way:
            first = min(moves.ins, key=lambda share: self.is_slow(gpu, share.name, rates))
            least = min(chunk, first.nbytes)
            # With less room than that nothing could come: what goes makes it. Where nothing goes, smaller chunks may.
            if moves.free >= least or (moves.free and not moves.outs):
                carried = self._own(first.name, rates).into_in(self._piece_us(gpu, Way.IN, left_us))
                most = min(moves.free, max(least, carried))
                yield _piece(gpu, Way.IN, first, most)

    def _own(self, name: Name, rates: Rates) -> Rates:
        """What comes of a program in some time: no more than the bus carries."""
        seen = self._seen[Way.IN].get(name)
        return rates if seen is None else attrs.evolve(rates, into=max(1, min(rates.into, seen.rate)))

    def _piece_us(self, gpu: int, way: Way, left_us: int) -> int:
        """How long the next piece takes that way, microseconds."""
        number = min(self._made[gpu, way], 8)
        if way is Way.IN:
            return min(PIECE_MOST_IN_US, PIECE_IN_US << 2 * number, left_us)
        return min(PIECE_MOST_US, PIECE_US << number, left_us)

    async def _move(self, piece: Piece, planner: Planner) -> None:
        way, share = piece.way, piece.share
        act = self._hands.evict if way is Way.OUT else self._hands.fetch
        began = trio.current_time()
        try:
            moved = await act(piece.gpu, share.name, share.nbytes)
        except OSError:
            moved = 0
        seconds, figures = trio.current_time() - began, {"asked": share.nbytes, "bytes": moved, "vain": int(not moved)}
        TRACE.add(f"{way.value} {said(share.name)}", pieces=1, us=round(seconds * 1e6), **figures)
        if way is Way.IN:
            self._came[share.name] = self._came.get(share.name, 0) + moved
        if moved < min(share.nbytes, _little(planner.rates, way)):
            self._hold(piece.what)
            return
        self._held.pop(piece.what, None)
        if piece.what in self._late:
            self._late.discard(piece.what)  # it came in the time of the one before, too
        else:
            self._lates.pop(piece.what, None)
            self._learn(planner, way, share.name, moved if way is Way.IN else min(moved, share.written), seconds)

    def _hold(self, what: Still) -> None:
        last = self._held.get(what)
        wait = AGAIN_S if last is None else 2 * last.wait
        self._held[what] = Hold(trio.current_time() + wait, wait)

    def _learn(self, planner: Planner, way: Way, name: Name, nbytes: int, seconds: float) -> None:
        """Notes how fast a piece of a program went; small ones say more of what it takes to ask."""
        rates, now = planner.rates, trio.current_time()
        before, taken = (rates.out, self._taken.out) if way is Way.OUT else (rates.into, self._taken.into)
        seen = self._seen[way].get(name, Seen(best=max(before, taken), at=now))
        # Of what goes little may be written, beside much that is not.
        is_small = nbytes < min(before, seen.rate) * PIECE_US / 2e6 and (way is Way.OUT or seconds < ASKED_S)
        if seconds <= 0 or is_small:
            return
        rate = min(nbytes / seconds, FASTER * (seen.usual or max(before, taken)))
        self._seen[way][name] = seen.with_(rate, now)
        carries = self._carries(way, taken)
        planner.rates = Rates(carries, rates.into) if way is Way.OUT else Rates(rates.out, carries)

    def _carries(self, way: Way, taken: int) -> int:
        """What the bus is taken to carry: what most programs have it do, and not much less than the fastest."""
        now = trio.current_time()
        lately = [seen.rate for seen in self._seen[way].values() if now - seen.at <= LATELY_S]
        least = taken if len(lately) == 1 else LEAST * taken  # one may be slow by itself
        rate = max(statistics.median_low(lately), SLOWEST * max(lately), least)
        return max(1, round(min(rate, MOST * taken)))


def _piece(gpu: int, way: Way, share: Share, most: int) -> Piece:
    nbytes = max(1, min(share.nbytes, most))
    # First goes what is not written (:func:`out_in`).
    written = max(0, nbytes - (share.nbytes - share.written)) if way is Way.OUT else 0
    return Piece(gpu, way, attrs.evolve(share, nbytes=nbytes, written=written))


def _little(rates: Rates, way: Way) -> int:
    """Return how many bytes have to move at least, so that it is more than next to nothing."""
    return max(1, rates.into_in(LITTLE_US) if way is Way.IN else rates.out_in(LITTLE_US))
