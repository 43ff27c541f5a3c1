"""The switch: has what the planner says happen, from one turn to the next.

    runs     the present set has its turn; behind it, the next one's memory comes, and what is used last goes
    ends     its gates close, it drains, and goes off the runlist
    moves    what the next set still lacks comes as the tail of the last one goes
    begins   the next set is on the runlist, and its gates open

It has no state of its own but the planner's: the programs that should wait are compared with those that do, at each
step, and what differs is done. So each step has a way back. Of a program that is gone nothing is left to do. One whose
turn does not end, or does not begin, has no turns for some time: it runs with all of them; so does one that does not
drain. A gang has its turns as a whole: where one of it does not drain soon, its kernel may wait for what another has
yet to launch, so all of them go on, and have no turns for some time. Of one that drains nothing moves before it is
drained, and what did not move is asked again a little later, as long as the phase lasts; then the turn begins with
what is there: the rest is read over the bus. However a move ends, the turn begins in time. After a daemon that was
killed everything that waits begins its turn, or is had to wait anew.

Bytes move in pieces (``pieces.py``), both ways at once, and are planned anew for each piece: so a limit, a kill or a
free comes between no more than two pieces.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Collection, Mapping

import attrs
import trio

from backend.common.tracing import TRACE
from backend.scheduler.memory import telling
from backend.scheduler.memory.claims import Claim, Name, Rates
from backend.scheduler.memory.gangs import Gang
from backend.scheduler.memory.hands import Hands
from backend.scheduler.memory.moves import Way, leaves
from backend.scheduler.memory.pieces import Pieces
from backend.scheduler.memory.planner import Plan, Planner, Program, Still, claims_on

LOOK_S = 0.003
"""Seconds after which is looked again whether a program that drains has done so: then its memory moves."""
DRAIN_S = 1.0
"""Seconds for which no turn begins that lacks memory, while a program drains whose memory is to make room, or what did
not move is to be asked for again. What lacks memory is read over the bus, by a turn that is as slow as a fortieth, and
by what drains beside it, which takes as much longer for that: two passes over 8 GiB take 0.35 s alone."""
LACKS = 0.05
"""Part of the working sets of a turn up to which it begins without."""
ENDS_TRIES = 3
"""Times that the end of a turn is tried in a row."""
AGAIN_S, AGAIN_MOST_S = 5.0, 60.0
"""Seconds for which a program has no turns whose turn did not end; each time twice as long, up to the second."""
SPARED = 3
"""Times in a row that a program which lacks memory may go off undrained and have its turns all the same: it was slow as
it read over the bus. With all others at once it would take the room of theirs, and these would be late for the same
reason."""
GANG_DRAIN_S, GANG_LOOK_S = 0.1, 0.005
"""Seconds that a gang has to drain, beside nothing else that runs, and after which is looked again whether it has: some
kernels that read over the bus take as long. One that waits for another would be waited for in vain."""
GANG_AGAIN_S = 1.0
"""Seconds for which a gang has no turns that did not drain: the next time it may be at another point of its work. Each
time twice as long, up to AGAIN_MOST_S."""
VAIN = 3
"""Phases in a row in which nothing of a program came, however often it was asked, until it is taken to lack nothing: it
runs with what it has. Others would stand for what it says that it lacks, in each round."""
BEGINS_AGAIN_S = 0.1
"""Seconds after which the turn of a program is begun again that did not begin: it stands meanwhile. Each time twice as
long."""
RATES = Rates(30 * 10**9, 30 * 10**9)
"""What a bus is taken to carry before anything was moved."""


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


@attrs.define
class Trouble:
    """A program that has no turns."""

    again: float
    """Until when, by trio's clock."""
    wait: float
    """For how long that is, seconds."""


@attrs.define
class Spared:
    """A program that went off undrained, and lacked memory."""

    times: int = 0
    """How often in a row."""
    is_off: bool = False
    """Whether it is so now."""


