"""Memory that a group holds, integrated over time: bills go by it, as it has both the size and the duration."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """The integral of a group's memory since some beginning, exact at each change."""

    byte_usec: int = 0
    """Byte-microseconds up to `at_usec`."""
    nbytes: int = 0
    """Bytes held since `at_usec`."""
    at_usec: int = 0
    """Time of the last change, in microseconds of the clock of this boot; 0 for none yet."""

    def until(self, now_usec: int) -> int:
        """Return the byte-microseconds up to `now_usec`."""
        return self.byte_usec + self.nbytes * max(0, now_usec - self.at_usec)

    def changed(self, nbytes: int, now_usec: int) -> Held:
        """Return the integral with `nbytes` held from `now_usec` on."""
        return self if nbytes == self.nbytes else Held(self.until(now_usec), nbytes, now_usec)
