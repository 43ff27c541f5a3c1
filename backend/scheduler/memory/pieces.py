"""Pieces: how what is planned to move does, a piece each way at a time, and of what comes the next one behind it.

Neither way waits for the other but for room: all is planned anew as soon as a piece has ended, and goes on that way. A
program begins with the second of two pieces that come at once, while the first is answered and all is planned. The
first piece that goes in a phase takes PIECE_US, so that what comes begins soon, and those behind it are longer. Memory
moves in chunks: a piece that comes is no smaller than the largest of them, and waits until there is room for that. What
moved nothing is asked for again a little later, as long as the phase is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

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
PIECE_MOST_IN_US = 60_000
"""Microseconds that a piece which comes takes at most. It is as long only where there is room for it already, and so
behind nothing: where what goes is clean, 8.6 GiB go in 50 to 80 ms and come in 220 (one H200)."""
AT_ONCE = {Way.OUT: 1, Way.IN: 2}
"""Pieces that are under way at once each way. Between two of them 3 to 5 ms passed in which nothing came, of 40 that it
took for 1 GiB (one H200)."""
PIECE_LEAST_US = 500
"""Microseconds of a phase in which nothing more is moved: to ask for it takes as long."""
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
seconds, and programs would wait for them."""
HALVES_S = 5.0
"""Seconds in which the best rate that was known is taken for half as much: a bus may be as slow as it seems."""


@attrs.frozen
class Hold:
    """What moved nothing when it was asked for."""

    since: float
    """When that was known, by trio's clock."""
    wait: float
    """For how long it is not asked for again, seconds."""

    @property
    def again(self) -> float:
        """When it is."""
        return self.since + self.wait


@attrs.frozen(eq=False)
class Piece:
    """What was asked for at once, and is under way."""

    gpu: int
    way: Way
    share: Share
    """Of which program it is, and how many bytes."""


@attrs.frozen
class Seen:
    """How fast pieces went, bytes a second; 0 before the first."""

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

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._held: dict[Still, Hold] = {}
        self._gone = Counter[int]()  # pieces that went from each GPU in this phase
        self._under_way: list[Piece] = []
        self._last: dict[tuple[int, Way], float] = {}  # when the last piece ended, by trio's clock
        self._ended = trio.Event()  # a piece has, since that was asked last
        self._seen = dict.fromkeys(Way, Seen())
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

    def begin(self) -> None:
        """A phase begins: what did not move in the one before may do so."""
        self._held.clear()
        self._gone.clear()

    async def move(self, plan: Plan, planner: Planner) -> bool:
        """Moves a piece each way on each GPU, where no more are under way than may be, and has the planner know how
        fast that was. Returns once any of these has ended, and whether there was any."""
        assert plan.ends_us is not None
        assert self.nursery is not None
        left_us = plan.ends_us - round(trio.current_time() * 1e6)
        if left_us >= PIECE_LEAST_US:
            for gpu, moves in plan.moves.items():
                for piece in self._pieces(gpu, moves, left_us, planner):
                    self._under_way.append(piece)
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
            with trio.move_on_after(seconds):
                await self._move(piece, planner)
        finally:
            self._under_way.remove(piece)
            self._gone[piece.gpu] += piece.way is Way.OUT
            self._last[piece.gpu, piece.way] = trio.current_time()
            self._ended.set()

    def _pieces(self, gpu: int, moves: Moves, left_us: int, planner: Planner) -> Iterable[Piece]:
        """Yield the pieces that are to be under way besides those that are. None takes longer than the phase."""
        rates, chunk = planner.rates, self._hands.chunk(gpu)
        if moves.outs and len(self._those(gpu, Way.OUT)) < AT_ONCE[Way.OUT]:
            most = max(chunk, out_in(moves.outs[0], rates, self._piece_us(gpu, Way.OUT, left_us)))
            yield _piece(gpu, Way.OUT, moves.outs[0], most)
        # What is yielded is under way then.
        while len(there := self._those(gpu, Way.IN)) < AT_ONCE[Way.IN]:
            # What of these has come already counts twice, and is asked for once they have ended.
            coming = sum(one.nbytes for one in there)
            ins = [attrs.evolve(share, nbytes=share.nbytes - _of(share.name, there)) for share in moves.ins]
            first = next((one for one in ins if one.nbytes > 0), None)
            free, behind_us = moves.free - coming, left_us - rates.into_usec(coming)
            if first is None or behind_us < PIECE_LEAST_US:
                return
            least = min(chunk, first.nbytes)
            # With less room than that nothing could come: what goes makes it. Where nothing goes, smaller chunks may.
            if free < least and (moves.outs or free <= 0):
                return
            most = min(free, max(least, rates.into_in(self._piece_us(gpu, Way.IN, behind_us))))
            yield _piece(gpu, Way.IN, first, most)

    def _those(self, gpu: int, way: Way) -> Sequence[Share]:
        """What is under way."""
        return [one.share for one in self._under_way if (one.gpu, one.way) == (gpu, way)]

    def _piece_us(self, gpu: int, way: Way, left_us: int) -> int:
        """How long the next piece takes that way, microseconds. What comes is behind what makes room for it."""
        if way is Way.IN:
            return min(PIECE_MOST_IN_US, left_us)
        return min(PIECE_MOST_US, PIECE_US << min(self._gone[gpu], 8), left_us)

    async def _move(self, piece: Piece, planner: Planner) -> None:
        gpu, way, share = piece.gpu, piece.way, piece.share
        act = self._hands.evict if way is Way.OUT else self._hands.fetch
        began = trio.current_time()
        try:
            moved = await act(gpu, share.name, share.nbytes)
        except OSError:
            moved = 0
        # The one before it is the program's, as a rule, or has the bus.
        seconds = trio.current_time() - max(began, self._last.get((gpu, way), began))
        figures = {"asked": share.nbytes, "bytes": moved, "vain": int(not moved)}
        TRACE.add(f"{way.value} {said(share.name)}", pieces=1, us=round(seconds * 1e6), **figures)
        if not moved:
            self._hold((gpu, share.name, way), began)
            return
        self._held.pop((gpu, share.name, way), None)
        if share.written or way is Way.IN:
            self._learn(planner, way, moved, seconds)

    def _hold(self, what: Still, began: float) -> None:
        """Notes that a piece moved nothing, which was asked for at `began`."""
        last = self._held.get(what)
        if last is not None and began < last.since:
            return  # the one before it has said so meanwhile
        self._held[what] = Hold(trio.current_time(), AGAIN_S if last is None else 2 * last.wait)

    def _learn(self, planner: Planner, way: Way, nbytes: int, seconds: float) -> None:
        """Notes how fast a piece went; small ones say more of what it takes to ask."""
        rates, now = planner.rates, trio.current_time()
        before = rates.out if way is Way.OUT else rates.into
        seen = self._seen[way] if self._seen[way].best else Seen(best=before, at=now)
        if seconds <= 0 or nbytes < before * PIECE_US / 2e6:
            return
        seen = self._seen[way] = seen.with_(min(nbytes / seconds, FASTER * (seen.usual or before)), now)
        planner.rates = Rates(seen.rate, rates.into) if way is Way.OUT else Rates(rates.out, seen.rate)


def _piece(gpu: int, way: Way, share: Share, most: int) -> Piece:
    return Piece(gpu, way, attrs.evolve(share, nbytes=max(1, min(share.nbytes, most))))


def _of(name: Name, shares: Iterable[Share]) -> int:
    """Return how many bytes of a program are among these."""
    return sum(one.nbytes for one in shares if one.name == name)
