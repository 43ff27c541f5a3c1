"""How a turn of the scheduler ends: what is known of a program that has to wait for its next one."""

from __future__ import annotations

import enum

AHEAD_US = 10_000
"""Microseconds of work that a program which takes turns may be ahead of the GPU. A thread of a busy host is late by
less, so the engine does not wait for it; and so much, with the kernel that runs, is to be waited for when its turn
ends."""

YIELD_AHEAD_US = 100
"""Microseconds of work, of the running kernel too, that a program which goes behind another one may have left on the
GPU as it launches more: the other waits for so much, and for what is launched then, once in a busy period. Some times
as long as it takes a thread to be there and to launch the next kernel."""

HOLD_US = 200
"""Microseconds for which programs of worse priority are held after the last request of a better one, by default: what a
switch to them and back costs."""

HOLD_MOST_US = 1_000
"""Microseconds of that, at most: HOLD_AFTER_US_MOST of cuda/library/driver/hold.h."""

AHEAD_S = 10.0
"""Seconds after its last turn in which a program is bound to that: one that is alone on the GPU need not be."""


class TurnEnd(enum.Enum):
    """State of a program at the end of its turn."""

    DRAINED = "drained"
    """It launches nothing more, and nothing of it runs: its memory moves while it waits."""
    LATE = "late"
    """It launches nothing more, or will not once memory of it has moved, but something that it launched runs still: its
    memory stays until its turn."""
    UNGATED = "ungated"
    """Nothing holds its launches: it has no library, or one without a gate of turns, or the gate has to stay open."""
