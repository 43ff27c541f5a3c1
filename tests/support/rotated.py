"""Programs with memory turns on one or several GPUs, by the real planner, in simulated time.

Moves use a bus with two directions, each as fast as the planner assumes, and go only into room that is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from backend.scheduler.memory.claims import Claim, Claims, Name, Rates
from backend.scheduler.memory.moves import Moves, Share, after
from backend.scheduler.memory.planner import Plan, Planner, Program
from backend.scheduler.memory.turns import AT_ONCE_US, OVERHEAD_US

TICK_US = 10_000
"""Time between two looks, microseconds."""
BUS = 40
"""Factor by which host memory is slower to read than GPU memory, for a program that uses all of its memory."""


@attrs.define
class Seen:
    """Observations of one program."""

    since_us: int | None = None
    """Time since which it has waited, microseconds."""
    bound_us: int = 0
    """Longest bound that was given for this wait, microseconds; the bound shrinks once a program has left."""
    longest_us: int = 0
    """Longest wait, microseconds."""
    ran_us: int = 0
    """Time in which it had its turn, or did not have to wait for one, microseconds."""
    worked_us: float = 0.0
    """Work done in that time, in microseconds that it takes with all of its memory on the GPU."""


class World:
    """The simulated programs and GPUs."""

    def __init__(self, programs: Mapping[Name, Program], rooms: Mapping[int, int], rates: Rates) -> None:
        self.programs = dict(programs)
        self.rooms = dict(rooms)
        self.rates = rates
        self.planner = Planner(rates)
        self.now_us = 0
        self.seen: dict[Name, Seen] = {name: Seen() for name in programs}
        self.fetched = self.evicted = self.written = 0
        self.turns = 0
        """Number of turns that have begun."""
        self.stalled_us = 0
        """Time in which no set had its turn, microseconds."""
        self.over_us = 0
        """Greatest excess of a program's wait over its bound, microseconds."""
        self.plan = Plan()
        self.ran: frozenset[Name] = frozenset()
        """Programs that had their turn at the last look, as noted by a test."""
        self._starts_us: int | None = None  # when the next turn begins, once that is decided
        self._saved_us = AT_ONCE_US  # driver calls in the budget, as the time in which they come back
        self._saved_at_us = 0

    def run(self, usec: int) -> None:
        """Simulate `usec` microseconds."""
        end_us = self.now_us + usec
        while self.now_us < end_us:
            self.step()

    def step(self) -> None:
        """Decide, apply the decision, and let time pass until the next look."""
        turns = self.planner.turns
        self.plan = plan = self.planner.decide(self.now_us, self.programs, self.rooms)
        if plan.has_turns and not plan.is_over and plan.ends_us is not None and self.now_us >= plan.ends_us:
            self._pull(turns.current or frozenset(), 1 / 3)
            turns.end(self.now_us)
            self._starts_us = None
            self.plan = plan = self.planner.decide(self.now_us, self.programs, self.rooms)
        if plan.is_over and self._starts_us is None:
            assert plan.ends_us is not None
            if self.now_us >= plan.ends_us or not any(moves.ins for moves in plan.moves.values()):
                self._pull(plan.coming, 2 / 3)
                self._starts_us = self.now_us + OVERHEAD_US + max(0, -self._saved_us)  # a drain, and the levers
        if self._starts_us is not None and self.now_us >= self._starts_us:
            turns.begin(self.now_us)
            self._starts_us = None
            self.turns += 1
            self.plan = plan = self.planner.decide(self.now_us, self.programs, self.rooms)
        self._see(plan)
        # To the next look, or to the end of the turn if that is sooner.
        next_us = self.now_us + TICK_US
        for at in (plan.ends_us, self._starts_us):
            if at is not None and self.now_us < at < next_us:
                next_us = at
        for gpu, moves in plan.moves.items():
            self._move(gpu, moves, next_us - self.now_us, plan)
        if plan.has_turns and plan.is_over:
            self.stalled_us += next_us - self.now_us
        for name in self.programs.keys() - plan.waits:
            self.seen[name].ran_us += next_us - self.now_us
            self.seen[name].worked_us += (next_us - self.now_us) * _speed(self.programs[name])
        self.now_us = next_us

    def _pull(self, names: Iterable[Name], part: float) -> None:
        """Take `part` of the driver calls for the turns of some programs."""
        self._saved_us = min(AT_ONCE_US, self._saved_us + self.now_us - self._saved_at_us)
        self._saved_at_us = self.now_us
        self._saved_us -= round(part * sum(self.programs[n].waiter.levers_us for n in names if n in self.programs))

    def _see(self, plan: Plan) -> None:
        for name in self.programs:
            seen = self.seen.setdefault(name, Seen())
            if name not in plan.waits:
                seen.since_us = None
                continue
            if seen.since_us is None:
                seen.since_us, seen.bound_us = self.now_us, 0
            waited_us = self.now_us - seen.since_us
            seen.longest_us = max(seen.longest_us, waited_us)
            seen.bound_us = max(seen.bound_us, self.planner.turns.bound_us(name))
            self.over_us = max(self.over_us, waited_us - seen.bound_us)

    def _move(self, gpu: int, moves: Moves, usec: int, plan: Plan) -> None:
        """Move memory for `usec` microseconds."""
        claims = {name: one.claims[gpu] for name, one in self.programs.items() if gpu in one.claims}
        outs = _first(moves.outs, self.rates.out_in(usec))
        ins = _first([Share(one.name, one.nbytes, one.nbytes) for one in moves.ins], self.rates.into_in(usec))
        free = self.rooms[gpu] - sum(one.held for one in claims.values()) + sum(one.nbytes for one in outs)
        fits = [attrs.evolve(one, written=0) for one in _first(ins, max(0, free))]
        made = Moves(outs, fits)
        running = self.programs.keys() - plan.waits
        wakes = plan.coming if plan.has_turns else frozenset()
        assert all(one.name not in running - wakes or not self.programs[one.name].has_work for one in (*outs, *fits))
        before = self.held(gpu)
        for name, claim in after(claims, made).items():
            self.claim(name, gpu, claim)
        assert self.held(gpu) <= max(before, self.rooms[gpu])
        self.fetched += made.fetched
        self.evicted += made.evicted
        self.written += made.written

    def held(self, gpu: int) -> int:
        """Return the bytes that all programs have on a GPU."""
        return sum(one.claims[gpu].held for one in self.programs.values() if gpu in one.claims)

    def claim(self, name: Name, gpu: int, claim: Claim) -> None:
        """Set the claim of a program on a GPU."""
        one = self.programs[name]
        self.programs[name] = attrs.evolve(one, claims={**one.claims, gpu: claim})

    def remove(self, name: Name) -> None:
        """End a program."""
        del self.programs[name]

    def claims(self, gpu: int = 0) -> Claims:
        """Return the claims of all programs on a GPU."""
        return {name: one.claims[gpu] for name, one in self.programs.items() if gpu in one.claims}


def _speed(program: Program) -> float:
    """Return the speed of a program with its present memory, relative to that with all of it."""
    used = sum(claim.used for claim in program.claims.values())
    missing = sum(claim.missing for claim in program.claims.values())
    return 1 / (1 + (BUS - 1) * missing / used) if used else 1.0


def _first(shares: Iterable[Share], most: int) -> list[Share]:
    """Return the first shares, up to `most` bytes that were written and need a copy."""
    found = []
    for share in shares:
        over = max(0, share.written - most)
        most -= share.written - over
        if share.nbytes > over:
            found.append(Share(share.name, share.nbytes - over, share.written - over))
        if over:
            break
    return found
