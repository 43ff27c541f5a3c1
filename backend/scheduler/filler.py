"""Who fills what others leave: one at a time, in turns.

Several on the runlist with the shortest slices would switch among themselves all the time, and who goes before them
would have to wait for all of them. So who has something to do is off the runlist until it is his turn; who has nothing
to do stays there, so that it is seen when he has.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from backend.identity import Process
from backend.scheduler.shares import Layer
from backend.scheduler.use import HUNGRY_US, Use

TURN_US = 500_000
"""For how long one is on the runlist before the next one is: two calls of the driver each time."""
TRICKLE = 0.01
"""The part of the time that those behind the first layer have in any case: nobody starves."""
OWED_MOST_US = 2 * TURN_US
"""Of what those are owed, the most that is remembered."""


@attrs.define
class Filler:
    """Whose turn it is."""

    _had: dict[Process, float] = attrs.field(factory=dict)  # time of turns, by the part that was due
    _current: Process | None = None
    _left: int = 0  # microseconds of its turn
    _owed: float = 0.0  # microseconds, to those behind the first layer

    def off(self, window_us: int, layers: Sequence[Layer], use: Use, spare_us: int) -> set[Process]:
        """Who is to be off the runlist. In the last window nobody used the engine for `spare_us` microseconds."""
        hungry = [{p: part for p, part in layer.items() if use.wants(p, HUNGRY_US)} for layer in layers]
        hungry = [layer for layer in hungry if layer]
        parts = {process: part for layer in hungry for process, part in layer.items()}
        self._had = {process: had for process, had in self._had.items() if process in parts}
        newest = min(self._had.values(), default=0.0)
        for process in parts:
            self._had.setdefault(process, newest)
        if self._current in parts:
            self._charge(window_us, hungry, parts, spare_us)
        if len(parts) < 2:
            self._current = next(iter(parts), None)
            self._left = 0
        elif self._current not in parts or self._left <= 0:
            self._current = self._next(hungry)
            self._left = TURN_US
        return {process for process in parts if process != self._current}

    def _charge(self, window_us: int, hungry: Sequence[Layer], parts: Layer, spare_us: int) -> None:
        assert self._current is not None
        self._left -= window_us
        self._had[self._current] += window_us / parts[self._current]
        if len(hungry) < 2:
            self._owed = 0.0
        elif self._current in hungry[0]:
            # What the first left unused, those behind could have used.
            self._owed = min(OWED_MOST_US, self._owed + max(TRICKLE * window_us, spare_us))
        else:
            self._owed -= window_us

    def _next(self, hungry: Sequence[Layer]) -> Process:
        """Whoever had the least, of the first layer or, when they are owed a turn, of those behind."""
        choice = hungry[0].keys()
        if len(hungry) > 1 and self._owed >= TURN_US:
            choice = {process: 0.0 for layer in hungry[1:] for process in layer}.keys()
        return min(choice, key=lambda process: self._had[process])
