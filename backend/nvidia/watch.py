"""The keeper's state of one process: when it was last due, and what was seen then."""

from __future__ import annotations

import attrs


@attrs.define
class Watch:
    """The state of one process (keeper.py)."""

    asked: int = 0
    """When it was last asked whether it undid its freeze, by a count of questions."""
    is_asked: bool | None = None
    """Whether a caller froze it, rather than the scheduler for a moment; None before that is known."""
    sliced: int = 0
    """When it was last asked for its timeslices, by the same count."""
    used: int | None = None
    """Time that it had had the engine at the last look at that, microseconds; None where unknown."""
    looked_at: float = 0.0
    """Time when it was last due for a look for new TSGs, seconds."""
    looks_made: int = 0
    """Number of times that it was due."""
    kept_at: float = 0.0
    """Time of the last check whether its hardware is behind, seconds."""
    totals: tuple[int, ...] | None = None
    """The host's totals at its last look."""
