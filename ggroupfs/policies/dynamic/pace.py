"""How much is asked for at a time: as much as the program gives back by itself in the time that it has."""

from __future__ import annotations

import attrs


@attrs.define
class Pace:
    """The bytes of a step, between `least` and `most`.

    A program that listens to its usermemfd has 50 ms before the rest is moved. So a step of which a part was moved was
    too large, and the next is half as large; after one of which nothing was, the next may be half as large again.
    """

    least: int
    """Bytes."""
    most: int
    """Bytes."""
    step: int = attrs.field(init=False)
    """Bytes to ask for next."""

    def __attrs_post_init__(self) -> None:
        self.step = self.most

    def took(self, asked: int, moved: int) -> None:
        """So many bytes were asked for, and so many went to the host."""
        if moved > asked // 8:
            self.step = max(self.least, self.step // 2)
        elif asked >= self.step // 2:
            self.step = min(self.most, self.step * 3 // 2)
