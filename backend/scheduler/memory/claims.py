"""Claims: what a program needs of the memory of one GPU to run at full speed, in sums.

Which memory that is only the library in the program knows, and in which order it is used first. It fetches in that
order, and gives what is not used before what is, the last in that order first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import attrs

from backend.core.settings import MAX

Name = Hashable
"""What a program is known by: a process, but for the tests of what is pure."""


@attrs.frozen
class Claim:
    """See the module. Bytes."""

    used: int
    """What it uses in one turn: its working set."""
    resident: int = 0
    """Bytes of that which are on the GPU."""
    cold: int = 0
    """What it has on the GPU besides, and can give."""
    unwritten: int = 0
    """Bytes that it has on the GPU and has not written since the host had them last: to give these costs nothing."""
    leaves: int = MAX
    """What it may give at most: its swap.max, its protection, the room in the host."""

    @property
    def missing(self) -> int:
        """Bytes of the working set that are in the host."""
        return self.used - self.resident

    @property
    def held(self) -> int:
        """What it has on the GPU, and can give as far as it may."""
        return self.resident + self.cold

    @property
    def stays(self) -> int:
        """Bytes that it has on the GPU besides its working set, and keeps whatever it gives: its contexts, say."""
        return min(self.cold, max(0, self.held - self.leaves))

    def given(self, nbytes: int) -> Claim:
        """Return what it claims once it gave so many bytes, at most what it may."""
        of_cold = min(nbytes, self.cold)
        return attrs.evolve(
            self,
            resident=self.resident - (nbytes - of_cold),
            cold=self.cold - of_cold,
            unwritten=max(0, self.unwritten - nbytes),
            leaves=self.leaves if self.leaves >= MAX else self.leaves - nbytes,
        )

    def fetched(self, nbytes: int) -> Claim:
        """Return what it claims once so many bytes that it lacked are there, at most all of them."""
        return attrs.evolve(self, resident=self.resident + nbytes)


Claims = Mapping[Name, Claim]
"""Those of all programs on one GPU."""


@attrs.frozen
class Rates:
    """What the bus carries, each way while the other is as busy; bytes a second."""

    out: int
    """From the GPU to the host."""
    into: int
    """From the host to the GPU."""

    def into_usec(self, nbytes: int) -> int:
        """Return the microseconds that so many bytes take to the GPU."""
        return -(-nbytes * 1_000_000 // self.into)

    def out_usec(self, nbytes: int) -> int:
        """Return the microseconds that so many bytes take to the host."""
        return -(-nbytes * 1_000_000 // self.out)

    def into_in(self, usec: int) -> int:
        """Return how many bytes come to the GPU in so many microseconds."""
        return usec * self.into // 1_000_000

    def out_in(self, usec: int) -> int:
        """Return how many bytes go to the host in so many microseconds."""
        return usec * self.out // 1_000_000
