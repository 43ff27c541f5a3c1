"""The switch: has what the planner says happen, from one turn to the next.

    runs     the present set has its turn; behind it, the next one's memory comes, and what is used last goes
    ends     its gates close, it drains, and goes off the runlist
    moves    what the next set still lacks comes as the tail of the last one goes
    begins   the next set is on the runlist, and its gates open

It has no state of its own but the planner's: the programs that should wait are compared with those that do, at each
step, and what differs is done. So each step has a way back. Of a program that is gone nothing is left to do. One whose
turn does not end, or does not begin, has no turns for some time: it runs with all of them. What does not move in one
phase is not asked again in it, and the turn begins with what is there: the rest is read over the bus. However a move
ends, the turn begins in time. After a daemon that was killed everything that waits begins its turn, or is had to wait
anew.

Bytes move in pieces that take PIECE_US each way, both ways at once, and are planned anew for each piece: so a limit, a
kill or a free comes between no more than two pieces.
"""

from __future__ import annotations

import enum
import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

import attrs
import trio

from backend.scheduler.memory.claims import Claim, Name, Rates
from backend.scheduler.memory.gangs import Ties
from backend.scheduler.memory.hands import Hands
from backend.scheduler.memory.moves import Moves, Share, leaves, out_in
from backend.scheduler.memory.planner import Plan, Planner, Program, claims_on

log = logging.getLogger(__name__)

PIECE_US = 5_000
"""Microseconds that a piece takes: of 50 GB/s a quarter of a GB; what it costs to ask for it is a part in fifty."""
PIECE_LEAST_US = 500
"""Microseconds of a phase in which nothing more is moved: to ask for it takes as long."""
GRACE_S = 0.02
"""Seconds that a piece may take beyond the end of its phase before it is given up."""
AGAIN_S, AGAIN_MOST_S = 5.0, 60.0
"""Seconds for which a program has no turns whose turn did not end; each time twice as long, up to the second."""
BEGINS_AGAIN_S = 0.1
"""Seconds after which the turn of a program is begun again that did not begin: it stands meanwhile. Each time twice as
long."""
RATES = Rates(30 * 10**9, 30 * 10**9)
"""What a bus is taken to carry before anything was moved."""
LEARNS = 0.2
"""Part that one piece has in what is known of a rate."""


class Phase(enum.Enum):
    """What is done now."""

    FREE = "free"
    """There is room for all: no turns."""
    RUNS = "runs"
    """A set has its turn."""
    ENDS = "ends"
    """Programs are had to wait."""
    MOVES = "moves"
    """No set has its turn: the memory of the next one comes."""
    BEGINS = "begins"
    """Programs begin their turns."""


class Way(enum.Enum):
    """A direction of the bus."""

    OUT = "out"
    IN = "in"


@attrs.define
class Trouble:
    """A program that has no turns."""

    again: float
    """Until when, by trio's clock."""
    wait: float
    """For how long that is, seconds."""


