"""Orders of what is done while the turns of programs change: programs, steps of a change, and actions at one of them.

Programs of one slice change places: `a` has its turn and `b` waits, whose memory is protected; then `b` has it, and `a`
again. There may be a third, `c`, that waits too, and gives memory where `a` cannot. What is done at one step is begun
in order, and is still going on when the next step comes where it takes longer than that. What is asked of a daemon that
ends meanwhile is asked no more; the next daemon goes on with the rest.
"""

from __future__ import annotations

import attrs

from backend.core.turns import TurnEnd
from backend.scheduler.ends import DRAIN_US
from tests.support.cuda_session import GIB

STEPS = ("runs", "asked", "drains", "ended", "off", "next", "begins")
"""Steps of a change: `a` runs; it was asked to close its gate; that is closed and kernels of it run; its turn has ended
and all its engines are on; GR is off; the gate of `b` is about to open; that of `a` is about to open again."""

WAITED_FOR = ("asked", "drains")
"""Those of them at which a program is waited for that has not answered yet; for long only where its time is long."""

DRAINING = ("runs", "ended", "next", "waits", "drained", "off", "begins")
"""Those of a program that drains on the runlist: it runs; its turn has ended; the gate of `b` is about to open; it was
asked once more; it is drained, or given up, and all its engines are on; GR is off; its gate is about to open."""

ONE = ("own_limit", "low", "swap_max", "reclaim", "freeze", "thaw", "migrate", "kill")
"""What may be done to a program: to `a`, or to the one whose name comes after it ("freeze b")."""

ACTIONS = ("limit", *ONE[:-1], "upgrade", "kill_daemon", "kill")
"""What may be done: to `a`, to its slice, or to the daemon."""

HELD_BYTES = 4 * GIB
"""What each program has on the GPU at first."""

GIVEN_BYTES = 2 * GIB
"""What a limit takes: that of the slice from what `a` has, or `c`, and nothing of `b`; that of `a` from it alone."""

BOUND_US, SHORT_US = 10_000_000, 50_000
"""Microseconds that a program has to drain; and one whose kernel does not end."""

SOON_S, SPIN_S = 0.15, 3600.0
"""Seconds of what one runs that drains, and of a kernel that does not end."""

OWN_SLICE_US = 2048
"""Slice that the driver gives a program, microseconds."""

MOMENT_S = 0.03
"""Seconds of virtual time from one action to the next."""

SETTLED_S = 3.0
"""Seconds in which what was begun comes to its end."""


@attrs.frozen
class Kind:
    """What `a` may be."""

    end: TurnEnd
    """How its turn ends at first."""
    bound_us: int = BOUND_US
    """Microseconds that it has for that."""
    drain_s: float = 0.0
    """Seconds of what it runs then."""
    drained: TurnEnd | None = None
    """How its drain ends, of one that stays on the runlist."""
    stays: bool = False
    """Whether it does."""
    returns: bool = False
    """Whether its next turn begins while it drains."""
    gives: bool = False
    """Whether its memory moves whenever nothing else keeps it."""


KINDS = {
    "gated": Kind(TurnEnd.DRAINED, gives=True),
    "late": Kind(TurnEnd.LATE, SHORT_US, SPIN_S),
    "ungated": Kind(TurnEnd.UNGATED),
    "drains": Kind(TurnEnd.LATE, DRAIN_US, SOON_S, TurnEnd.DRAINED, stays=True, gives=True),
    "stuck": Kind(TurnEnd.LATE, DRAIN_US, SPIN_S, TurnEnd.LATE, stays=True),
    "returns": Kind(TurnEnd.LATE, DRAIN_US, SPIN_S, None, stays=True, returns=True),
}
"""By names of them. Those that stay are waited for as the scheduler does."""


def acted_on(action: str) -> str:
    """The program that an action is done to."""
    return action.partition(" ")[2] or "a"


@attrs.define
class Case:
    """One order: actions at one step."""

    step: str
    actions: list[str]
    """Those that are left to do."""
    all: tuple[str, ...] = attrs.Factory(lambda self: tuple(self.actions), takes_self=True)
    names: tuple[str, ...] = ("a", "b")
    """The programs."""
