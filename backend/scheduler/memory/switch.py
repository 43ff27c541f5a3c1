"""The switch: has what the planner says happen, from one turn to the next.

    runs     the present set has its turn; behind it, the next one's memory comes, and what is used last goes
    ends     its gates close, it drains, and goes off the runlist
    moves    what the next set still lacks comes as the tail of the last one goes
    begins   the next set is on the runlist, and its gates open

It has no state of its own but the planner's: the programs that should wait are compared with those that do, at each
step, and what differs is done. So each step has a way back. Of a program that is gone nothing is left to do. One whose
turn does not end, or does not begin, has no turns for some time: it runs with all of them; so does one that does not
drain. A gang has its turns as a whole: where one of it does not drain soon, its kernel may wait for what another has
yet to launch, so all of them go on, and have no turns for some time. What does not move in one
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

import attrs
import trio

from backend.scheduler.memory.claims import Claim, Name, Rates
from backend.scheduler.memory.gangs import Gang
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
GANG_DRAIN_S, GANG_LOOK_S = 0.1, 0.005
"""Seconds that a gang has to drain, beside nothing else that runs, and after which is looked again whether it has: some
kernels that read over the bus take as long. One that waits for another would be waited for in vain."""
GANG_AGAIN_S = 1.0
"""Seconds for which a gang has no turns that did not drain: the next time it may be at another point of its work. Each
time twice as long, up to AGAIN_MOST_S."""
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
        self._troubles: dict[Name, Trouble] = {}  # of those whose turns do not end
        self._stands: dict[Name, Trouble] = {}  # ... and of those whose turns do not begin
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
            if self._hands.is_stuck(name) and _may(self._troubles, name):
                _note(self._troubles, name, AGAIN_S)
            is_standing = name in self._stands and not self._hands.is_on(name)
            if is_standing or not _may(self._troubles, name) or not _may(self._stands, name):
                one = attrs.evolve(one, ties=attrs.evolve(one.ties, is_known=False))
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
        self._stands = {name: trouble for name, trouble in self._stands.items() if name in there}

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
        begins = [name for name in programs if name not in plan.waits and not self._hands.is_on(name)]
        begins = [name for name in begins if _may(self._stands, name)]
        if not ends and not begins:
            return False
        self.phase = Phase.ENDS if ends else Phase.BEGINS
        async with trio.open_nursery() as nursery:
            for name in begins:
                nursery.start_soon(self._begin, name)
            for gang in self.planner.gangs:
                if names := [name for name in ends if name in gang.members]:
                    nursery.start_soon(self._end, gang, {name: self._leaves(programs, name) for name in names})
        return True

    def _leaves(self, programs: Mapping[Name, Program], name: Name) -> Mapping[int, int]:
        """How many bytes of a program go from each GPU before its next turn, at most."""
        rooms, each = self._hands.rooms(), programs[name].claims
        return {gpu: leaves(claims_on(gpu, programs), name, rooms[gpu]) for gpu in each if gpu in rooms}

    async def _begin(self, name: Name) -> None:
        try:
            await self._hands.begin(name)
        except OSError as error:
            if error.errno != errno.ESRCH:
                _note(self._stands, name, BEGINS_AGAIN_S)
        else:
            _over(self._stands, name)

    async def _end(self, gang: Gang, leaves: Mapping[Name, Mapping[int, int]]) -> None:
        """Ends the turns of those of a gang that are on. Of a wide one that was not drained all turns begin again."""
        drained: dict[Name, bool] = {}
        async with trio.open_nursery() as nursery:
            for name in leaves:
                nursery.start_soon(self._end_one, name, leaves[name], drained)
        if gang.is_wide and not (all(drained.values()) or await self._drain(drained)):
            async with trio.open_nursery() as nursery:
                for name in gang.members:
                    _note(self._troubles, name, GANG_AGAIN_S)
                    nursery.start_soon(self._begin, name)
            return
        for name, is_drained in drained.items():
            if is_drained:
                _over(self._troubles, name)

    async def _drain(self, names: Mapping[Name, bool]) -> bool:
        """Waits for those of a gang whose turns ended, and returns whether they are drained."""
        with trio.move_on_after(GANG_DRAIN_S):
            while not all(self._hands.is_drained(name) for name in names):
                if any(self._hands.is_on(name) for name in names if not self._hands.is_drained(name)):
                    return False  # its turn did not end
                await trio.sleep(GANG_LOOK_S)
            return True
        return False

    async def _end_one(self, name: Name, leaves: Mapping[int, int], drained: dict[Name, bool]) -> None:
        """Ends the turn of one program, and says whether it is drained; nothing of one that is gone, or that fails by
        itself."""
        try:
            drained[name] = await self._hands.end(name, leaves)
        except OSError as error:
            if error.errno != errno.ESRCH:
                _note(self._troubles, name, AGAIN_S)
                drained[name] = False

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


def _may(troubles: Mapping[Name, Trouble], name: Name) -> bool:
    """Return whether what failed for a program may be tried again."""
    trouble = troubles.get(name)
    return trouble is None or trio.current_time() >= trouble.again


def _note(troubles: dict[Name, Trouble], name: Name, again_s: float) -> None:
    """Note that something failed for a program: each time it is left alone for longer, at first for so many seconds. Of
    a gang each member may say so of one failure."""
    last = troubles.get(name)
    if last is not None and trio.current_time() < last.again:
        return
    wait = again_s if last is None else min(AGAIN_MOST_S, 2 * last.wait)
    troubles[name] = Trouble(trio.current_time() + wait, wait)


def _over(troubles: dict[Name, Trouble], name: Name) -> None:
    """Note that it did not fail this time."""
    if name in troubles and _may(troubles, name):
        del troubles[name]


def _now_us() -> int:
    return round(trio.current_time() * 1e6)


def _end_us(plan: Plan) -> int:
    """When the phase of a plan with turns is over, microseconds."""
    assert plan.ends_us is not None
    return plan.ends_us
