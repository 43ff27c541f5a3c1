"""Constants of turns, and the states in which a program's turn can end."""

from __future__ import annotations

import enum

AHEAD_US = 10_000
"""Run-ahead of a program that takes turns, microseconds of work. A thread on a busy host is late by less, so the engine
does not wait for it. The end of a turn waits for this much work and the running kernel.
"""

YIELD_AHEAD_US = 100
"""Run-ahead of a program that goes behind another one, microseconds of work, including the running kernel. Once in a
busy period the other program waits for this and for what is launched then. It is a few times the delay of a thread that
wakes and launches the next kernel.
"""

HOLD_US = 200
"""Default time for which programs of worse priority are held after the last request of a better one, microseconds: the
cost of a switch to them and back.
"""

HOLD_MOST_US = 1_000
"""Longest such time that can be set, microseconds: HOLD_AFTER_US_MOST of cuda/library/driver/hold.h."""

AHEAD_S = 10.0
"""Seconds after its last turn for which AHEAD_US binds a program; one that is alone on the GPU need not be bound."""


class TurnEnd(enum.Enum):
    """State of a program at the end of its turn."""

    DRAINED = "drained"
    """The program launches nothing more, and none of its work runs: its memory can move while it waits."""
    LATE = "late"
    """Its launches have stopped, or will once a move of its memory is over, but some of its work still runs: its memory
    stays until its next turn.
    """
    UNGATED = "ungated"
    """Nothing holds its launches: it has no library, or one without a gate for turns, or the gate has to stay open."""
