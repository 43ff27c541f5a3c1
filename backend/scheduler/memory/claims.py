"""Claims: how much memory of one GPU a program needs to run at full speed, in bytes.

Only the library in the program knows which memory that is, and the order of its first use in a turn. It fetches in that
order. It gives memory outside the working set first, and then the working set, the last used first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import attrs

from backend.core.settings import MAX

Name = Hashable
"""Name of a program: a process, except in the tests of pure code."""


KEPT = 0.95
"""Part of what a program has, and uses, that low protects at least where it is taken to protect all of it."""


@attrs.frozen
class Claim:
    """What one program claims of the memory of one GPU, in bytes."""

    used: int
    """Working set: the bytes that it uses in one turn."""
    resident: int = 0
    """Bytes of the working set that are on the GPU."""
    cold: int = 0
    """Bytes that it has on the GPU outside its working set."""
    unwritten: int = 0
    """Bytes that it has on the GPU and has not written since the host last had them: moving these out costs nothing."""
    leaves: int = MAX
    """Bytes that it may move out at most, as bounded by its swap.max, its protection, and the room in the host."""
    protected: int = 0
    """Bytes of all that it has, or uses, that are not taken for others: its own low, and those above it, keep them."""

    @property
    def missing(self) -> int:
        """Bytes of the working set that are in the host."""
        return self.used - self.resident

    @property
    def held(self) -> int:
        """Bytes that it has on the GPU."""
        return self.resident + self.cold

    @property
    def stays(self) -> int:
        """Bytes outside the working set that remain on the GPU whatever is moved out, such as its contexts."""
        return min(self.cold, max(0, self.held - self.leaves))

    @property
    def is_kept(self) -> bool:
        """Whether low keeps all that it has, and uses."""
        return self.protected > 0 and self.protected >= KEPT * max(self.used, self.held)

    @property
    def kept(self) -> int:
        """Bytes of the working set that remain on the GPU while it waits, once they are there, as low keeps them."""
        return min(self.used, max(0, self.protected - self.stays))

    @property
    def spare(self) -> int:
        """Bytes outside the working set that can be moved out."""
        return self.cold - self.stays

    def protect(self, nbytes: int) -> Claim:
        """Return the claim where low protects `nbytes` of it."""
        return attrs.evolve(self, protected=nbytes, leaves=min(self.leaves, max(0, self.held - nbytes)))

    def given(self, nbytes: int) -> Claim:
        """Return the claim after `nbytes` were moved out; `nbytes` is at most `leaves`."""
        of_cold = min(nbytes, self.spare)
        return attrs.evolve(
            self,
            resident=self.resident - (nbytes - of_cold),
            cold=self.cold - of_cold,
            unwritten=max(0, self.unwritten - nbytes),
            leaves=self.leaves if self.leaves >= MAX else self.leaves - nbytes,
        )

    def fetched(self, nbytes: int) -> Claim:
        """Return the claim after `nbytes` of what it lacked were fetched; `nbytes` is at most `missing`."""
        return attrs.evolve(self, resident=self.resident + nbytes)


Claims = Mapping[Name, Claim]
"""The claims of all programs on one GPU."""


@attrs.frozen
class Rates:
    """Rates of the bus in each direction while the other is as busy, bytes a second."""

    out: int
    """Rate from the GPU to the host."""
    into: int
    """Rate from the host to the GPU."""

    def into_usec(self, nbytes: int) -> int:
        """Return the microseconds that `nbytes` take to the GPU, rounded up."""
        return -(-nbytes * 1_000_000 // self.into)

    def out_usec(self, nbytes: int) -> int:
        """Return the microseconds that `nbytes` take to the host, rounded up."""
        return -(-nbytes * 1_000_000 // self.out)

    def into_in(self, usec: int) -> int:
        """Return the bytes that come to the GPU in `usec` microseconds."""
        return usec * self.into // 1_000_000

    def out_in(self, usec: int) -> int:
        """Return the bytes that go to the host in `usec` microseconds."""
        return usec * self.out // 1_000_000