class Switch:
    """See the module. Its time is trio's."""

    def __init__(self, hands: Hands, rates: Rates = RATES, begun: Callable[[int], None] = lambda sets: None) -> None:
        """`begun` is called with the number of sets whenever turns begin."""
        self._hands = hands
        self._begun = begun
        self.programs: Mapping[Name, Program] = {}
        """The programs, as they were looked at last."""
        self.planner = Planner(rates)
        """What decides."""
        self.plan = Plan()
        """What was decided last."""
        self.phase = Phase.FREE
        """What is done now."""
        self._pieces = Pieces(hands, rates)
        self._phase_at = 0.0  # when the turn, or what is between two, began
        self._troubles: dict[Name, Trouble] = {}  # of those whose turns do not end
        self._stands: dict[Name, Trouble] = {}  # ... and of those whose turns do not begin
        self._spared: dict[Name, Spared] = {}  # those that went off undrained, and lacked memory
        self._vain: dict[Name, int] = {}  # phases in a row in which nothing of a program came that was to
        self._poor: dict[Name, Trouble] = {}  # those that are taken to lack nothing for that

    async def run(self) -> None:
        """Switches until cancelled."""
        async with trio.open_nursery() as nursery:
            self._pieces.nursery = nursery
            while True:
                await self.step()

    async def step(self) -> None:
        """Decides, and does one thing of it."""
        began_us = _now_us()
        programs, rooms = self._known(), self._hands.rooms()
        self.programs = programs
        self._forget(programs)
        still = self._still(programs)
        had_turns = self.plan.has_turns
        decide = self.planner.decide
        is_patient = not self._are_slow(self.planner.turns.coming or frozenset())
        self.plan = plan = decide(_now_us(), programs, rooms, still, is_patient=is_patient) if rooms else self._none()
        if plan.has_turns and not had_turns:
            self._phase_at = trio.current_time()
            self._begun(len(plan.sets))
        self._hands.planned(plan)
        TRACE.add("decided", steps=1, us=_now_us() - began_us)
        if await self._settle(programs, plan):
            return
        if not plan.has_turns:
            self.phase = Phase.FREE
            await self._hands.news()
        elif plan.is_over:
            await self._come(plan)
        elif _now_us() >= _end_us(plan):
            if await self._pieces.rest():
                return
            self._begin_phase()
            self.planner.end(_now_us())
        else:
            self.phase = Phase.RUNS
            if not await self._pieces.move(plan, self.planner):
                await self._rest(plan)

    async def _come(self, plan: Plan) -> None:
        """Has the memory of the next set come, and its turn begin."""
        self.phase = Phase.MOVES
        if _now_us() < _end_us(plan):
            comes = frozenset(share.name for moves in plan.moves.values() for share in moves.ins)
            if comes and not self._are_slow(comes) and await self._pieces.move(plan, self.planner):
                return
            waits = self._drains() or self._pieces.are_tried
            if self._lacks(plan) and waits and trio.current_time() < self._phase_at + DRAIN_S:
                await trio.sleep(LOOK_S)
                return
        if await self._pieces.rest():
            return
        self._begin_phase()
        self.planner.begin(_now_us())
        self._hands.turned(plan.coming)

    async def _rest(self, plan: Plan) -> None:
        """Returns once the turn is over, anything else is known, or what did not move may do so."""
        until = [_end_us(plan) / 1e6, *self._pieces.again]
        if self._drains():
            until.append(trio.current_time() + LOOK_S)
        now = trio.current_time()
        with trio.move_on_at(min((at for at in until if at > now), default=now + LOOK_S)):
            await self._hands.news()

    def _begin_phase(self) -> None:
        """What did not move in the phase before may do so from now on."""
        plan, now = self.plan, trio.current_time()
        if TRACE.path is not None and plan.has_turns:
            runs = self.planner.turns.current or frozenset()
            troubles = [*self._troubles, *self._stands]
            telling.phase(plan, self.programs, runs, self.planner.rates, now - self._phase_at, troubles)
        self._count_vain()
        self._pieces.begin()
        self._phase_at = now

    def _count_vain(self) -> None:
        """Notes of which programs nothing came in a phase that was to, and which of them are taken to lack nothing."""
        for name, nbytes in self._pieces.came.items():
            self._vain[name] = 0 if nbytes else self._vain.get(name, 0) + 1
            if nbytes:
                _over(self._poor, name)
            elif self._vain[name] >= VAIN:
                _note(self._poor, name, AGAIN_S)

    def _drains(self) -> bool:
        """Whether a program whose turn is over has yet to be drained."""
        return any(
            self._hands.is_off(name) and not self._hands.is_drained(name) and not self._hands.is_stuck(name)
            for name in self.programs
        )

    def _are_slow(self, names: frozenset[Name]) -> bool:
        """Whether all of these programs that lack memory are slow to have it come, by themselves: no turn is put off
        for what they lack, and what comes of it does so behind turns."""
        lack = [
            (gpu, name)
            for name in names & self.programs.keys()
            for gpu, claim in self.programs[name].claims.items()
            if claim.missing
        ]
        return bool(lack) and all(self._pieces.is_slow(gpu, name, self.planner.rates) for gpu, name in lack)

    def _lacks(self, plan: Plan) -> bool:
        """Whether the programs whose turn is the next lack memory, so much that it is worth a wait."""
        there = [self.programs[name] for name in plan.coming if name in self.programs]
        return _lack([claim for one in there for claim in one.claims.values()])

    # What is known

    def _known(self) -> Mapping[Name, Program]:
        """The programs, those without turns that are in trouble."""
        found = {}
        for name, one in self._hands.programs().items():
            if self._is_stuck(name, one) and _may(self._troubles, name):
                _note(self._troubles, name, AGAIN_S)
            is_standing = name in self._stands and not self._hands.is_on(name)
            if is_standing or not _may(self._troubles, name) or not _may(self._stands, name):
                one = attrs.evolve(one, ties=attrs.evolve(one.ties, is_known=False))
            if not _may(self._poor, name):
                claims = {gpu: attrs.evolve(claim, used=claim.resident) for gpu, claim in one.claims.items()}
                one = attrs.evolve(one, claims=claims)
            found[name] = one
        return found

    def _is_stuck(self, name: Name, one: Program) -> bool:
        """Whether a program could not be drained, and that not for want of memory, as far as is known."""
        if not self._hands.is_stuck(name):
            if self._hands.is_drained(name):
                self._spared.pop(name, None)
            elif name in self._spared:
                self._spared[name].is_off = False
            return False
        spared = self._spared.setdefault(name, Spared())
        if not spared.is_off and spared.times < SPARED and _lack(one.claims.values()):
            spared.is_off = True
            spared.times += 1
        return not spared.is_off

    def _still(self, programs: Mapping[Name, Program]) -> frozenset[Still]:
        """What does not move now: it moved nothing a moment ago, or its program waits and is not drained yet."""
        found = set(self._pieces.still)
        for name, one in programs.items():
            if self._hands.is_off(name) and not self._hands.is_drained(name):
                found |= {(gpu, name, way) for gpu in one.claims for way in Way}
        return frozenset(found)

    def _none(self) -> Plan:
        """Nothing is planned, while a GPU is lost: when it is back everything begins anew."""
        self.planner = Planner(self.planner.rates)
        self._begin_phase()
        return Plan()

    def _forget(self, there: Mapping[Name, Program]) -> None:
        self._pieces.forget(there)
        self._troubles = {name: trouble for name, trouble in self._troubles.items() if name in there}
        self._stands = {name: trouble for name, trouble in self._stands.items() if name in there}
        self._spared = {name: spared for name, spared in self._spared.items() if name in there}
        self._vain = {name: times for name, times in self._vain.items() if name in there}
        self._poor = {name: trouble for name, trouble in self._poor.items() if name in there}

    # Which programs wait

    async def _settle(self, programs: Mapping[Name, Program], plan: Plan) -> bool:
        """Has those wait that are to, and none else. Returns whether anything was to be done."""
        ends = [name for name in plan.waits if not self._hands.is_off(name)]
        begins = [name for name in programs if name not in plan.waits and not self._hands.is_on(name)]
        begins = [name for name in begins if _may(self._stands, name)]
        if not ends and not begins:
            return False
        if await self._pieces.rest():
            return True
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
        began_us = _now_us()
        try:
            await self._hands.begin(name)
        except OSError as error:
            telling.lever("begin", name, began_us, error=error.strerror)
            if error.errno != errno.ESRCH:
                _note(self._stands, name, BEGINS_AGAIN_S)
        else:
            telling.lever("begin", name, began_us)
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
        itself, and goes on to do so."""
        for last in (*[False] * (ENDS_TRIES - 1), True):
            began_us = _now_us()
            try:
                drained[name] = await self._hands.end(name, leaves)
            except OSError as error:
                telling.lever("end", name, began_us, error=error.strerror)
                if error.errno == errno.ESRCH:
                    return
                if last:
                    _note(self._troubles, name, AGAIN_S)
                    drained[name] = False
            else:
                telling.lever("end", name, began_us, drained=drained[name], leaves=sum(leaves.values()))
                return


def _lack(claims: Collection[Claim]) -> bool:
    """Whether so much of what these claim is in the host that it is worth a wait."""
    return sum(claim.missing for claim in claims) > LACKS * sum(claim.used for claim in claims)


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
