"""Orders of actions during a change of turns: programs, steps of a change, and actions at one of the steps.

Programs of one slice change places: `a` has its turn and `b`, whose memory is protected, waits; then `b` has its turn,
and `a` again. There may be a third program, `c`, that also waits, and gives memory where `a` cannot. The actions at a
step are begun in order; one that takes longer is still in progress at the next step. If the daemon ends, its unfinished
actions are not repeated; the next daemon goes on with the rest.
"""

from __future__ import annotations

import attrs

from backend.core.turns import TurnEnd
from backend.scheduler.ends import DRAIN_US
from tests.support.cuda_session import GIB

STEPS = ("runs", "asked", "drains", "ended", "off", "next", "begins")
"""Steps of a change: `a` runs; it was asked to close its gate; the gate is closed and kernels still run; its turn has
ended and all its engines are on; GR is off; the gate of `b` is about to open; the gate of `a` is about to open
again."""

WAITED_FOR = ("asked", "drains")
"""Steps at which a program is waited for that has not answered yet; for long only where its bound is long."""

DRAINING = ("runs", "ended", "next", "waits", "drained", "off", "begins")
"""Steps for a program that drains on the runlist: it runs; its turn has ended; the gate of `b` is about to open; it was
asked once more; it is drained, or given up, and all its engines are on; GR is off; its gate is about to open."""

ONE = ("own_limit", "low", "swap_max", "reclaim", "freeze", "thaw", "migrate", "kill")
"""Actions on a program: on `a`, or on the program whose name follows ("freeze b")."""

ACTIONS = ("limit", *ONE[:-1], "upgrade", "kill_daemon", "kill")
"""All actions: on `a`, on its slice, or on the daemon."""

HELD_BYTES = 4 * GIB
"""Bytes that each program has on the GPU at first."""

GIVEN_BYTES = 2 * GIB
"""Bytes that a limit takes: the slice's takes them from `a` or `c`, and none from `b`; that of `a` from `a` alone."""

BOUND_US, SHORT_US = 10_000_000, 50_000
"""Microseconds that a program has to drain: the usual bound, and the one for a program whose kernel does not end."""

SOON_S, SPIN_S = 0.15, 3600.0
"""Seconds of the work of a program that drains, and of a kernel that does not end."""

OWN_SLICE_US = 2048
"""Timeslice that the driver gives a program, in microseconds."""

MOMENT_S = 0.03
"""Virtual seconds from one action to the next."""

SETTLED_S = 3.0
"""Virtual seconds within which all that was begun must end."""


@attrs.frozen
class Kind:
    """A kind of program that `a` may be."""

    end: TurnEnd
    """How its turn ends at first."""
    bound_us: int = BOUND_US
    """Microseconds that it has to end its turn."""
    drain_s: float = 0.0
    """Seconds of the work that it then still has."""
    drained: TurnEnd | None = None
    """How its drain ends, if it stays on the runlist."""
    stays: bool = False
    """Whether it stays on the runlist to drain."""
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
"""Kinds by name. Those that stay are waited for as the scheduler does it."""


def acted_on(action: str) -> str:
    """Return the name of the program that an action is done to."""
    return action.partition(" ")[2] or "a"


@attrs.define
class Case:
    """One order: actions at one step."""

    step: str
    actions: list[str]
    """Actions that are left to do."""
    all: tuple[str, ...] = attrs.Factory(lambda self: tuple(self.actions), takes_self=True)
    names: tuple[str, ...] = ("a", "b")
    """Names of the programs."""
