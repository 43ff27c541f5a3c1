"""Allowed answers to each action on programs whose turns change.

They follow from the actions that were begun before the answer, in the life of that daemon, and from the state of the
program when the action began.
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
"""Actions after which memory of `a` may have to stay where it is."""

GONE = {errno.ENOENT, errno.ESRCH, errno.ENODEV}
"""Errnos for a program that died meanwhile."""


class Moves(enum.Enum):
    """How memory of a program moves in its turn, or while it waits for its turn."""

    AT_ONCE = enum.auto()
    """Nothing keeps it; if the program drains, it is kept only for a short time."""
    IN_VAIN = enum.auto()
    """It would move after kernels that are on the runlist, and these do not end."""
    NOT = enum.auto()
    """The engines that move it, or the kernels that it waits for, are off the runlist."""


@attrs.frozen
class Found:
    """The state of a program when a write of its limit begins, or is answered."""

    is_over: bool
    """Whether it has more on the GPU than that limit leaves it."""
    moves: Moves
    is_away: bool
    """Whether a write that moves the program is in progress."""


@attrs.define
class Answers(Programs):
    """The allowed answers; see the module."""

    begun: list[str] = attrs.field(factory=list)
    """Actions of this order that were begun in the life of this daemon."""
    away: set[str] = attrs.field(factory=set)
    """Programs whose move is requested and not answered."""

    def done_to(self, name: str, begun: Sequence[str] | None = None) -> list[str]:
        """Return the actions begun on a program or its slice."""
        return [one.split()[0] for one in (self.begun if begun is None else begun) if acted_on(one) == name]

    def gives(self, name: str) -> bool:
        """Return whether memory of a program moves, judging by the actions begun in this order."""
        return HOLDS.isdisjoint(self.done_to(name)) and self.can_give(name)

    def can_give(self, name: str) -> bool:
        """Return whether memory of a program moves where no action is done to it."""
        return self.stage.kind.gives if name == "a" else not self.is_ungated(name)

    def is_ungated(self, name: str) -> bool:
        """Return whether a program waits for its turn without its copy engines: `a` has no gate, or the gate of another
        program was held as it was to open, and its turn has ended since."""
        if name == "a":
            return self.stage.kind.end is TurnEnd.UNGATED
        known = self.h.controller.population
        return self.lives(name) and known.record(self.member(name)).compute.turn_end is TurnEnd.UNGATED

    def is_last(self, verb: str, name: str) -> bool:
        """Return whether `verb`, freeze or thaw, is what holds for a program, and it is there."""
        done = self.done_to(name)
        asked = [one for one in done if one in ("freeze", "thaw")]
        return asked[-1:] == [verb] and {"migrate", "kill"}.isdisjoint(done)

    def found(self, name: str) -> Found:
        """Return the present state of a program."""
        is_over = self.program(name).resident > HELD_BYTES - GIVEN_BYTES
        return Found(is_over, self.moves_of(name), name in self.away)

    def moves_of(self, name: str) -> Moves:
        """Return how memory of a program moves, judging by its turn."""
        if not self.lives(name):
            return Moves.NOT
        end = self.h.controller.population.record(self.member(name)).compute.turn_end
        ends_soon = end is TurnEnd.LATE and (name != "a" or self.stage.kind.gives)
        if end in (None, TurnEnd.DRAINED) or ends_soon:
            return Moves.AT_ONCE
        is_off = without(self.stage.machine.programs[name])[0]
        if is_off or self.gpu._is_off(self.program(name).process):  # or its lever is being moved right now
            return Moves.NOT
        return Moves.IN_VAIN if end is TurnEnd.LATE else Moves.AT_ONCE

    def allowed(self, verb: str, name: str, before: Sequence[str], found: Found) -> set[int]:
        """Return the allowed answers, by now, to an action on a program that began after the actions `before` it;
        `found` is the program's state when the action began."""
        gone = GONE if "kill" in self.done_to(name) else set()
        match verb:
            case "limit":  # the slice's limit: another program gives where one cannot
                return {0} if any(map(self.gives, self.case.names)) else {0, errno.EBUSY, errno.EAGAIN}
            case "own_limit":
                return self.own_limit_says(name, self.done_to(name, before), found) | gone
            case "reclaim":
                return {0, *(() if self.gives(name) else (errno.EAGAIN,)), *gone}
            case "migrate":
                return {errno.EBUSY, *gone}
        return {0, *gone}

    def own_limit_says(self, name: str, before: Sequence[str], found: Found) -> set[int]:
        """Return the allowed answers to a write of one program's limit: 0 wherever the program waits for its turn,
        unless something else keeps its memory. Writes to one program are serialized, so later actions do not change the
        answer."""
        if not found.is_over:
            return {0}
        now = self.found(name)
        taken = set() if now.is_over else {0}  # the limit of its slice has taken the memory meanwhile
        if "swap_max" in before:
            return {errno.EBUSY} | taken
        levers = [one for one in before if one in ("freeze", "thaw", "migrate")]
        if [one for one in levers if one != "migrate"][-1:] == ["freeze"]:
            # After a move the program is frozen again soon: before or after a limit write that waited for the move.
            soon = {errno.EAGAIN} if levers[-1] == "migrate" and found.is_away else set()
            return {errno.EBUSY} | soon | taken
        match found.moves:
            case Moves.NOT:
                return {errno.EBUSY} | taken
            case Moves.IN_VAIN:
                return {errno.EAGAIN} | taken
        if now.moves is Moves.AT_ONCE:
            return {0}
        # Its turn has ended meanwhile; if it was being moved in that turn, its library was not connected.
        return {errno.EAGAIN} | (taken if "migrate" in levers else {0})
