"""The size of a step: as much memory as the program gives back by itself in the time that it has."""

from __future__ import annotations

import attrs


@attrs.define
class Pace:
    """The bytes asked for in one step, between `least` and `most`.

    A program that listens to its usermemfd has 50 ms before the rest is moved. A step of which more than an eighth had
    to be moved was too large, so the next one is half as large. After a step of which less was moved, the next one may
    be half as large again.
    """

    least: int
    """Smallest step, bytes."""
    most: int
    """Largest step, bytes."""
    step: int = attrs.field(init=False)
    """Next step, bytes."""

    def __attrs_post_init__(self) -> None:
        self.step = self.most

    def took(self, asked: int, moved: int) -> None:
        """Adapt the step after `asked` bytes were asked for and `moved` bytes went to the host."""
        if moved > asked // 8:
            self.step = max(self.least, self.step // 2)
        elif asked >= self.step // 2:
            self.step = min(self.most, self.step * 3 // 2)
