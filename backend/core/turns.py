"""How a turn of the scheduler ends: what is known of a program that has to wait for its next one."""

from __future__ import annotations

import enum


class TurnEnd(enum.Enum):
    """State of a program at the end of its turn."""

    DRAINED = "drained"
    """It launches nothing more, and nothing of it runs: its memory moves while it waits."""
    LATE = "late"
    """It launches nothing more, or will not once memory of it has moved, but something that it launched runs still: its
    memory stays until its turn."""
    UNGATED = "ungated"
    """Nothing holds its launches: it has no library, or one without a gate of turns, or the gate has to stay open."""
