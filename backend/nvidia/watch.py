"""What the keeper remembers of a process: when it was its turn, and what was seen then."""

from __future__ import annotations

import attrs


@attrs.define
class Watch:
    """See the module (keeper.py)."""

    asked: int = 0
    """When it was last asked whether it undid its detach, by a count of questions."""
    is_asked: bool | None = None
    """Whether a caller froze it, and not only the scheduler for a moment."""
    sliced: int = 0
    """When it was last asked for its timeslices, by the same count."""
    used: int | None = None
    """The time that it had had the engine when that was last looked at, microseconds."""
    looked_at: float = 0.0
    """When it was last its turn to be looked at for new TSGs, seconds."""
    looks_made: int = 0
    """How often it was."""
    kept_at: float = 0.0
    """When it was last looked whether the hardware is behind, seconds."""
    totals: tuple[int, ...] | None = None
    """What the host had made of objects by then."""
