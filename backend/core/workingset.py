"""Working sets: the memory that a program uses in one turn, in sums."""

from __future__ import annotations

from typing import Final

import attrs

ANY: Final = "any"
"""Name of GPU memory of which is not known which process it is shared with: any that shares some may be it."""


@attrs.frozen
class WorkingSet:
    """The memory that a program used in its last turn that ended, or in the last second that it ran, if that is longer;
    in the turn under way where none has ended yet."""

    used: int = 0
    """Bytes that its kernels used in that turn, and that it has still."""
    resident: int = 0
    """Bytes of them that are on the GPU now."""
    unwritten: int = 0
    """Bytes that the program has on the GPU, used or not, and that it was found not to have written since the host had
    them last: these go without being copied."""

    missed: int = 0
    """Bytes that its kernels used in that turn and had not in the one before: those came for it by the way."""
    over: int = 0
    """Bytes that they used in the turn before and not in that: those were there in vain."""

    def __add__(self, other: WorkingSet) -> WorkingSet:
        return WorkingSet(
            *(one + another for one, another in zip(attrs.astuple(self), attrs.astuple(other), strict=True))
        )

    @property
    def missing(self) -> int:
        """Bytes of them that are in the host: what is to be fetched before it runs at full speed."""
        return self.used - self.resident
