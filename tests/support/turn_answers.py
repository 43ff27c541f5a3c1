"""What each action on programs whose turns change may be answered.

It follows from the actions that were begun before it was answered, in the life of that daemon, and from how its program
was found as it began.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Sequence

import attrs

from backend.core.turns import TurnEnd
from tests.support.turn_orders import GIVEN_BYTES, HELD_BYTES, acted_on
from tests.support.turn_programs import Programs
from tests.support.turns import without

HOLDS = {"freeze", "migrate", "swap_max", "kill"}
"""After these memory of `a` may have to stay where it is."""

GONE = {errno.ENOENT, errno.ESRCH, errno.ENODEV}
"""What is said of a program that died meanwhile."""


class Moves(enum.Enum):
    """How memory of a program moves in its turn, or while it waits for that."""

    AT_ONCE = enum.auto()
    """Nothing keeps it; of what drains, not for long."""
    IN_VAIN = enum.auto()
    """It would once kernels have ended that are on the runlist and do not end."""
    NOT = enum.auto()
    """What moves it is off the runlist, or what it waits for."""


@attrs.frozen
class Found:
    """A program as a write of its limit begins, or is answered."""

    is_over: bool
    """Whether it has more on the GPU than that limit leaves it."""
    moves: Moves
    is_away: bool
    """Whether a write that moves it is under way."""


@attrs.define
class Answers(Programs):
    """See the module."""

    begun: list[str] = attrs.field(factory=list)
    """Actions of this order that were begun, in the life of this daemon."""
    away: set[str] = attrs.field(factory=set)
    """Programs whose move is asked for, and not answered."""

    def done_to(self, name: str, begun: Sequence[str] | None = None) -> list[str]:
        """What was begun with a program, or its slice."""
        return [one.split()[0] for one in (self.begun if begun is None else begun) if acted_on(one) == name]

    def gives(self, name: str) -> bool:
        """Whether memory of a program moves, as far as what was begun in this order goes."""
        return HOLDS.isdisjoint(self.done_to(name)) and self.can_give(name)

    def can_give(self, name: str) -> bool:
        """Whether memory of a program moves wherever nothing is done to it."""
        return self.stage.kind.gives if name == "a" else not self.is_ungated(name)

    def is_ungated(self, name: str) -> bool:
        """Whether a program waits for its turn without its copy engines: `a` has no gate, or that of another was held
        as it was to open, and its turn has ended since."""
        if name == "a":
            return self.stage.kind.end is TurnEnd.UNGATED
        known = self.h.controller.population
        return self.lives(name) and known.record(self.member(name)).compute.turn_end is TurnEnd.UNGATED

    def is_last(self, verb: str, name: str) -> bool:
        """Whether it holds that a program was frozen, or thawed, and it is there."""
        done = self.done_to(name)
        asked = [one for one in done if one in ("freeze", "thaw")]
        return asked[-1:] == [verb] and {"migrate", "kill"}.isdisjoint(done)

    def found(self, name: str) -> Found:
        """A program as it is now."""
        is_over = self.program(name).resident > HELD_BYTES - GIVEN_BYTES
        return Found(is_over, self.moves_of(name), name in self.away)

    def moves_of(self, name: str) -> Moves:
        """How memory of a program moves, as far as its turn goes."""
        if not self.lives(name):
            return Moves.NOT
        end = self.h.controller.population.record(self.member(name)).compute.turn_end
        ends_soon = end is TurnEnd.LATE and (name != "a" or self.stage.kind.gives)
        if end in (None, TurnEnd.DRAINED) or ends_soon:
            return Moves.AT_ONCE
        is_off = without(self.stage.machine.programs[name])[0]
        if is_off or self.gpu._is_off(self.program(name).process):  # or its lever is being pulled in this moment
            return Moves.NOT
        return Moves.IN_VAIN if end is TurnEnd.LATE else Moves.AT_ONCE

    def allowed(self, verb: str, name: str, before: Sequence[str], found: Found) -> set[int]:
        """What an action on a program may say by now that was begun after those `before` it, as it was found then."""
        gone = GONE if "kill" in self.done_to(name) else set()
        match verb:
            case "limit":  # of the slice: another program gives where one cannot
                return {0} if any(map(self.gives, self.case.names)) else {0, errno.EBUSY, errno.EAGAIN}
            case "own_limit":
                return self.own_limit_says(name, self.done_to(name, before), found) | gone
            case "reclaim":
                return {0, *(() if self.gives(name) else (errno.EAGAIN,)), *gone}
            case "migrate":
                return {errno.EBUSY, *gone}
        return {0, *gone}

    def own_limit_says(self, name: str, before: Sequence[str], found: Found) -> set[int]:
        """What is said of a limit of one program: 0 wherever it waits, unless something else keeps its memory. Writes
        of one program go one after the other, so what is done to it afterwards changes nothing of that."""
        if not found.is_over:
            return {0}
        now = self.found(name)
        taken = set() if now.is_over else {0}  # by the limit of its slice, meanwhile
        if "swap_max" in before:
            return {errno.EBUSY} | taken
        levers = [one for one in before if one in ("freeze", "thaw", "migrate")]
        if [one for one in levers if one != "migrate"][-1:] == ["freeze"]:
            # After a move it is frozen anew, soon: before the write of a limit that has waited for that, or after it.
            soon = {errno.EAGAIN} if levers[-1] == "migrate" and found.is_away else set()
            return {errno.EBUSY} | soon | taken
        match found.moves:
            case Moves.NOT:
                return {errno.EBUSY} | taken
            case Moves.IN_VAIN:
                return {errno.EAGAIN} | taken
        if now.moves is Moves.AT_ONCE:
            return {0}
        # Its turn has ended meanwhile; in that of a program that was to move its library did not speak.
        return {errno.EAGAIN} | (taken if "migrate" in levers else {0})
