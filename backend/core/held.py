"""Memory that a group holds, integrated over time: what a bill goes by, as it has the size and how long it was held."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """Memory of a group since some beginning, exact at each change."""

    byte_usec: int = 0
    """Bytes times microseconds, up to `at_usec`."""
    nbytes: int = 0
    """Bytes that are held since then."""
    at_usec: int = 0
    """Time of the last change, in microseconds of the clock of this boot; 0 for none yet."""

    def until(self, now_usec: int) -> int:
        """Return the byte-microseconds up to now."""
        return self.byte_usec + self.nbytes * max(0, now_usec - self.at_usec)

    def changed(self, nbytes: int, now_usec: int) -> Held:
        """Return the same where `nbytes` are held from now on."""
        return self if nbytes == self.nbytes else Held(self.until(now_usec), nbytes, now_usec)
