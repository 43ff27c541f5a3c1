"""What is kept of processes below quotas, of those that are there and of those that have ended."""

from __future__ import annotations

import enum

import attrs

from backend.core.records import Activity
from backend.scheduler.quota import Account


class Act(enum.Enum):
    """What is done with a process for its quota, with what the log says where that fails."""

    SPEND = "cannot be held to its quota"
    """Has it stand."""
    STOP = "cannot be held to its quota, as its gate does not"
    """Has one that stands at its gate be without its GR engine."""
    RESTORE = "does not go on, though its quota has it"
    """Has it go on."""


@attrs.define
class Failing:
    """Something that fails with a process."""

    since: float
    """When it did for the first time, by trio's clock."""
    wait_s: float = 0.0
    """Seconds for which it was put off the last time; 0 where it was not."""
    again: float = 0.0
    """When it is tried again, by trio's clock."""
    is_told: bool = False
    """Whether the log says so."""


@attrs.define(eq=False)
class Limited:
    """A process below a quota."""

    accounts: tuple[Account, ...]
    """Those of the process itself and of the slices above it; none where it only has to go on."""
    apart: frozenset[Account] = frozenset()
    """Those of them that other programs of its space do not have: a lever stops all of a space, so none is pulled for
    these."""
    contexts: int = 1
    """Calls that a lever takes."""
    pending: int | None = None
    """Kernels that it had launched and that were not done, at the last look; None where it does not count them."""
    levers: bool | None = None
    """Whether it takes calls of the driver to have it stand; None before that is known."""
    is_bound: bool = False
    """Whether it has stood before, so that its library bounds what it launches ahead."""
    holds: bool = False
    """Whether its gate alone stopped it the last time: it did no more there than it may be ahead."""
    overran: bool = False
    """Whether it did more at its gate than that the last time. Once, that may be what it launched before it was
    bound."""
    demand: int = 0
    """Calls in a cycle of all that are below the same quota at the top: those with few go first."""
    quota_us: int | None = None
    """Quota that this process alone has in a cycle, microseconds; None where it shares each of its quotas with
    others."""
    equals: object = None
    """What is the same for processes that may have periods in turns."""
    waits: bool = False
    """Whether another one of its rota works in this period."""
    rests_us: int = 0
    """Until when it has no period of a rota, microseconds: it left one to which it had no work."""
    stood: bool = False
    """Whether it was to stand at any time since the scheduler asked."""
    wants_sight: bool = False
    """Whether it is to be on the runlist for long enough in one go that samples tell of it."""
    part: float = 1.0
    """Part of its time on the engine that it is taken to work."""
    pace: float = 1.0
    """Part of its time on the runlist that it is charged for."""
    busy: bool = False
    """Whether it is being had stand, or go on."""
    is_pulled: bool = False
    """Whether it was since the last look."""
    is_behind: bool = False
    """Whether it is to go on, and does not for all that is known: its lever moves, or failed."""
    failing: dict[Act, Failing] = attrs.field(factory=dict)
    """What failed the last time."""

    @property
    def is_spent(self) -> bool:
        """Whether it is to stand."""
        return self.waits or any(account.is_spent for account in self.accounts)

    @property
    def is_gated(self) -> bool:
        """Whether its gate alone is to stop it."""
        spent = [account for account in self.accounts if account.is_spent]
        return bool(self.apart) and self.apart.issuperset(spent) and not self.waits

    def let_go(self) -> None:
        """No quota holds it any more."""
        self.apart = frozenset()
        self.accounts, self.equals, self.waits, self.rests_us, self.demand = (), None, False, 0, 0


@attrs.define
class Gone:
    """A process below a quota that has ended, and of which not all is known yet."""

    accounts: tuple[Account, ...]
    """Those above it, as it ended."""
    activity: Activity
    """What was told of it then; with the rest, once that has come."""
    at_us: int
    """When it ended, microseconds."""
    is_told: bool = False
    """Whether the rest has come."""
