"""Working sets: the memory that a program uses in one turn, in sums."""

from __future__ import annotations

import attrs


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

    def __add__(self, other: WorkingSet) -> WorkingSet:
        return WorkingSet(self.used + other.used, self.resident + other.resident, self.unwritten + other.unwritten)

    @property
    def missing(self) -> int:
        """Bytes of them that are in the host: what is to be fetched before it runs at full speed."""
        return self.used - self.resident