class Switch:
    """See the module. Its time is trio's."""

    def __init__(self, hands: Hands, rates: Rates = RATES, name: str = "") -> None:
        """`name` is that of the level in the log."""
        self._hands = hands
        self._name = name
        self.programs: Mapping[Name, Program] = {}
        """The programs, as they were looked at last."""
        self.planner = Planner(rates)
        """What decides."""
        self.plan = Plan()
        """What was decided last."""
        self.phase = Phase.FREE
        """What is done now."""
        self._spent: set[tuple[int, Name, Way]] = set()  # what moved no more in this phase
        self._troubles: dict[Name, Trouble] = {}
        self._is_told = False

    async def run(self) -> None:
        """Switches until cancelled."""
        while True:
            await self.step()

    async def step(self) -> None:
        """Decides, and does one thing of it."""
        programs, rooms = self._known(), self._hands.rooms()
        self.programs = programs
        self._forget(programs)
        self.plan = plan = self.planner.decide(_now_us(), programs, rooms) if rooms else self._none()
        self._tell(plan)
        self._hands.planned(plan)
        if await self._settle(programs, plan):
            return
        if not plan.has_turns:
            self.phase = Phase.FREE
            await self._hands.news()
        elif plan.is_over:
            await self._come(plan)
        elif _now_us() >= _end_us(plan):
            self.planner.end(_now_us())
            self._spent.clear()
        else:
            self.phase = Phase.RUNS
            if not await self._move(plan):
                await self._rest(plan)

    async def _come(self, plan: Plan) -> None:
        """Has the memory of the next set come, and its turn begin."""
        self.phase = Phase.MOVES
        if any(moves.ins for moves in plan.moves.values()) and _now_us() < _end_us(plan) and await self._move(plan):
            return
        self.planner.begin(_now_us())
        self._spent.clear()
        self._hands.turned(plan.coming)

    async def _rest(self, plan: Plan) -> None:
        """Returns once the turn is over, or anything else is known."""
        with trio.move_on_after(max(0.0, (_end_us(plan) - _now_us()) / 1e6)):
            await self._hands.news()

    # What is known

    def _known(self) -> Mapping[Name, Program]:
        """The programs, those without turns that are in trouble, and without what does not move in this phase."""
        found = {}
        for name, one in self._hands.programs().items():
            if name in self._troubles and (not self._may(name) or self._hands.is_off(name)):
                one = attrs.evolve(one, ties=Ties(one.ties.gpus, one.ties.shared))
            found[name] = attrs.evolve(one, claims={gpu: self._left(gpu, name, c) for gpu, c in one.claims.items()})
        return found

    def _left(self, gpu: int, name: Name, claim: Claim) -> Claim:
        if (gpu, name, Way.OUT) in self._spent:
            claim = attrs.evolve(claim, leaves=0)
        if (gpu, name, Way.IN) in self._spent:
            claim = attrs.evolve(claim, used=claim.resident)
        return claim

    def _none(self) -> Plan:
        """Nothing is planned, while a GPU is lost: when it is back everything begins anew."""
        self.planner = Planner(self.planner.rates)
        self._spent.clear()
        return Plan()

    def _forget(self, there: Mapping[Name, Program]) -> None:
        self._troubles = {name: trouble for name, trouble in self._troubles.items() if name in there}

    def _tell(self, plan: Plan) -> None:
        """Says in the log when turns begin, once."""
        if plan.has_turns and not self._is_told:
            self._is_told = True
            what = "%s: programs use more memory than there is room for, and have turns, in %d sets (-o turns=off)"
            log.info(what, self._name, len(plan.sets))

    # Which programs wait

    async def _settle(self, programs: Mapping[Name, Program], plan: Plan) -> bool:
        """Has those wait that are to, and none else. Returns whether anything was to be done."""
        ends = [name for name in plan.waits if not self._hands.is_off(name)]
        begins = [name for name in programs if name not in plan.waits and self._hands.is_off(name)]
        begins = [name for name in begins if self._may(name)]
        if not ends and not begins:
            return False
        self.phase = Phase.ENDS if ends else Phase.BEGINS
        async with trio.open_nursery() as nursery:
            for name in begins:
                nursery.start_soon(self._do, name, self._hands.begin, BEGINS_AGAIN_S)
            for name in ends:
                end = partial(self._hands.end, leaves=self._leaves(programs, name))
                nursery.start_soon(self._do, name, end, AGAIN_S)
        return True

    def _leaves(self, programs: Mapping[Name, Program], name: Name) -> int:
        """How many bytes of a program go before its next turn, at most."""
        rooms = self._hands.rooms()
        return sum(leaves(claims_on(gpu, programs), name, rooms[gpu]) for gpu in programs[name].claims if gpu in rooms)

    def _may(self, name: Name) -> bool:
        """Whether what failed for a program may be tried again."""
        trouble = self._troubles.get(name)
        return trouble is None or trio.current_time() >= trouble.again

    async def _do(self, name: Name, act: Callable[[Name], Awaitable[None]], again_s: float) -> None:
        try:
            await act(name)
        except OSError as error:
            if error.errno != errno.ESRCH:
                last = self._troubles.get(name)
                wait = again_s if last is None else min(AGAIN_MOST_S, 2 * last.wait)
                self._troubles[name] = Trouble(trio.current_time() + wait, wait)
        else:
            if (trouble := self._troubles.get(name)) is not None and trio.current_time() >= trouble.again:
                del self._troubles[name]

    # What moves

    async def _move(self, plan: Plan) -> bool:
        """Moves a piece each way on each GPU. Returns whether there was any."""
        left_us = _end_us(plan) - _now_us()
        if left_us < PIECE_LEAST_US:
            return False
        pieces = [piece for gpu, moves in plan.moves.items() for piece in self._pieces(gpu, moves, left_us)]
        if not pieces:
            return False
        with trio.move_on_after(left_us / 1e6 + GRACE_S):
            async with trio.open_nursery() as nursery:
                for piece in pieces:
                    nursery.start_soon(piece)
        return True

    def _pieces(self, gpu: int, moves: Moves, left_us: int) -> Iterable[Callable[[], Awaitable[None]]]:
        """Yield what moves a piece each way. None takes longer than the phase."""
        rates, piece_us = self.planner.rates, min(PIECE_US, left_us)
        if moves.outs:
            yield self._piece(gpu, moves.outs[0], Way.OUT, out_in(moves.outs[0], rates, piece_us))
        if moves.ins and moves.free:
            yield self._piece(gpu, moves.ins[0], Way.IN, min(moves.free, rates.into_in(piece_us)))

    def _piece(self, gpu: int, share: Share, way: Way, most: int) -> Callable[[], Awaitable[None]]:
        nbytes = max(1, min(share.nbytes, most))
        act = self._hands.evict if way is Way.OUT else self._hands.fetch

        async def move() -> None:
            began = trio.current_time()
            try:
                moved = await act(gpu, share.name, nbytes)
            except OSError:
                moved = 0
            if not moved:
                self._spent.add((gpu, share.name, way))
                return
            if share.written or way is Way.IN:
                self._learn(way, moved, trio.current_time() - began)

        return move

    def _learn(self, way: Way, nbytes: int, seconds: float) -> None:
        """Notes how fast a piece went; small ones say more of what it takes to ask."""
        rates = self.planner.rates
        before = rates.out if way is Way.OUT else rates.into
        if seconds <= 0 or nbytes < before * PIECE_US / 2e6:
            return
        rate = round(before + LEARNS * (nbytes / seconds - before))
        self.planner.rates = Rates(rate, rates.into) if way is Way.OUT else Rates(rates.out, rate)


def _now_us() -> int:
    return round(trio.current_time() * 1e6)


def _end_us(plan: Plan) -> int:
    """When the phase of a plan with turns is over, microseconds."""
    assert plan.ends_us is not None
    return plan.ends_us
