"""Working sets: how much memory a program uses in one turn, in bytes."""

from __future__ import annotations

from typing import Final

import attrs

ANY: Final = "any"
"""Name of shared GPU memory whose other user is not known: it may be any process that shares memory."""


@attrs.frozen
class WorkingSet:
    """Use of memory by a program in its last finished turn, or in the last second that it ran if that is longer; in the
    present turn if none has finished yet.
    """

    used: int = 0
    """Bytes that its kernels used in that turn and that are still allocated."""
    resident: int = 0
    """Bytes of `used` that are on the GPU now."""
    unwritten: int = 0
    """Bytes on the GPU, used or not, that the program was found not to have written since the host last had them: these
    are moved out without a copy.
    """

    missed: int = 0
    """Bytes used in that turn but not in the one before: they were fetched on demand."""
    over: int = 0
    """Bytes used in the turn before but not in that turn: they were fetched in vain."""

    def __add__(self, other: WorkingSet) -> WorkingSet:
        return WorkingSet(
            *(one + another for one, another in zip(attrs.astuple(self), attrs.astuple(other), strict=True))
        )

    @property
    def missing(self) -> int:
        """Bytes of `used` that are in the host, to be fetched before the program runs at full speed."""
        return self.used - self.resident
